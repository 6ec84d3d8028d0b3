"""The trained weights as a Hugging Face folder: from the live engine, layer by layer, all ranks writing in turn; and
what a checkpoint holds, tensor by tensor, without a process group."""

import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import deepspeed
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import StateDictSplit
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedTokenizerBase

from vcore_ds.common.paths import discard, unfinished_path
from vcore_ds.distributed import layout
from vcore_ds.engine.checkpoint_shards import CheckpointFailed, on_all_ranks
from vcore_ds.engine.flat_shards import as_partitioned, is_block_of_experts, shape_of_all
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models import model_folder
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.configuration import read_config
from vcore_ds.models.lora import build_empty_adapted_model
from vcore_ds.models.stored_weights import FolderWeights, describe_weights

if TYPE_CHECKING:
    from vcore_ds.models.megatron.model import ParallelTokenLossModel

PREFIX = "causal_lm."
"""Prefix of a parameter's name in the engine and in a checkpoint, before its name in the Hugging Face model."""


class ExportFailed(RuntimeError):
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
    """Writes the adapter (LoRA) or the full weights, with configuration and tokenizer; `peft` / `transformers` load it.

    A collective: each decoder layer is gathered once, and file i is kept and written by rank i modulo the number of
    ranks, one after the other, so that no host holds more than one file's worth of weights.

    Args:
        model_path: folder or hub id that the model was loaded from; the result gets its configuration.
        card: text of the model card, on rank 0; None for a folder without one.

    Raises:
        ExportFailed: on all ranks alike; no `folder` is left.
    """
    is_first = layout.is_first()
    unfinished = unfinished_path(folder)
    model: nn.Module | None
    gathered: Callable[[Mapping[str, Collection[int]]], Iterator[tuple[str, Tensor | None]]]
    try:
        if isinstance(engine.module, TokenLossModel):
            model, weights = engine.module.causal_lm, _described(engine)
            gathered = partial(_gathered, engine)
        else:
            from vcore_ds.engine.parallel_weights import gathered_parallel  # megatron-core takes seconds to import

            model, weights = _described_parallel(engine.module, engine.trainable[0][1].dtype, model_path)
            gathered = partial(gathered_parallel, engine.module, weights=weights)
        if isinstance(model, PeftModel):
            adapter = {name: tensor for name, tensor in gathered(_adapter_keepers(model)) if tensor is not None}
            on_all_ranks(
                unfinished,
                lambda: model_folder.write_adapter(model, adapter, folder, tokenizer, card) if is_first else None,
            )
            return
        stored = FolderWeights(model_path, weights)
        split = model_folder.plan_files(stored.stored, max_file_bytes)
        num_bytes = split.metadata["total_size"]
        on_all_ranks(unfinished, lambda: model_folder.begin(folder, num_bytes) if is_first else None)
        owner = _file_owner(split)
        for file, tensors in model_folder.collect_files(
            split, _stored(stored, gathered(_keepers(stored, owner)), owner)
        ):
            expected = {name: stored.stored[name] for name in split.filename_to_tensors[file]}
            mine = owner[next(iter(expected))] == layout.rank("job")
            # Every rank waits for the writer here: if it fails, all of them learn it instead of hanging in a gather.
            on_all_ranks(
                unfinished / file,
                lambda: model_folder.write_file(unfinished / file, tensors, expected) if mine else None,  # noqa: B023
            )
        on_all_ranks(
            unfinished,
            lambda: _finish(folder, split, stored, engine, tokenizer, card) if is_first else None,
        )
    except CheckpointFailed as error:
        if is_first:
            discard(unfinished)
        raise ExportFailed(
            f"the result could not be written: {error}. The last checkpoint holds the same weights: fix the cause and "
            "start the run again, or use `vcore-ds export`"
        ) from None


def _finish(
    folder: Path,
    split: StateDictSplit,
    stored: FolderWeights,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    card: str | None,
) -> None:
    dtype = next(engine.module.parameters()).dtype
    model_folder.describe(unfinished_path(folder), stored.path, dtype, is_whole=stored.is_whole)
    model_folder.finish(folder, tokenizer, card, split)


