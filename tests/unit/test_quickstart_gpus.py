"""Where the quickstart runs: on the GPUs that PyTorch can use, with a reason where there are others."""

import importlib.metadata
from pathlib import Path

import pytest
import torch

from vcore_ds.commands.quickstart import session as gpus


@pytest.fixture(params=["GPU 0: NVIDIA H200 (UUID: GPU-1)", "NVIDIA-SMI has failed: no driver", None])
def lists_one(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether nvidia-smi lists a GPU; where the parameter is None there is no such command."""
    if request.param is not None:
        command = tmp_path / "nvidia-smi"
        command.write_text(f"#!/bin/sh\necho '{request.param}'\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    return request.param is not None and request.param.startswith("GPU 0")


@pytest.mark.parametrize(
    "version, built_for, is_available, reason",
    [
        ("2.13.0+cpu", None, False, "PyTorch 2.13.0+cpu is a build without CUDA"),
        ("2.13.0", None, False, "PyTorch 2.13.0 is a build without CUDA"),
        ("2.13.0+cu130", "13.0", False, "PyTorch 2.13.0+cu130 is a build for CUDA 13.0 that can use none of them"),
        ("2.13.0", "13.0", True, None),
        ("2.13.0+rocm7.1", None, True, None),
    ],
)
def test_pytorch_decides_and_unused_gpus_have_a_reason(
    version: str,
    built_for: str | None,
    is_available: bool,
    reason: str | None,
    lists_one: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    assert gpus.main() == (0 if is_available else 1)
    said = capsys.readouterr().err
    assert reason in said if reason and lists_one else said == "", said
