"""GPUs that PyTorch cannot use stop every command that computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launch_scripts import gpus
from tests.helpers.commands import REPOSITORY
from vcore_ds.distributed import device

VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16-I3)\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
)


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's /dev, with a driver and one GPU that can be opened, for a PyTorch that can use none."""
    (tmp_path / "version").write_text(VERSION)
    monkeypatch.setattr(device, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(device, "DEVICES", tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device._refuse_unused_gpus.cache_clear()
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "nvidia0").symlink_to(tmp_path / "missing")  # cannot be opened
    (tmp_path / "nvidia1").touch()
    return tmp_path


def fail() -> None:
    raise RuntimeError("Error 802: system not yet initialized")


@pytest.mark.parametrize("built_for, reason", [(None, "built without CUDA"), ("13.0", "Error 802: system not yet")])
def test_the_message_names_driver_version_and_reason(
    devices: Path, monkeypatch: pytest.MonkeyPatch, capsys, built_for: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "init", fail)
    assert gpus.main() == 2
    printed, message = capsys.readouterr()
    start = f"vcore-ds: GPUs: found 1 with driver 570.86.15, which PyTorch {torch.__version__} cannot use: "
    assert not printed and message.startswith(start) and reason in message and "DS_ACCELERATOR=cpu" in message


@pytest.mark.parametrize(
    "variable, value, expected",
    [("CUDA_VISIBLE_DEVICES", value, 0) for value in ("", "-1", "NoDevFiles")]
    + [("CUDA_VISIBLE_DEVICES", value, 2) for value in ("0,1", "GPU-8932f937", "MIG-3")]
    + [("DS_ACCELERATOR", "cpu", 0)],
)
def test_hidden_gpus_are_not_refused(
    devices: Path, monkeypatch: pytest.MonkeyPatch, capsys, variable: str, value: str, expected: int
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv(variable, value)
    assert gpus.main() == expected
    assert capsys.readouterr().out == ("" if expected else "cpu\n")


def test_gpus_that_can_be_used_or_not_be_opened_are_not_refused(
    devices: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpus.main() == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (devices / "nvidia1").unlink()
    assert gpus.main() == 0
    assert capsys.readouterr().out == "cuda\ncpu\n"


@pytest.mark.parametrize("script", ["quickstart.sh", "wrong_traces.sh"])
def test_launch_scripts_stop_with_the_message(script: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *gpus.py) echo "GPUs: found" >&2; exit 2;; *) "{sys.executable}" "$@";; esac'
    )
    python.chmod(0o755)
    (tmp_path / "launch_scripts").mkdir()
    (tmp_path / "launch_scripts" / script).write_text((REPOSITORY / "launch_scripts" / script).read_text())
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    environment["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    line = ["bash", f"{tmp_path}/launch_scripts/{script}"]
    done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr == "GPUs: found\n"
    assert done.stdout in ("", "Starting; importing PyTorch and DeepSpeed takes some seconds\n")
