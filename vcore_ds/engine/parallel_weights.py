"""Tensor-parallel and expert-parallel weights: loading them from Hugging Face files into ZeRO-3 shards, and gathering.

Loading tensor-parallel layers: each rank reads the ZeRO-3 shard of its tensor-parallel shard from the files. Adjacent
rows of a weight are one range of bytes; in a weight sharded by columns (the output projections of attention and MLP)
each row is a range. Each byte is read by one rank, except norms, which all ranks of a tensor-parallel group hold.

Gathering: a layer is all-gathered over the ranks that hold its ZeRO-3 shards, then over its tensor-parallel group.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

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
from vcore_ds.engine.sharded_loading import find_stored_model, local_shard, read_shards, without_broadcast
from vcore_ds.models.experts import mark_sharded, uses_our_experts
from vcore_ds.models.megatron.weight_slices import copy_to_weight, iter_runs, weight_slices
from vcore_ds.models.safetensors_ranges import ReadRequest
from vcore_ds.models.stored_weights import StoredWeights

if TYPE_CHECKING:
    from vcore_ds.models.megatron.model import ParallelTokenLossModel


def load_parallel(
    path: str,
    deepspeed_config: dict[str, Any],
    *,
    dtype: torch.dtype,
    gradient_checkpointing: bool,
    activation_offload: bool,
    say: Callable[[str], None],
) -> "ParallelTokenLossModel":
    """Load a pretrained model into tensor-parallel layers in ZeRO-3 shards, ready to train. A collective. `path`,
    `deepspeed_config`, `dtype` and `say` as in `load_sharded`; the others as in `ParallelTokenLossModel`. Raises
    UserError, on all ranks alike, without a usable model, or for weights that transformers has to convert."""
    from vcore_ds.models.megatron.model import ParallelTokenLossModel  # megatron-core takes seconds to import

    start_deepspeed()
    config, weights = find_stored_model(path)
    if weights.obstacle is not None:
        raise UserError(
            f"model.provider: found megatron together with model.path {path}, whose weights transformers has to "
            f"convert ({weights.obstacle}); expected plain safetensors files, from which each rank reads its shards"
        )
    init = deepspeed.zero.Init(
        data_parallel_group=layout.group("shards"), config_dict_or_path=deepspeed_config, mpu=TensorAxis.if_parallel()
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
    read_shards(path, _list_reads(model, weights), say)
    return model


def _list_reads(model: "ParallelTokenLossModel", weights: StoredWeights) -> list[ReadRequest]:
    """List the ranges that this rank reads. Sets its shards to zero, for padding rows of the vocabulary."""
    shapes = {name: stored.shape for name, stored in weights.tensors.items()}
    reads = []
    local_pieces = weight_slices(model.config, rank=layout.rank("tensor"), size=layout.size("tensor"))
    for name, piece in local_pieces.items():
        start, shard = local_shard(as_partitioned(model.get_parameter(name)))
        shard.zero_()
        reads += [
            ReadRequest(weights.tensors[run.name], run.start, shard[run.offset : run.offset + run.numel])
            for run in iter_runs(piece, shapes, start, start + len(shard))
        ]
    return reads


def gather_parallel_weights(
    model: "ParallelTokenLossModel", keepers: Mapping[str, Collection[int]], *, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield name and full tensor of each weight, on the CPU of the ranks that keep it (`keepers`, by name), None on the
    others. Each item may be a collective: all ranks must take all items. `weights`: shape and dtype of every trained
    weight of the Hugging Face model, in its order."""
    size, order = layout.size("tensor"), {name: i for i, name in enumerate(weights)}
    pieces_by_rank = [weight_slices(model.config, rank=rank, size=size) for rank in range(size)]
    named = [(name, p) for name, p in model.named_parameters() if name in pieces_by_rank[0]]
    for parameters in group_by_layer(model.layers, named):
        names = {pieces_by_rank[0][name].name for name, _ in parameters}
        kept = {
            name: torch.empty(weights[name].shape, dtype=weights[name].dtype)
            for name in names
            if layout.rank("job") in keepers[name]
        }
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in parameters]):
            for name, parameter in parameters:
                parts = layout.all_gather("tensor", parameter.detach())
                for rank_pieces, part in zip(pieces_by_rank, parts, strict=True):
                    copy_to_weight(kept, part, rank_pieces[name])
        for name in sorted(names, key=order.__getitem__):
            yield name, kept.pop(name, None)


