"""Whether the quickstart runs on GPUs: on those that PyTorch can use, which nvidia-smi cannot tell.

As a script it exits with 0 for GPUs and 1 for the CPU, and says why where GPUs are left unused.
"""

import importlib.metadata
import shutil
import subprocess
import sys


def main() -> int:
    version = importlib.metadata.version("torch")
    built_for = None
    if not version.endswith("+cpu"):  # whose import takes seconds and can say nothing else
        import torch

        if torch.cuda.is_available():
            return 0
        built_for = torch.version.cuda
    if lists_gpus():
        print(why_unused(version, built_for), file=sys.stderr, flush=True)
    return 1


def lists_gpus() -> bool:
    """Whether nvidia-smi lists any."""
    command = shutil.which("nvidia-smi")
    return command is not None and b"GPU " in subprocess.run([command, "-L"], capture_output=True).stdout


def why_unused(version: str, built_for: str | None) -> str:
    """Why PyTorch uses none of the GPUs that nvidia-smi lists.

    Args:
        version: of PyTorch.
        built_for: version of CUDA; None for a build without CUDA.
    """
    if built_for is None:
        reason = "is a build without CUDA; expected the build that fits the driver, as README.md says"
    else:
        reason = f"is a build for CUDA {built_for} that can use none of them; expected a driver that is new enough"
    return f"On the CPU: nvidia-smi lists GPUs, but PyTorch {version} {reason}"


if __name__ == "__main__":
    sys.exit(main())
