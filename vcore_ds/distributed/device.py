"""This rank's device: total, available and peak memory, and folders for compiled kernels."""

import functools
import os
import re
import resource
import stat
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from vcore_ds.common.errors import UserError, first_line

# PyTorch warns on every rank about a driver that is too old; `uses_gpu` raises one error with a remedy.
warnings.filterwarnings("ignore", "CUDA initialization", UserWarning)


def local_rank() -> int:
    """This rank's index on its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_local_ranks() -> int:
    """Number of ranks on this node: LOCAL_WORLD_SIZE under torchrun, LOCAL_SIZE under the deepspeed launcher, otherwise
    all ranks of the job."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return 1


CONTROL_GROUP = Path("/sys/fs/cgroup")  # the container's cgroup (version 2), with its limits

STATUS = Path("/proc/self/status")
"""Linux's status of this process, with the peak of its resident memory (VmHWM)."""

DEVICES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia/version")  # of the kernel module of NVIDIA's driver

CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # value that resets the peak of resident memory, see proc_pid_clear_refs(5)


def uses_gpu() -> bool:
    """Whether ranks compute on GPUs; DeepSpeed's variable DS_ACCELERATOR=cpu keeps them on the CPU. Raises UserError,
    with a remedy, if this machine has GPUs that PyTorch cannot use."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return False
    return torch.cuda.is_available() or not _refuse_unused_gpus()


@functools.cache
def _refuse_unused_gpus() -> bool:
    """Raise UserError if this machine has GPUs; called where PyTorch can use none, so that no run meant for GPUs takes
    days on the CPUs. GPUs that CUDA_VISIBLE_DEVICES hides, or that this process may not open (a container or SLURM job
    without GPUs), do not count."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [path for path in DEVICES.glob("nvidia[0-9]*") if _can_open(path)]
    if not gpus or (visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible)):
        return True
    reason = "it is built without CUDA"
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            reason = first_line(error)
    raise UserError(
        f"GPUs: found {len(gpus)} with driver {find_driver_version()}, which PyTorch {torch.__version__} cannot use: "
        f"{reason}; expected a build that fits the driver. Install it (docs/gpu.md), or compute on the CPUs with "
        "DS_ACCELERATOR=cpu"
    )


def _can_open(path: Path) -> bool:
    """Whether the kernel lets this process use a device; permission bits do not show the limits of a cgroup."""
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def find_driver_version() -> str | None:
    """Find the version of NVIDIA's driver on this machine; None without one."""
    with suppress(OSError):
        if match := re.search(r" (\d{3}\.[\d.]+) ", DRIVER.read_text()):
            return match[1]
    return None


def device() -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if uses_gpu() else torch.device("cpu")


class PeakMemory:
    """Peak memory of this process and of a phase: allocated on the GPU, or resident on a CPU-only machine. Reading it
    does not synchronise with the device."""

    def __init__(self) -> None:
        self._before = 0
        self._counts_phases = True

    def start_phase(self) -> None:
        self._before = max(self._before, _peak_bytes())
        if uses_gpu():
            torch.cuda.reset_peak_memory_stats()
        else:
            try:
                CLEAR_REFS.write_text(RESET_PEAK)
            except OSError:
                self._counts_phases = False

    def phase_bytes(self) -> int | None:
        """Peak bytes since `start_phase`; None if the kernel cannot reset a process's peak."""
        return _peak_bytes() if self._counts_phases else None

    def process_bytes(self) -> int:
        return max(self._before, _peak_bytes())


peak_memory = PeakMemory()  # the instance of this process; more than one would reset each other's peaks


def _peak_bytes() -> int:
    if uses_gpu():
        return torch.cuda.max_memory_allocated()
    # Preferred to getrusage, whose peak includes the parent process's.
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total_memory_bytes() -> int:
    """Total memory of this rank's GPU, or its share of the host's memory on a CPU-only machine."""
    if uses_gpu():
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_local_ranks()


def available_memory_bytes() -> int:
    """Memory of this rank's GPU that other processes do not use, or its share of the host's available memory."""
    if not uses_gpu():
        return available_host_bytes()
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()


def available_host_bytes() -> int:
    """This rank's share of the available memory of the machine, or of the container."""
    num_bytes = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no cgroup, or no limit
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])  # page cache that the kernel can reclaim
        num_bytes = min(num_bytes, max(0, limit - used))
    return num_bytes // num_local_ranks()


def use_local_compile_caches() -> None:
    """Make Triton compile into a folder per rank, and PyTorch and DeepSpeed into one per node, in the node's temporary
    folder; variables that the user has set are kept. Triton's default is the home folder, where the ranks of all nodes
    that share it overwrite each other's files (https://github.com/triton-lang/triton/issues/2688)."""
    folder = local_cache_folder()
    if folder is not None:
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton" / f"rank_{local_rank()}"))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))


def local_cache_folder() -> Path | None:
    """This user's folder in the node's temporary folder (TMPDIR, or /tmp); None if it cannot be made, or belongs to
    another user, whose code would be run."""
    folder = Path(tempfile.gettempdir()) / f"vcore_ds_{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    return folder if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() else None
