"""GPUs that PyTorch cannot use stop every command that computes, with the build that fits their driver."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.commands import REPOSITORY
from vcore_ds.commands.quickstart import gpus
from vcore_ds.common.errors import UserError
from vcore_ds.distributed import device
from vcore_ds.distributed.unused_gpus import list_gpus, refuse_unused_gpus

H100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA B200"
INDEX = "https://download.pytorch.org/whl"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes an nvidia-smi that prints `text` and exits with `code`; no other one is on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)

    def write(text: str, code: int = 0) -> Path:
        command = folder / "nvidia-smi"
        command.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
        command.chmod(0o755)
        return folder

    return write


def list_gpu_lines(name: str, driver: str) -> str:
    return "\n".join([f"{name}, {driver}"] * 8)


@pytest.mark.parametrize(
    ("name", "driver", "torch_version", "built_for", "expected"),
    [
        (H100, "570.86.15", "2.13.0+cu130", "13.0", ["needs driver 580", f"2.13.0+cu126' --index-url {INDEX}/cu126"]),
        (H100, "535.104", "2.11.0", "13.0", ["needs driver 580", f"2.11.0+cu126' --index-url {INDEX}/cu126"]),
        (H100, "570.86.15", "2.16.1", "13.2", ["needs driver 580", f"2.14.0+cu126' --index-url {INDEX}/cu126"]),
        (B200, "570.86.15", "2.13.0", "13.0", ["needs driver 580", f"2.11.0+cu128' --index-url {INDEX}/cu128"]),
        (H100, "470.82.01", "2.11.0+cu126", "12.6", ["needs driver 525", "update the driver"]),
        (H100, "580.65.06", "2.13.0+cpu", None, ["without CUDA", f"2.13.0+cu130' --index-url {INDEX}/cu130"]),
        (H100, "580.65.06", "2.13.0", "13.0", ["Error 802: system not yet initialized", "nvidia-fabricmanager"]),
        (H100, "600.1", "3.0.0", "14.0", ["Error 802: system not yet initialized"]),
    ],
)  # fmt: skip
def test_the_message_names_both_versions_and_the_fitting_build(
    nvidia_smi: Callable[..., Path],
    name: str,
    driver: str,
    torch_version: str,
    built_for: str | None,
    expected: list[str],
) -> None:
    nvidia_smi(list_gpu_lines(name, driver))
    with pytest.raises(UserError) as caught:
        refuse_unused_gpus(torch_version, built_for, "Error 802: system not yet initialized")
    start = f"GPUs: found 8 x {name} with driver {driver}, which PyTorch {torch_version} cannot use: "
    message = str(caught.value)
    assert message.startswith(start) and message.endswith("or compute on the CPUs with DS_ACCELERATOR=cpu")
    assert all(part in message for part in expected), message


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_not_refused(
    nvidia_smi: Callable[..., Path], visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(list_gpu_lines(H100, "570.86.15"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    refuse_unused_gpus("2.13.0", "13.0")
    for chosen in ("0,1", "GPU-8932f937", "MIG-3"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        with pytest.raises(UserError):
            refuse_unused_gpus("2.13.0", "13.0")


@pytest.mark.parametrize("answer", [None, "Failed to initialize NVML: Driver/library version mismatch"])
def test_without_nvidia_smi_the_files_of_the_driver_are_read(
    nvidia_smi: Callable[..., Path], answer: str | None, tmp_path: Path
) -> None:
    if answer is not None:
        nvidia_smi(answer, code=18)
    assert list_gpus(tmp_path) is None
    driver = tmp_path / "proc/driver/nvidia"
    for bus in ("0000:18:00.0", "0000:2a:00.0"):
        (driver / "gpus" / bus).mkdir(parents=True)
        (driver / "gpus" / bus / "information").write_text(f"Model: \t\t {B200}\nIRQ:   \t\t 17\n")
    (driver / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16-I3)\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
    )
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert list_gpus(tmp_path) is None, "a container without GPUs sees the /proc of its machine"
    (tmp_path / "dev/nvidia0").symlink_to(tmp_path / "missing")
    assert list_gpus(tmp_path) is None, "a device that cannot be opened"
    (tmp_path / "dev/nvidia1").touch()
    assert list_gpus(tmp_path) == ((B200, B200), "570.86.15")


def test_gpus_are_refused_only_where_pytorch_cannot_use_them(
    nvidia_smi: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    nvidia_smi(list_gpu_lines(H100, "570.86.15"))

    def run_gpus_command(version: str, built_for: str | None, is_available: bool) -> tuple[int, str, str]:
        device._refuse_unused_gpus.cache_clear()
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
        return gpus.main(), *capfd.readouterr()

    assert run_gpus_command("2.13.0+cu130", "13.0", True) == (0, "cuda\n", "")
    assert run_gpus_command("2.13.0+rocm7.1", None, True) == (0, "cuda\n", "")
    for version, built_for in (("2.13.0+cpu", None), ("2.13.0", None), ("2.13.0+cu130", "13.0")):
        code, printed, message = run_gpus_command(version, built_for, False)
        assert (code, printed) == (2, "") and message.startswith("vcore-ds: GPUs: found 8 x NVIDIA H100 80GB HBM3")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert not device.uses_gpu()
    monkeypatch.delenv("DS_ACCELERATOR")
    nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", code=9)
    assert run_gpus_command("2.13.0+cpu", None, False) == (0, "cpu\n", "")


@pytest.mark.parametrize("script", ["quickstart.sh", "wrong_traces.sh"])
def test_launch_scripts_stop_with_the_message(nvidia_smi: Callable[..., Path], script: str, tmp_path: Path) -> None:
    folder = nvidia_smi(list_gpu_lines(H100, "470.82.01"))
    environment = os.environ | {"PATH": f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin"}
    line = ["bash", f"{REPOSITORY}/launch_scripts/{script}"]
    done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.count("vcore-ds: GPUs: found 8 x NVIDIA H100") == 1, done.stderr
    assert done.stdout in ("", "Starting; importing PyTorch and DeepSpeed takes some seconds\n")
