"""The device of this rank, and how much memory it has used."""

import os
import resource

import torch


def uses_gpu() -> bool:
    """Whether ranks compute on GPUs; DS_ACCELERATOR=cpu, DeepSpeed's own variable, keeps them on the CPU."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def device() -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if uses_gpu() else torch.device("cpu")


def total_memory_bytes() -> int:
    """The memory of this rank's GPU, or on a CPU-only machine its share of the host's: the same in every attempt."""
    if uses_gpu():
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def peak_memory_bytes() -> int:
    """Highest memory this rank has used: allocated on the GPU, or resident on a CPU-only machine."""
    if uses_gpu():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
