"""GPUs of this machine that PyTorch cannot use, and the build of PyTorch that fits their driver. Imports no torch."""

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from vcore_ds.common.errors import UserError

OLDEST_DRIVERS = {12: 525, 13: 580}
"""CUDA's major version -> the oldest driver branch for its builds. Source:
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""

BLACKWELL = re.compile(r"\bG?B\d00\b|Blackwell|RTX 50\d0")
"""GPUs for which only builds for CUDA 12.8 and newer have kernels."""

LAST_CUDA_12 = (2, 14)
LAST_CUDA_12_FOR_BLACKWELL = "2.11.0"
"""The last versions with builds for CUDA 12.6, and for 12.8. Sources: PyTorch's issues 190385 and 178665."""

NVIDIA_SMI_SECONDS = 60.0  # timeout of nvidia-smi, which hangs where a GPU does


class Gpus(NamedTuple):
    """Names of the GPUs, and version of their driver."""

    names: tuple[str, ...]
    driver: str


def refuse_unused_gpus(torch_version: str, built_for: str | None, reason: str = "") -> None:
    """Raise UserError if this machine has GPUs; called where PyTorch can use none, so that no run meant for GPUs takes
    days on the CPUs. GPUs that CUDA_VISIBLE_DEVICES hides, or that this process may not open (a container or SLURM job
    without GPUs), do not count. `torch_version`: `torch.__version__`; `built_for`: `torch.version.cuda`, None for a
    build without CUDA; `reason`: PyTorch's message about why CUDA does not initialise."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = None if visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible) else list_gpus()
    if gpus is None:
        return
    branch = int(gpus.driver.partition(".")[0])
    oldest = 0 if built_for is None else OLDEST_DRIVERS.get(int(built_for.partition(".")[0]), 0)
    build = find_fitting_build(torch_version, branch, any(BLACKWELL.search(name) for name in gpus.names))
    remedy = "update the driver" if build is None else f"install the build for this driver: {build}"
    if built_for is None:
        why = "it is built without CUDA"
    elif branch < oldest:
        why = f"its CUDA {built_for} needs driver {oldest} or newer"
    else:
        why = reason
        remedy = (
            "look at nvidia-smi; NVSwitch machines need nvidia-fabricmanager, containers "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    raise UserError(
        f"GPUs: found {len(gpus.names)} x {gpus.names[0]} with driver {gpus.driver}, which PyTorch {torch_version} "
        f"cannot use: {why}; {remedy}; or compute on the CPUs with DS_ACCELERATOR=cpu"
    )


def list_gpus(root: Path = Path("/")) -> Gpus | None:
    """List the GPUs by nvidia-smi, or without it by the driver's files below `root`; None if there are none."""
    done = run_nvidia_smi("name,driver_version")
    if done is not None and (rows := re.findall(r"^(.+), (\d[\d.]+)$", done.stdout, re.MULTILINE)):
        return Gpus(tuple(name for name, _ in rows), rows[0][1])
    # nvidia-smi is missing in slim images, and fails while driver and library versions differ, after an update.
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    # /proc lists all GPUs of the machine, also in a container or a job that may use none of them.
    if not folders or not any(_can_open(device) for device in (root / "dev").glob("nvidia[0-9]*")):
        return None
    version = re.search(r" (\d{3}\.[\d.]+) ", (root / "proc/driver/nvidia/version").read_text())
    models = [re.search(r"^Model:\s*(.+)$", (folder / "information").read_text(), re.MULTILINE) for folder in folders]
    names = tuple("GPU" if model is None else model[1].strip() for model in models)
    return None if version is None else Gpus(names, version[1])


def run_nvidia_smi(fields: str) -> subprocess.CompletedProcess[str] | None:
    """Query these fields of all GPUs, one line each; None if nvidia-smi is missing or does not answer."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _can_open(device: Path) -> bool:
    """Whether the kernel lets this process use a device; permission bits do not show the limits of a cgroup."""
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError:
        return False
    return True


def find_fitting_build(torch_version: str, branch: int, is_blackwell: bool) -> str | None:
    """Find the command that installs PyTorch for a driver branch; None if no build supports the driver."""
    version = torch_version.partition("+")[0]
    if branch >= OLDEST_DRIVERS[13]:
        build = "cu130"
    elif is_blackwell:
        version, build = LAST_CUDA_12_FOR_BLACKWELL, "cu128"
    elif branch >= OLDEST_DRIVERS[12]:
        build = "cu126"
        if tuple(map(int, version.split(".")[:2])) > LAST_CUDA_12:
            version = f"{LAST_CUDA_12[0]}.{LAST_CUDA_12[1]}.0"
    else:
        return None
    return f"pip install 'torch=={version}+{build}' --index-url https://download.pytorch.org/whl/{build}"
