"""Where the quickstart runs: on the GPUs that PyTorch can use, with a reason where there are others."""

import importlib.metadata
import re
from pathlib import Path

import pytest
import torch

from vcore_ds.commands.quickstart import gpus

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("listed", ["GPU 0: NVIDIA H200 (UUID: GPU-1)", "NVIDIA-SMI has failed: no driver", None])
def test_pytorch_decides_and_unused_gpus_have_a_reason(
    listed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`listed`: what nvidia-smi prints; None where there is no such command."""
    if listed is not None:
        command = tmp_path / "nvidia-smi"
        command.write_text(f"#!/bin/sh\necho '{listed}'\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    for version, built_for, is_available, reason in (
        ("2.13.0+cpu", None, False, "PyTorch 2.13.0+cpu is a build without CUDA"),
        ("2.13.0", None, False, "PyTorch 2.13.0 is a build without CUDA"),
        ("2.13.0+cu130", "13.0", False, "PyTorch 2.13.0+cu130 is a build for CUDA 13.0 that can use none of them"),
        ("2.13.0", "13.0", True, None),
        ("2.13.0+rocm7.1", None, True, None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(importlib.metadata, "version", lambda name, version=version: version)
            patch.setattr(torch.version, "cuda", built_for)
            patch.setattr(torch.cuda, "is_available", lambda is_available=is_available: is_available)
            assert gpus.main() == (0 if is_available else 1)
        said = capsys.readouterr().err
        assert reason in said if reason and listed and listed.startswith("GPU 0") else said == "", said


@pytest.mark.parametrize("script", ["quickstart.sh", "wrong_traces.sh"])
def test_the_launch_scripts_ask_this_file(script: str) -> None:
    """A file that is not there would fail as one without GPUs does."""
    text = (REPOSITORY / "launch_scripts" / script).read_text()
    (named,) = re.findall(r'! python -P "?(?:\$repository/)?([\w/]+\.py)', text)
    assert REPOSITORY / named == Path(gpus.__file__)
