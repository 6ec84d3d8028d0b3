"""Settings that must be in place before DeepSpeed is imported and before it shards the first parameter.

The package imports this module first, before any that imports deepspeed.
"""

import os

import torch

if not torch.cuda.is_available():
    # Read by deepspeed when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# zero.Init patches tensor constructors. If transformers imported torch._dynamo lazily afterwards, the import would meet
# the patched signatures and fail with a TypeError.
import deepspeed  # noqa: E402
import torch._dynamo  # noqa: F401
from deepspeed.accelerator import get_accelerator  # noqa: E402


def start_deepspeed() -> None:
    """Makes DeepSpeed use the existing process group. Calling it again has no effect."""
    deepspeed.utils.logger.setLevel("WARNING")
    if get_accelerator().device_name() == "cpu":
        # It would be compiled at first use, for minutes, and serves inference only; gloo does everything here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
