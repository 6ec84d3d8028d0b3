"""What ZeRO-3 adds to a parameter, in types."""

from typing import cast

import torch
from torch import Tensor, nn


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

    def partition(self) -> None:
        """Releases the whole values, and keeps the shard."""


def as_partitioned(parameter: nn.Parameter) -> PartitionedParameter:
    """The same parameter, which ZeRO-3 has divided."""
    return cast(PartitionedParameter, parameter)
