"""Print `cuda` where PyTorch can use a GPU, else `cpu`. Exits with 2 and a message where there are GPUs that it cannot
use.

The launch scripts run this file before a launcher.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed
from vcore_ds.common.errors import UserError
from vcore_ds.distributed.device import uses_gpu


def main() -> int:
    """Print the accelerator and return the exit code."""
    try:
        print("cuda" if uses_gpu() else "cpu")
    except UserError as error:
        print(f"vcore-ds: {error}", file=sys.stderr)
        return error.EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
