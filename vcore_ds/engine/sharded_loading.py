"""Loading a pretrained model directly into ZeRO-3 shards: each rank reads only the bytes of its shards.

Weights that cannot be read by range (converted or quantized ones) are read by rank 0, which broadcasts them
parameter by parameter, as in transformers.

Of tensor-parallel layers each rank reads the ZeRO-3 shard of its tensor-parallel shard. Adjacent rows of a weight are
one range of bytes; in a weight sharded by columns (the output projections of attention and MLP) each row is a range.
Each byte is read by one rank, except norms, which all ranks of a tensor-parallel group hold.
"""

import math
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.utils import groups
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, core_model_loading
from transformers.core_model_loading import WeightConverter
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config
from transformers.modeling_utils import local_torch_dtype

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.text import Progress
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import run_on_ranks_in_turn
from vcore_ds.engine.deepspeed_start import find_tensor_axis, start_deepspeed
from vcore_ds.engine.flat_shards import EXPERT_FAMILY, PartitionedParameter, as_partitioned, unpadded_shard
from vcore_ds.models.causal_lm import load_causal_lm, prepare_for_training, read_training_config, refuse_failing_code
from vcore_ds.models.description import find_auto_class, resolve_attention
from vcore_ds.models.experts import mark_sharded, uses_our_experts
from vcore_ds.models.megatron.weight_slices import weight_slices
from vcore_ds.models.safetensors_ranges import ReadRequest, read_ranges
from vcore_ds.models.stored_weights import StoredWeights, find_stored_weights, rename_source_key

if TYPE_CHECKING:  # megatron-core takes seconds to import
    from vcore_ds.models.megatron.model import ParallelTokenLossModel


def load_sharded(
    path: str,
    deepspeed_config: dict[str, Any],
    *,
    dtype: torch.dtype,
    attention: str,
    gradient_checkpointing: bool,
    say: Callable[[str], None] = lambda text: None,
) -> PreTrainedModel:
    """Load a pretrained model (a folder or hub id) into ZeRO-3 shards, ready to train. A collective. `dtype`: of the
    parameters, that of `deepspeed_config`; `attention`: as in `load_causal_lm`; `say`: receives lines about the
    progress, on rank 0. Raises UserError, on all ranks alike, without a usable model, or if weights are missing or
    cannot be read by a rank."""
    start_deepspeed()
    config, weights = find_stored_model(path)
    if weights.obstacle is not None:
        if layout.is_first():
            say(f"{path}: weights are read by one process, since {weights.obstacle}")
        return load_and_broadcast(
            path, deepspeed_config, dtype=dtype, attention=attention, gradient_checkpointing=gradient_checkpointing
        )
    with refuse_failing_code(path):
        with _announce_zero3(deepspeed_config), _uninitialized_shards(dtype):
            model = find_auto_class(config).from_config(
                config, dtype=dtype, attn_implementation=resolve_attention(config, attention), trust_remote_code=False
            )
        model.eval()
        model.tie_weights(missing_keys=set(weights.missing), recompute_mapping=False)
        # Compute the buffers that files do not hold (rotary frequencies), as `from_pretrained` does after loading:
        # while zero.Init replaces torch's constructors, they may have been rounded to bf16.
        for tensor in model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True
        model.initialize_weights()
    read_shards(path, _list_reads(model, weights), say)
    return prepare_for_training(model, gradient_checkpointing)


def load_and_broadcast(path: str, deepspeed_config: dict[str, Any], **options: Any) -> PreTrainedModel:
    """Load with `from_pretrained`: rank 0 reads, and broadcasts parameter by parameter. A collective. `options`: those
    of `load_causal_lm`."""
    start_deepspeed()
    with _announce_zero3(deepspeed_config), _converting_as_without_zero3():
        return load_causal_lm(path, **options)


@contextmanager
def _converting_as_without_zero3() -> Iterator[None]:
    """A context in which transformers (5.24) converts the weights of a sharded model as those of another: names as
    `rename_source_key`, shapes as those of entire parameters, which some conversions read."""
    convert = WeightConverter.convert

    def convert_sharded(self: WeightConverter, layer_name: str, model: nn.Module, **options: Any) -> Any:
        def get_parameter(name: str) -> Tensor:
            parameter = type(model).get_parameter(model, name)
            return torch.empty(getattr(parameter, "ds_shape", parameter.shape), dtype=parameter.dtype, device="meta")

        with patch.object(model, "get_parameter", get_parameter):
            return convert(self, layer_name, model=model, **options)

    with (
        patch.object(core_model_loading, "rename_source_key", rename_source_key),
        patch.object(WeightConverter, "convert", convert_sharded),
    ):
        yield


@contextmanager
def _announce_zero3(deepspeed_config: dict[str, Any]) -> Iterator[None]:
    """A context in which transformers builds models in ZeRO-3 shards."""
    # transformers holds the configuration by a weak reference, so it must stay alive in this context.
    config = HfDeepSpeedConfig(deepspeed_config)
    try:
        yield
    finally:
        del config
        unset_hf_deepspeed_config()


def find_stored_model(path: str) -> tuple[PretrainedConfig, StoredWeights]:
    """Find the model's configuration and stored weights. A collective. Raises UserError, on all ranks alike, if there
    is no such model or nodes have copies of different ones (only files' headers are compared)."""
    config, weights = run_on_ranks_in_turn(lambda: (read_training_config(path), find_stored_weights(path)))
    by_rank = layout.gather_objects("job", (weights.fingerprint(), platform.node()))
    first_fingerprint, first_host = by_rank[0]
    for rank, (fingerprint, host) in enumerate(by_rank):
        if fingerprint != first_fingerprint:
            raise UserError(
                f"model.path: {path}: found other weights on rank {rank} (host {host}) than on rank 0 (host "
                f"{first_host}); expected copies of one model on all nodes"
            )
    return config, weights


@contextmanager
def _uninitialized_shards(dtype: torch.dtype) -> Iterator[None]:
    """The contexts in which `from_pretrained` builds a sharded model, without broadcasts of its values."""
    with ExitStack() as stack:
        for context in PreTrainedModel.get_init_context(dtype, False, False, None):
            stack.enter_context(context)
            if isinstance(context, deepspeed.zero.Init):
                stack.enter_context(without_broadcast(context))
        yield


@contextmanager
def without_broadcast(init: deepspeed.zero.Init) -> Iterator[None]:
    """A context in which `init` shards parameters without broadcasting rank 0's values. Restored on exit, because
    parameters refer to `init`, and DeepSpeed uses it later for adapters."""

    def shard(parameter: nn.Parameter) -> None:
        init._convert_to_deepspeed_param(parameter)
        sharded = as_partitioned(parameter)
        sharded.partition()
        # With hierarchical partitioning this is a copy of the uninitialized parameter. Without the copy, the first
        # all-gather makes one from the shards, as after every step.
        sharded.ds_secondary_tensor = None

    init._zero_init_param = shard
    try:
        yield
    finally:
        del init._zero_init_param


def read_shards(path: str, reads: list[ReadRequest], say: Callable[[str], None]) -> None:
    """Read this rank's ranges; ends with a collective. Raises UserError, on all ranks alike, if a rank cannot read
    them."""
    num_bytes = sum(read.num_bytes for read in reads)
    title = f"Loading {path}, {num_bytes / 1e9:.1f} GB on each rank"
    failure = None
    try:
        with torch.no_grad(), Progress(title, num_bytes, enabled=layout.is_first(), say=say) as progress:
            read_ranges(reads, progress.advance)
    except OSError as error:  # raised below on all ranks, so that none hangs
        failure = first_line(error)
    for rank, (problem, host) in enumerate(layout.gather_objects("job", (failure, platform.node()))):
        if problem is not None:
            raise UserError(f"model.path: {path}: no weights can be read on rank {rank} (host {host}): {problem}")


def _list_reads(model: PreTrainedModel, weights: StoredWeights) -> list[ReadRequest]:
    """List the ranges that this rank reads: its shard of every parameter, tied ones once, and every buffer."""
    reads: dict[int, ReadRequest] = {}
    # If the files have both of two tied weights, the one to which the other is tied is read.
    for name in sorted(weights.tensors, key=lambda name: name in model.all_tied_weights_keys):
        tensor, stored = model.get_parameter_or_buffer(name), weights.tensors[name]
        if id(tensor) in reads:
            continue
        is_parameter = isinstance(tensor, nn.Parameter)
        start, shard = local_shard(as_partitioned(tensor)) if is_parameter else (0, tensor.view(-1))
        reads[id(tensor)] = ReadRequest(stored, start, shard)
    return list(reads.values())


def local_shard(parameter: PartitionedParameter) -> tuple[int, torch.Tensor]:
    """Return the offset of this rank's shard in the flattened parameter, and the shard without its padding, after
    setting the padding to zero."""
    shard = unpadded_shard(parameter)
    parameter.ds_tensor[len(shard) :].zero_()
    return layout.rank("shards") * parameter.ds_tensor.numel(), shard


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
        data_parallel_group=layout.group("shards"), config_dict_or_path=deepspeed_config, mpu=find_tensor_axis()
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
    read_shards(path, _list_parallel_reads(model, weights), say)
    return model


def _list_parallel_reads(model: "ParallelTokenLossModel", weights: StoredWeights) -> list[ReadRequest]:
    """List the ranges that this rank reads. Sets its shards to zero, for padding rows of the vocabulary."""
    reads = []
    local_pieces = weight_slices(model.config, rank=layout.rank("tensor"), size=layout.size("tensor"))
    for name, piece in local_pieces.items():
        start, shard = local_shard(as_partitioned(model.get_parameter(name)))
        shard.zero_()
        stored = weights.tensors[piece.name]
        reads += [
            ReadRequest(stored, first, shard[offset : offset + numel])
            for first, offset, numel in piece.iter_runs(math.prod(stored.shape[1:]), start, start + len(shard))
        ]
    return reads


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
