"""Experts of a mixture, each rank of an expert-parallel group with its block of them.

A layer's experts are parameters `[E, ...]`. Here they become parameters `[E / N, ...]`, which ZeRO-3 shards over
`expert_shards`, the ranks that have the same block. DeepSpeed knows of such parameters, for a mixture layer of its own:
those with its marks are gathered and reduced over their group, divided by all ranks like other gradients, and counted
in the norm of the gradient over both axes.
"""

import deepspeed
from deepspeed.utils import groups
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from vcore_ds.distributed import layout
from vcore_ds.engine.partitioned import EXPERT_FAMILY, PartitionedParameter, as_partitioned
from vcore_ds.errors import UserError
from vcore_ds.models.expert_exchange import mark_divided
from vcore_ds.models.experts import are_ours

_NAME = "vcore_experts"
"""Under which DeepSpeed looks up the process groups of experts' parameters."""


def divide_experts(model: nn.Module) -> None:
    """Leaves each rank its block of the experts, where `expert` has more than one rank. A collective.

    After the weights are loaded, one parameter of a layer at a time: files hold experts joined, one by one, or
    transposed, and what loads them knows of whole ones only. Before the optimizer is built, as parameters are replaced.

    Args:
        model: in shards already: DeepSpeed gives all ranks the first one's values of whatever is not.

    Raises:
        UserError: there are no experts that can be divided, not into so many parts, or they have adapters.
    """
    num_ranks = layout.size("expert")
    if num_ranks == 1:
        return
    if any(isinstance(module, ParamWrapper) for module in model.modules()):
        raise _refused("with adapters on experts", "1, or lora.target_modules without experts")
    found = [module for module in model.modules() if are_ours(module)]
    if not found:
        raise _refused("on a model without experts that transformers computes by its interface for experts", "1")
    groups._EXPERT_PARALLEL_GROUP[_NAME] = layout.group("expert")
    groups._EXPERT_DATA_PARALLEL_GROUP[_NAME] = layout.group("expert_shards")
    for experts in found:
        num_experts: int = experts.num_experts  # type: ignore[assignment]  # not a tensor
        if num_experts % num_ranks:
            raise _refused(f"on a model with {num_experts} experts a layer", f"a divisor of {num_experts}")
        for name, parameter in list(experts.named_parameters(recurse=False)):
            setattr(experts, name, _own_block(as_partitioned(parameter), num_experts // num_ranks))
        mark_divided(experts)


def _refused(found: str, expected: str) -> UserError:
    return UserError(f"parallel.expert: found {layout.size('expert')} {found}; expected {expected}")


def _own_block(parameter: PartitionedParameter, num_own: int) -> PartitionedParameter:
    """This rank's experts of a parameter of all of them, in shards like it."""
    start = layout.rank("expert") * num_own
    with deepspeed.zero.GatheredParameters([parameter]):
        values = parameter.data[start : start + num_own].clone()
    block = as_partitioned(nn.Parameter(values, requires_grad=parameter.requires_grad))
    block.ds_zero_placement_family = EXPERT_FAMILY
    block.ds_zero_partition_group_name = _NAME
    block.ds_zero_partition_process_group = layout.group("expert_shards")
    parameter.convert_to_zero_parameters(param_list=[block])
    # What DeepSpeed has attached to the old one refers to it, so it would keep its shard for a while.
    parameter.ds_tensor.data = values.new_empty(0)
    return block
