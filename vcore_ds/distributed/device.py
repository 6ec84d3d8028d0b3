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


def peak_memory_bytes() -> int:
    """Highest memory this rank has used: allocated on the GPU, or resident on a CPU-only machine."""
    if uses_gpu():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
