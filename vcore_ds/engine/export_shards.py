"""Export of trained weights as a Hugging Face folder, from the live engine, layer by layer; and reading a checkpoint's
tensors without a process group."""

import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import deepspeed
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedTokenizerBase

from vcore_ds.common.errors import RunFailed
from vcore_ds.common.paths import discard, unfinished_path
from vcore_ds.distributed import layout
from vcore_ds.engine.checkpoint_shards import CheckpointFailed, run_on_all_ranks
from vcore_ds.engine.flat_shards import as_partitioned, full_shape, is_expert_block
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models import model_folder
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.megatron.weight_slices import copy_to_weight, weight_slices
from vcore_ds.models.stored_weights import FolderWeights, describe_weights

if TYPE_CHECKING:  # megatron-core takes seconds to import
    from vcore_ds.models.megatron.model import ParallelTokenLossModel

PREFIX = "causal_lm."
"""Prefix of parameter names in the engine and in checkpoints, before the name in the Hugging Face model."""


class ExportFailed(RunFailed):
    """The result could not be written. The run's last checkpoint holds the same weights."""


def save_hugging_face(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    model_path: str,
    folder: Path,
    *,
    card: str | None = None,
    max_file_bytes: int = model_folder.MAX_FILE_BYTES,
) -> None:
    """Write the LoRA adapter or the full weights, with configuration (that of `model_path`), tokenizer and model card,
    for `peft` / `transformers`. A collective: each decoder layer is all-gathered once, and file i is collected and
    written by rank i modulo the number of ranks, one after the other, so that no host holds more than one file of
    weights. Raises ExportFailed on all ranks alike; `folder` does not exist then."""
    is_first = layout.is_first()
    unfinished = unfinished_path(folder)
    model: nn.Module | None
    gathered: Callable[[Mapping[str, Collection[int]]], Iterator[tuple[str, Tensor | None]]]
    try:
        if isinstance(engine.module, TokenLossModel):
            model, weights = engine.module.causal_lm, _describe_weights(engine)
            gathered = partial(_gather_weights, engine)
        else:
            model, weights = None, describe_weights(model_path, engine.trainable[0][1].dtype)
            gathered = partial(gather_parallel_weights, engine.module, weights=weights)
        if isinstance(model, PeftModel):
            trained = {name: {0} for name, parameter in model.named_parameters() if parameter.requires_grad}
            adapter = {name: tensor for name, tensor in gathered(trained) if tensor is not None}
            run_on_all_ranks(
                unfinished,
                lambda: model_folder.write_adapter(model, adapter, folder, tokenizer, card) if is_first else None,
            )
            return
        stored = FolderWeights(model_path, weights)
        split = model_folder.plan_files(stored.stored, max_file_bytes)
        num_bytes = split.metadata["total_size"]
        run_on_all_ranks(unfinished, lambda: model_folder.begin(folder, num_bytes) if is_first else None)
        files = {file: i % layout.size("job") for i, file in enumerate(sorted(split.filename_to_tensors))}
        owner = {name: files[file] for name, file in split.tensor_to_filename.items()}  # the rank that writes a tensor
        # By name in memory: the experts of a layer may be in two files.
        keepers = {name: {owner[key] for key in group.stored} for group in stored.groups for name in group.names}
        for file, tensors in model_folder.collect_files(split, _stream_stored(stored, gathered(keepers), owner)):
            expected = {name: stored.stored[name] for name in split.filename_to_tensors[file]}
            mine = owner[next(iter(expected))] == layout.rank("job")
            # All ranks wait for the writer: if it fails, all raise instead of hanging in the next all-gather.
            run_on_all_ranks(
                unfinished / file,
                lambda: model_folder.write_file(unfinished / file, tensors, expected) if mine else None,  # noqa: B023
            )
        dtype = next(engine.module.parameters()).dtype

        def finish() -> None:
            model_folder.write_config(unfinished, stored.path, dtype, is_complete=stored.is_complete)
            model_folder.finish(folder, tokenizer, card, split)

        run_on_all_ranks(unfinished, lambda: finish() if is_first else None)
    except CheckpointFailed as error:
        if is_first:
            discard(unfinished)
        raise ExportFailed(
            f"the result could not be written: {error}. The last checkpoint holds the same weights: fix the cause and "
            "start the run again, or use `vcore-ds export`"
        ) from None


def _describe_weights(engine: Engine) -> dict[str, Tensor]:
    """Name -> meta tensor of every weight, tied weights once, and of persistent buffers."""
    weights = {
        name.removeprefix(PREFIX): torch.empty(
            full_shape(as_partitioned(parameter)), dtype=parameter.dtype, device="meta"
        )
        for name, parameter in engine.module.named_parameters()
    }
    return weights | {name: buffer.to("meta") for name, buffer in _persistent_buffers(engine).items()}


def _persistent_buffers(engine: Engine) -> dict[str, Tensor]:
    stored = engine.module.state_dict().keys()
    return {name.removeprefix(PREFIX): buffer for name, buffer in engine.module.named_buffers() if name in stored}


def _stream_stored(
    stored: FolderWeights, weights: Iterator[tuple[str, Tensor | None]], owner: Mapping[str, int]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the exported tensors, by their names in the files; None for those that another rank writes."""
    mine = {name for name, rank in owner.items() if rank == layout.rank("job")}
    for name, tensor in stored.stream(weights):
        yield name, tensor if name in mine else None
    for name in stored.copied:
        yield name, stored.read_copied(name) if name in mine else None


def _gather_weights(engine: Engine, keepers: Mapping[str, Collection[int]]) -> Iterator[tuple[str, Tensor | None]]:
    """Yield name and full tensor of the weights in `keepers`, on the CPU of the ranks that keep it, None on the others;
    decoder layers are gathered at once, other weights one by one. Each item may be a collective: all ranks must take
    all items."""
    # Parameters that a pass prefetched for a module which then did not run stay in flight until the next pass. Unless
    # they are dropped, DeepSpeed can neither gather nor release them here.
    engine.optimizer.empty_partition_cache()
    named = [(name, p) for name, p in engine.module.named_parameters() if name.removeprefix(PREFIX) in keepers]
    for parameters in group_by_layer(engine.module.layers, named):
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in parameters]):
            for name, parameter in parameters:
                name = name.removeprefix(PREFIX)
                tensor = parameter.detach()
                if is_expert_block(parameter):
                    tensor = layout.all_gather("expert", tensor).flatten(0, 1)
                yield name, tensor.to("cpu", copy=True) if layout.rank("job") in keepers[name] else None
    for name, buffer in _persistent_buffers(engine).items():
        if name in keepers:
            yield name, buffer.cpu() if layout.rank("job") in keepers[name] else None


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


class CheckpointTensors:
    """Reader of the unsharded tensors in a checkpoint's `state/`, one at a time, without a process group. `names`: all
    tensors' names (`master.<parameter>`, `exp_avg.<parameter>`)."""

    def __init__(self, folder: Path):
        self._reader = dcp.FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self._stored = metadata.state_dict_metadata
        # Metadata of many ranks is large, and every load would read it again.
        self._reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]
        self.names = list(self._stored)

    def read(self, name: str) -> Tensor:
        """Read a tensor: flat, in its stored dtype."""
        stored = self._stored[name]
        assert isinstance(stored, TensorStorageMetadata)  # `write_state` stores nothing else
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.load({name: tensor}, storage_reader=self._reader, no_dist=True)
            except CheckpointException as error:  # a BaseException around that of each rank
                raise error.failures[0][0] from None
        return tensor