def group_by_layer(
    layers: Iterable[nn.Module], named: Iterable[tuple[str, nn.Parameter]]
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield the consecutive named parameters of each decoder layer together, and all others one by one."""
    layer_of: dict[int, int | str] = {id(p): i for i, layer in enumerate(layers) for p in layer.parameters()}
    for _, group in itertools.groupby(named, key=lambda item: layer_of.get(id(item[1]), item[0])):
        yield list(group)


# DeepSpeed shards the experts of `deepspeed.moe` over a separate group. The attributes set below make it treat ours in
# the same way: gathered and reduced over `expert_shards`, gradients divided by the number of all ranks, the norm summed
# over both axes.

_GROUP_NAME = "vcore_experts"  # key of the experts' process groups in DeepSpeed


def partition_experts(model: nn.Module) -> None:
    """Shard the experts of MoE layers: `[E, ...]` -> `[E / N, ...]` on each of N expert-parallel ranks. A collective.
    Call it after loading, since files hold experts fused, separate or transposed, and before the optimizer is built,
    since parameters are replaced. `model`: in ZeRO-3 shards, since DeepSpeed would broadcast unsharded parameters from
    rank 0. Raises UserError for a model without MoE layers that can be sharded, a number of experts that N does not
    divide, or adapters on experts."""
    num_ranks = layout.size("expert")
    if num_ranks == 1:
        return
    if any(isinstance(module, ParamWrapper) for module in model.modules()):
        raise _make_expert_error("with adapters on experts", "1, or lora.target_modules without experts")
    moe_layers = [module for module in model.modules() if uses_our_experts(module)]
    if not moe_layers:
        raise _make_expert_error("on a model without experts behind transformers' experts interface", "1")
    groups._EXPERT_PARALLEL_GROUP[_GROUP_NAME] = layout.group("expert")
    groups._EXPERT_DATA_PARALLEL_GROUP[_GROUP_NAME] = layout.group("expert_shards")
    for experts in moe_layers:
        num_experts: int = experts.num_experts  # type: ignore[assignment]  # not a tensor
        if num_experts % num_ranks:
            conflict = f"on a model with {num_experts} experts a layer"
            raise _make_expert_error(conflict, f"a divisor of {num_experts}")
        for name, parameter in list(experts.named_parameters(recurse=False)):
            setattr(experts, name, _extract_block(as_partitioned(parameter), num_experts // num_ranks))
        mark_sharded(experts)


def _make_expert_error(conflict: str, expected: str) -> UserError:
    return UserError(f"parallel.expert: found {layout.size('expert')} {conflict}; expected {expected}")


def _extract_block(parameter: PartitionedParameter, num_local: int) -> PartitionedParameter:
    """Extract this rank's experts from a parameter of all experts, in ZeRO-3 shards like it."""
    start = layout.rank("expert") * num_local
    with deepspeed.zero.GatheredParameters([parameter]):
        values = parameter.data[start : start + num_local].clone()
    block = as_partitioned(nn.Parameter(values, requires_grad=parameter.requires_grad))
    block.ds_zero_placement_family = EXPERT_FAMILY
    block.ds_zero_partition_group_name = _GROUP_NAME
    block.ds_zero_partition_process_group = layout.group("expert_shards")
    parameter.convert_to_zero_parameters(param_list=[block])
    # DeepSpeed's hooks still refer to the old parameter, and would keep its shard alive.
    parameter.ds_tensor.data = values.new_empty(0)
    return block
