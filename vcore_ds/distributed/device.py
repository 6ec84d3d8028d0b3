"""The device of this rank, how much memory it has, and how much of it was used."""

import os
import resource
from contextlib import suppress
from pathlib import Path

import psutil
import torch

# The node of this rank, from the environment variables of the launcher that started it. Standard library only.


def local_rank() -> int:
    """This rank's position among the ranks of its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_local_ranks() -> int:
    """Number of ranks on this node: LOCAL_WORLD_SIZE under torchrun, LOCAL_SIZE under the deepspeed launcher. Where
    neither is set, all ranks of the job are taken to be on this node."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return 1


CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Limits of the container that the process runs in (version 2)."""

STATUS = Path("/proc/self/status")
"""What Linux says of this process, the peak of its resident memory (VmHWM) among it."""

CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What Linux takes there to count a process's peak from now on (proc_pid_clear_refs(5))."""


def uses_gpu() -> bool:
    """Whether ranks compute on GPUs; DS_ACCELERATOR=cpu, DeepSpeed's own variable, keeps them on the CPU."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def device() -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if uses_gpu() else torch.device("cpu")


class PeakMemory:
    """The highest memory that this rank has used, of the process and of a phase: allocated on the GPU, or resident on a
    machine without one. Asking waits for nothing."""

    def __init__(self) -> None:
        self._before = 0
        self._counts_phases = True

    def start_phase(self) -> None:
        """Makes `of_phase` count from here."""
        self._before = max(self._before, _peak_bytes())
        if uses_gpu():
            torch.cuda.reset_peak_memory_stats()
        else:
            try:
                CLEAR_REFS.write_text(RESET_PEAK)
            except OSError:
                self._counts_phases = False

    def of_phase(self) -> int | None:
        """Bytes since `start_phase`; None where the kernel cannot count a part of a process's life."""
        return _peak_bytes() if self._counts_phases else None

    def of_process(self) -> int:
        """Bytes since the first use."""
        return max(self._before, _peak_bytes())


peak_memory = PeakMemory()
"""That of this process: the device counts once for all who ask."""


def _peak_bytes() -> int:
    if uses_gpu():
        return torch.cuda.max_memory_allocated()
    # Not getrusage where there is a choice: its peak never falls below that of the process that started this one.
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total_memory_bytes() -> int:
    """The memory of this rank's GPU, or on a CPU-only machine its share of the host's: the same in every attempt."""
    if uses_gpu():
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_local_ranks()


def available_memory_bytes() -> int:
    """What this rank may use of its device: what other processes leave of a GPU, or its share of the host's memory."""
    if not uses_gpu():
        return available_host_bytes()
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved()


def available_host_bytes() -> int:
    """This rank's share of the memory that the machine, or the container's limit, has left."""
    num_bytes = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no control group, or none with a limit
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])  # given back where memory is short
        num_bytes = min(num_bytes, max(0, limit - used))
    return num_bytes // num_local_ranks()
