"""What must be in place before DeepSpeed is imported and before it shards the first parameter, and what it has to know
of the ranks.

The package imports this module first, before any that imports deepspeed.
"""

import logging
import os

import torch

if not torch.cuda.is_available():
    # Read by deepspeed when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# zero.Init patches tensor constructors. If transformers imported torch._dynamo lazily afterwards, the import would meet
# the patched signatures and fail with a TypeError.
import deepspeed
import torch._dynamo
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups

from vcore_ds.common.imports import without_compiler
from vcore_ds.distributed import layout

with without_compiler():
    # When an engine starts, DeepSpeed asks whether the optimizer is its Muon, which no recipe has.
    import deepspeed.runtime.zero.muon.original_muon


_served: torch.distributed.ProcessGroup | None = None
"""The process group that DeepSpeed works on."""


def start_deepspeed() -> None:
    """Makes DeepSpeed use the existing process group. A collective; calling it again has no effect."""
    global _served
    if _served is not torch.distributed.group.WORLD:
        # It keeps groups of a process group that has ended: of the last command in this process.
        groups._release_process_group_references()
        # For reductions. One that it makes itself has PyTorch's limit of time, not the recipe's.
        groups._WORLD_GROUP = layout.copy_of_job()
        _served = torch.distributed.group.WORLD
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.utils.logger.addFilter(_concerns_the_user)
    if get_accelerator().device_name() == "cpu":
        # It would be compiled at first use, for minutes, and serves inference only; gloo does everything here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def _concerns_the_user(record: logging.LogRecord) -> bool:
    """False for the warning of an optimizer that DeepSpeed has not tried under ZeRO: torch's SGD, with which ours is
    tested."""
    return "untested optimizer" not in record.getMessage()


class TensorAxis:
    """The tensor-parallel group, as DeepSpeed asks for them ("mpu").

    With it ZeRO-3 shards over the other axes, and the norm of the gradient is taken over all parts of each layer.
    Parameters without the mark `tensor_model_parallel` count once.
    """

    @staticmethod
    def get_model_parallel_rank() -> int:
        return layout.rank("tensor")

    @staticmethod
    def get_model_parallel_world_size() -> int:
        return layout.size("tensor")

    @staticmethod
    def get_model_parallel_group() -> torch.distributed.ProcessGroup:
        return layout.group("tensor")

    @staticmethod
    def get_data_parallel_rank() -> int:
        return layout.rank("shards")

    @staticmethod
    def get_data_parallel_world_size() -> int:
        return layout.size("shards")

    @staticmethod
    def get_data_parallel_group() -> torch.distributed.ProcessGroup:
        return layout.group("shards")

    @classmethod
    def if_shared(cls) -> "type[TensorAxis] | None":
        """None where every rank has whole layers, which DeepSpeed takes for granted."""
        return cls if layout.size("tensor") > 1 else None
