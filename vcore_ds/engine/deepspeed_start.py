"""What has to be so before DeepSpeed is imported, and before it shards the first parameter.

The package imports this module first, before any that imports deepspeed.
"""

import os

import torch

if not torch.cuda.is_available():
    # Read by deepspeed when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# torch._dynamo is imported here, before any zero.Init: that patches tensor constructors, and if transformers imports
# torch._dynamo lazily afterwards, it meets the patched signatures and dies with a TypeError.
import deepspeed  # noqa: E402
import torch._dynamo  # noqa: F401
from deepspeed.accelerator import get_accelerator  # noqa: E402


def start_deepspeed() -> None:
    """Makes DeepSpeed use the process group that is there. Does nothing the second time."""
    deepspeed.utils.logger.setLevel("WARNING")
    if get_accelerator().device_name() == "cpu":
        # Compiled at first use (minutes) and used for inference only; gloo serves everything here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
