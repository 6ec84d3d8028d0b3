"""Print `cuda` where PyTorch can use a GPU, else `cpu`. Exits with 2 and a message where there are GPUs that it cannot
use.

The launch scripts run this file before a launcher.
"""

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a checkout need not be installed
from vcore_ds.common.errors import UserError
from vcore_ds.distributed.unused_gpus import refuse_unused_gpus


def main() -> int:
    try:
        version = importlib.metadata.version("torch")
        if version.endswith("+cpu"):  # importing a CPU build takes seconds, and its answer is known
            refuse_unused_gpus(version, None)
            print("cpu")
        else:
            from vcore_ds.distributed.device import uses_gpu

            print("cuda" if uses_gpu() else "cpu")
    except UserError as error:
        print(f"vcore-ds: {error}", file=sys.stderr)
        return error.EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
