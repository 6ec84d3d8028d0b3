"""What ZeRO-3 adds to a parameter, in types."""

from typing import cast

import torch
import torch.distributed
from torch import Tensor, nn

from vcore_ds.distributed import layout

EXPERT_FAMILY = "autoep_expert"
"""DeepSpeed's mark of parameters that are a rank's block of the experts."""


class PartitionedParameter(nn.Parameter):
    """A parameter with the attributes that DeepSpeed gives it when it divides it. There are no instances: DeepSpeed
    changes those of `nn.Parameter`."""

    ds_numel: int
    """Elements of the whole parameter."""
    ds_shape: torch.Size
    """Of the whole parameter."""
    ds_tensor: Tensor
    """This rank's shard, flat, with its padding."""
    ds_secondary_tensor: Tensor | None
    """The second shard of hierarchical partitioning; None without."""

    ds_zero_placement_family: str
    """`EXPERT_FAMILY`, or another or none."""
    ds_zero_partition_group_name: str
    """By which DeepSpeed finds the groups of experts."""
    ds_zero_partition_process_group: torch.distributed.ProcessGroup
    """The ranks that are to have shards of it, where they are not all."""

    def partition(self) -> None:
        """Releases the whole values, and keeps the shard."""

    def convert_to_zero_parameters(self, param_list: list[nn.Parameter]) -> None:
        """Divides others as this one was."""


def as_partitioned(parameter: nn.Parameter) -> PartitionedParameter:
    """The same parameter, which ZeRO-3 has divided."""
    return cast(PartitionedParameter, parameter)


def is_block_of_experts(parameter: nn.Parameter) -> bool:
    """Whether ZeRO-3 shards a parameter over `expert_shards` instead of `shards`."""
    return getattr(parameter, "ds_zero_placement_family", None) == EXPERT_FAMILY


def shape_of_all(parameter: PartitionedParameter) -> torch.Size:
    """The parameter's shape in the model; of a block of experts, that of all experts."""
    if not is_block_of_experts(parameter):
        return parameter.ds_shape
    num_own, *rest = parameter.ds_shape
    return torch.Size([num_own * layout.size("expert"), *rest])
