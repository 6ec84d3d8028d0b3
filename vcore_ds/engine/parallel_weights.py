"""Weights of a Hugging Face model into the shards of parallel layers, and back.

In: of its part of every layer, each rank reads its ZeRO-3 shard from the files. Rows of a weight that belong together
in a rank's part are one range of bytes; of a weight that is divided by columns (the output projections of attention and
MLP) each row is one. Each byte is read once over all ranks, except norms, which every rank of a tensor group has.

Out: a layer is gathered over the ranks that hold its shards, then over those that share it.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers.modeling_utils import local_torch_dtype

from vcore_ds.common.errors import UserError
from vcore_ds.distributed import layout
from vcore_ds.engine.deepspeed_start import TensorAxis, start_deepspeed
from vcore_ds.engine.flat_shards import EXPERT_FAMILY, PartitionedParameter, as_partitioned
from vcore_ds.engine.loading import find_on_all_ranks, read_shards, shard_of, without_broadcast
from vcore_ds.models.experts import mark_sharded, uses_our_experts
from vcore_ds.models.megatron.configuration import copy_to_weight, pieces, runs
from vcore_ds.models.megatron.model import ParallelTokenLossModel
from vcore_ds.models.safetensors_ranges import Wanted
from vcore_ds.models.stored_weights import StoredWeights


def load_parallel(
    path: str,
    deepspeed_config: dict[str, Any],
    *,
    dtype: torch.dtype,
    gradient_checkpointing: bool,
    activation_offload: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> ParallelTokenLossModel:
    """The pretrained model in parallel layers, ready to train, of which this rank holds its shards only. A collective.

    Args:
        path: folder or hub id.
        dtype: of the parameters, the one that the configuration names.
        gradient_checkpointing, activation_offload: as in `ParallelTokenLossModel`.
        say: takes lines about the progress; called on the first rank alone.

    Raises:
        UserError: on all ranks alike, where there is no model that can be used, or weights cannot be read as they are
            stored.
    """
    start_deepspeed()
    config, weights = find_on_all_ranks(path)
    if weights.obstacle is not None:
        raise UserError(
            f"model.provider: found megatron together with model.path {path}, whose weights transformers has to "
            f"convert ({weights.obstacle}); expected plain safetensors files, of which each rank reads its parts"
        )
    init = deepspeed.zero.Init(
        data_parallel_group=layout.group("shards"),
        config_dict_or_path=deepspeed_config,
        mpu=TensorAxis.if_shared(),
    )
    with local_torch_dtype(dtype), init, without_broadcast(init):
        model = ParallelTokenLossModel(
            path,
            config,
            dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
            activation_offload=activation_offload,
        )
    model.compute_buffers()
    read_shards(path, _wanted(model, weights), say)
    return model


def _wanted(model: ParallelTokenLossModel, weights: StoredWeights) -> list[Wanted]:
    """What this rank reads; rows of no token become zero."""
    shapes = {name: stored.shape for name, stored in weights.tensors.items()}
    wanted = []
    own = pieces(model.config, rank=layout.rank("tensor"), size=layout.size("tensor"))
    for name, piece in own.items():
        start, shard = shard_of(as_partitioned(model.get_parameter(name)))
        shard.zero_()
        wanted += [
            Wanted(weights.tensors[run.name], run.start, shard[run.offset : run.offset + run.numel])
            for run in runs(piece, shapes, start, start + len(shard))
        ]
    return wanted


def gathered_parallel(
    model: ParallelTokenLossModel, keepers: Mapping[str, Collection[int]], *, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor | None]]:
    """Name and whole tensor of each of `weights`, on the CPU of the ranks that keep it, None on the others.

    Each item may be a collective: all ranks take all.

    Args:
        keepers: the ranks of the job by the weight's name.
        weights: shape and dtype of every trained weight of the Hugging Face model, or of its adapters, in its order.
    """
    size, order = layout.size("tensor"), {name: i for i, name in enumerate(weights)}
    of_ranks = [model.trained_pieces(rank=rank, size=size) for rank in range(size)]
    layer_of = {id(p): number for number, layer in enumerate(model.layers) for p in layer.parameters()}
    named = [(name, p) for name, p in model.named_parameters() if name in of_ranks[0]]

    def layer_or_name(item: tuple[str, nn.Parameter]) -> int | str:
        return layer_of[id(item[1])] if id(item[1]) in layer_of else item[0]

    for _, group in itertools.groupby(named, key=layer_or_name):
        parameters: list[tuple[str, nn.Parameter]] = list(group)
        names = {of_ranks[0][name].name for name, _ in parameters}
        mine = {
            name: torch.empty(weights[name].shape, dtype=weights[name].dtype)
            for name in names
            if layout.rank("job") in keepers[name]
        }
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in parameters]):
            for name, parameter in parameters:
                of_all = layout.all_gather("tensor", parameter.detach())
                for pieces_of_rank, of_rank in zip(of_ranks, of_all, strict=True):
                    copy_to_weight(mine, of_rank, pieces_of_rank[name])
        for name in sorted(names, key=order.__getitem__):
            yield name, mine.pop(name, None)


# Experts of a mixture, each rank of an expert-parallel group with its block of them.
#
# A layer's experts are parameters `[E, ...]`. Here they become parameters `[E / N, ...]`, which ZeRO-3 shards over
# `expert_shards`, the ranks that have the same block. DeepSpeed knows of such parameters, for a mixture layer of its
# own: those with its marks are gathered and reduced over their group, divided by all ranks like other gradients, and
# counted in the norm of the gradient over both axes.


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
    found = [module for module in model.modules() if uses_our_experts(module)]
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
        mark_sharded(experts)


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
