"""Exit with 0 where PyTorch can use a GPU, else with 1 and, where nvidia-smi lists GPUs, the reason.

The launch scripts run this file before anything of the package is imported.
"""

import importlib.metadata
import shutil
import subprocess
import sys


def main() -> int:
    version, built_for = importlib.metadata.version("torch"), None
    if not version.endswith("+cpu"):  # importing a CPU build takes seconds, and its answer is known
        import torch

        if torch.cuda.is_available():
            return 0
        built_for = torch.version.cuda
    command = shutil.which("nvidia-smi")
    if command is not None and b"GPU " in subprocess.run([command, "-L"], capture_output=True).stdout:
        reason = f"is a build for CUDA {built_for} that can use none of them; expected a driver that is new enough"
        if built_for is None:
            reason = "is a build without CUDA; expected the build that fits the driver, as README.md says"
        print(f"On the CPU: nvidia-smi lists GPUs, but PyTorch {version} {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