def _described(engine: Engine) -> dict[str, Tensor]:
    """Name -> shape and dtype of every weight, a tied one once, and of the buffers that belong to them."""
    weights = {
        name.removeprefix(PREFIX): torch.empty(
            shape_of_all(as_partitioned(parameter)), dtype=parameter.dtype, device="meta"
        )
        for name, parameter in engine.module.named_parameters()
    }
    return weights | {name: buffer.to("meta") for name, buffer in _kept_buffers(engine).items()}


def _described_parallel(
    parallel: "ParallelTokenLossModel", dtype: torch.dtype, path: str
) -> tuple[PeftModel | None, dict[str, Tensor]]:
    """The adapted model, for names and configuration, if there are adapters; and what `_described` gives, of them or
    of all weights."""
    if parallel.lora is None:
        return None, describe_weights(path, dtype)
    model = build_empty_adapted_model(path, read_config(path), parallel.lora)
    return model, {name: p.to(dtype) for name, p in model.named_parameters() if p.requires_grad}


def _kept_buffers(engine: Engine) -> dict[str, Tensor]:
    stored = engine.module.state_dict().keys()
    return {name.removeprefix(PREFIX): buffer for name, buffer in engine.module.named_buffers() if name in stored}


def _file_owner(split: StateDictSplit) -> dict[str, int]:
    """Tensor name -> the rank that keeps it until its file is written."""
    owners = {file: i % layout.size("job") for i, file in enumerate(sorted(split.filename_to_tensors))}
    return {name: owners[file] for name, file in split.tensor_to_filename.items()}


def _keepers(stored: FolderWeights, owner: Mapping[str, int]) -> dict[str, set[int]]:
    """Name in memory -> the ranks that write something of it: the experts of a layer may be in two files."""
    return {name: {owner[one] for one in part.stored} for part in stored.parts for name in part.names}


def _adapter_keepers(model: PeftModel) -> dict[str, set[int]]:
    return {name: {0} for name, parameter in model.named_parameters() if parameter.requires_grad}


def _stored(
    stored: FolderWeights, weights: Iterator[tuple[str, Tensor | None]], owner: Mapping[str, int]
) -> Iterator[tuple[str, Tensor | None]]:
    """Name in the files and tensor of everything that the folder gets, None for what another rank owns."""
    mine = {name for name, rank in owner.items() if rank == layout.rank("job")}
    for name, tensor in stored.stream(weights):
        yield name, tensor if name in mine else None
    for name in stored.copied:
        yield name, stored.read_copied(name) if name in mine else None


def _gathered(engine: Engine, keepers: Mapping[str, Collection[int]]) -> Iterator[tuple[str, Tensor | None]]:
    """Name and whole tensor of each weight in `keepers`, on the CPU of the ranks that keep it, None on the others.

    A decoder layer is gathered at once, everything else by itself. Each item may be a collective: all ranks take all.
    """
    layer_of = {id(p): number for number, layer in enumerate(engine.module.layers) for p in layer.parameters()}
    named = [(name, p) for name, p in engine.module.named_parameters() if name.removeprefix(PREFIX) in keepers]

    def layer_or_name(item: tuple[str, nn.Parameter]) -> int | str:
        return layer_of[id(item[1])] if id(item[1]) in layer_of else item[0]

    for _, group in itertools.groupby(named, key=layer_or_name):
        parameters: list[tuple[str, nn.Parameter]] = list(group)
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in parameters]):
            for name, parameter in parameters:
                name = name.removeprefix(PREFIX)
                whole = parameter.detach()
                if is_block_of_experts(parameter):
                    whole = layout.all_gather("expert", whole).flatten(0, 1)
                mine = layout.rank("job") in keepers[name]
                yield name, whole.to("cpu", copy=True) if mine else None
    for name, buffer in _kept_buffers(engine).items():
        if name in keepers:
            yield name, buffer.cpu() if layout.rank("job") in keepers[name] else None


class CheckpointTensors:
    """The tensors of a checkpoint's `state/`, read one at a time, whole, in one process and without a process group.

    Attributes:
        names: all tensors' names (`master.<parameter>`, `exp_avg.<parameter>`).
    """

    def __init__(self, folder: Path):
        self._reader = dcp.FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self._stored = metadata.state_dict_metadata
        # Read once: with many ranks it is large, and every load would read it again.
        self._reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]
        self.names = list(self._stored)

    def read(self, name: str) -> Tensor:
        """Flat, in the dtype it was stored in."""
        stored = self._stored[name]
        assert isinstance(stored, TensorStorageMetadata)  # a state holds nothing else
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor
