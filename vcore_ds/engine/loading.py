"""Loading a pretrained model straight into ZeRO-3 shards: every rank reads the bytes of its own.

What cannot be read by range (weights that are converted, quantized, pickled) is read by one process, which broadcasts
parameter by parameter, as transformers does it.
"""

import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import deepspeed
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.progress import Progress
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import first_rank_first
from vcore_ds.engine.deepspeed_start import start_deepspeed
from vcore_ds.engine.flat_shards import PartitionedParameter, as_partitioned
from vcore_ds.models.causal_lm import auto_class
from vcore_ds.models.loading import (
    attention_name,
    load_causal_lm,
    prepare_for_training,
    refuse_failing_code,
    training_config,
)
from vcore_ds.models.safetensors_ranges import Wanted, read_ranges
from vcore_ds.models.stored_weights import StoredWeights, find_stored_weights


def load_sharded(
    path: str,
    deepspeed_config: dict[str, Any],
    *,
    dtype: torch.dtype,
    attention: str,
    gradient_checkpointing: bool,
    say: Callable[[str], None] = lambda text: None,
) -> PreTrainedModel:
    """The pretrained model, ready to train, of which this rank holds its shards only. A collective.

    Args:
        path: folder or hub id.
        dtype: of the parameters, the one that the configuration names.
        attention: as in `load_causal_lm`.
        say: takes lines about the progress; called on the first rank alone.

    Raises:
        UserError: on all ranks alike, where there is no model that can be used, not all of its weights, or a rank that
            cannot read them.
    """
    start_deepspeed()
    config, weights = find_on_all_ranks(path)
    if weights.obstacle is not None:
        if layout.is_first():
            say(f"{path}: weights are read by one process, since {weights.obstacle}")
        return load_and_broadcast(
            path,
            deepspeed_config,
            dtype=dtype,
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
        )
    with refuse_failing_code(path):
        with _announced(deepspeed_config), _unfilled_shards(dtype):
            model = auto_class(config).from_config(
                config, dtype=dtype, attn_implementation=attention_name(config, attention), trust_remote_code=False
            )
        model.eval()
        model.tie_weights(missing_keys=set(weights.missing), recompute_mapping=False)
        _initialize_buffers(model)
    read_shards(path, _wanted(model, weights), say)
    return prepare_for_training(model, gradient_checkpointing)


def load_and_broadcast(path: str, deepspeed_config: dict[str, Any], **options: Any) -> PreTrainedModel:
    """The same by way of `from_pretrained`: the first rank reads, and broadcasts parameter by parameter. A collective.

    Args:
        options: those of `load_causal_lm`.
    """
    start_deepspeed()
    with _announced(deepspeed_config):
        return load_causal_lm(path, **options)


@contextmanager
def _announced(deepspeed_config: dict[str, Any]) -> Iterator[None]:
    """A context in which transformers builds models in ZeRO-3 shards.

    It finds out through a global weak reference whether ZeRO-3 is on: its target must stay alive meanwhile.
    """
    announced = HfDeepSpeedConfig(deepspeed_config)
    try:
        yield
    finally:
        del announced
        unset_hf_deepspeed_config()


def find_on_all_ranks(path: str) -> tuple[PretrainedConfig, StoredWeights]:
    """The model's configuration, and the places of its weights. A collective.

    Raises UserError, on all ranks alike, where there is no such model, or ranks find different ones.
    """

    def find() -> tuple[PretrainedConfig, StoredWeights]:
        config = training_config(path)
        return config, find_stored_weights(path, config)

    config, weights = first_rank_first(find)
    _check_same_files(path, weights)
    return config, weights


def _check_same_files(path: str, weights: StoredWeights) -> None:
    """Raises UserError, on all ranks alike, where ranks would read parts of different models: nodes may have copies of
    their own. Headers are compared; the weights themselves are not."""
    found = layout.gather_objects("job", (weights.fingerprint(), platform.node()))
    for rank, (fingerprint, host) in enumerate(found):
        if fingerprint != found[0][0]:
            raise UserError(
                f"model.path: {path}: found other weights on rank {rank} (host {host}) than on rank 0 (host "
                f"{found[0][1]}); expected copies of one model on all nodes"
            )


# ---- shards without values -----------------------------------------------------------------------------------------


@contextmanager
def _unfilled_shards(dtype: torch.dtype) -> Iterator[None]:
    """The contexts in which `from_pretrained` builds a model in shards, without the broadcast of every parameter's
    initial values, which nobody has set."""
    with ExitStack() as stack:
        for context in PreTrainedModel.get_init_context(dtype, False, False, None):
            stack.enter_context(context)
            if isinstance(context, deepspeed.zero.Init):
                stack.enter_context(without_broadcast(context))
        yield


@contextmanager
def without_broadcast(init: deepspeed.zero.Init) -> Iterator[None]:
    """Inside, `init` divides parameters without asking the first rank for values. Later it does again: parameters keep
    it, and DeepSpeed uses it for adapters."""

    def divide(parameter: nn.Parameter) -> None:
        init._convert_to_deepspeed_param(parameter)
        divided = as_partitioned(parameter)
        divided.partition()
        # With hierarchical partitioning it would be copied from the parameter; as after every step, the first gather
        # reads the shards and makes it.
        divided.ds_secondary_tensor = None

    init._zero_init_param = divide
    try:
        yield
    finally:
        del init._zero_init_param


def _initialize_buffers(model: PreTrainedModel) -> None:
    """Computes the buffers that are in no file (rotary frequencies), as `from_pretrained` does once weights are there:
    those computed while zero.Init replaces torch's constructors may have passed through bf16."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()


# ---- reading -------------------------------------------------------------------------------------------------------


def read_shards(path: str, wanted: list[Wanted], say: Callable[[str], None]) -> None:
    """Reads what this rank wants. A collective at its end.

    Raises UserError, on all ranks alike, where a rank cannot read its part.
    """
    num_bytes = sum(one.num_bytes for one in wanted)
    title = f"Loading {path}, {num_bytes / 1e9:.1f} GB on each rank"
    mine = None
    try:
        with torch.no_grad(), Progress(title, num_bytes, enabled=layout.is_first(), say=say) as progress:
            read_ranges(wanted, progress.advance)
    except OSError as error:  # the others would wait for a rank that has left
        mine = first_line(error)
    for rank, (problem, host) in enumerate(layout.gather_objects("job", (mine, platform.node()))):
        if problem is not None:
            raise UserError(f"model.path: {path}: no weights can be read on rank {rank} (host {host}): {problem}")


def _wanted(model: PreTrainedModel, weights: StoredWeights) -> list[Wanted]:
    """What this rank reads: its part of every parameter once, and all of every buffer."""
    wanted: dict[int, Wanted] = {}
    # Where files hold both of two tied weights, the one that others are tied to counts.
    for name in sorted(weights.tensors, key=lambda name: name in model.all_tied_weights_keys):
        tensor, stored = model.get_parameter_or_buffer(name), weights.tensors[name]
        if id(tensor) in wanted:
            continue
        if not isinstance(tensor, nn.Parameter):
            wanted[id(tensor)] = Wanted(stored, 0, tensor.view(-1))
            continue
        start, shard = shard_of(as_partitioned(tensor))
        wanted[id(tensor)] = Wanted(stored, start, shard)
    return list(wanted.values())


def shard_of(parameter: PartitionedParameter) -> tuple[int, torch.Tensor]:
    """This rank's part of the flattened parameter: its first element, and the shard without its padding, which is set
    to zero."""
    shard = parameter.ds_tensor
    start = layout.rank("shards") * shard.numel()
    numel = max(0, min(shard.numel(), parameter.ds_numel - start))
    shard[numel:].zero_()
    return start, shard[:numel]
