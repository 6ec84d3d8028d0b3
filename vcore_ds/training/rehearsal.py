"""Rehearsal of a run's end at its start: what would fail after days fails before the model is loaded."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vcore_ds.config.schema import Recipe
from vcore_ds.models import model_folder
from vcore_ds.models.configuration import read_config
from vcore_ds.models.loading import DTYPES
from vcore_ds.models.lora import build_empty_adapted_model
from vcore_ds.models.stored_weights import FolderWeights, describe_weights
from vcore_ds.training.model_card import make_model_card


def rehearse_result(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the run's result, without weights, into a temporary folder. Raises what the end of the run would raise."""
    with tempfile.TemporaryDirectory() as temporary:
        write_without_weights(recipe, tokenizer, Path(temporary) / "result")


def write_without_weights(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model card, tokenizer and configuration of the result, with an adapter of empty tensors, or with empty
    files in place of the full weights."""
    path, lora = recipe.model.path, recipe.lora
    card = make_model_card(folder.parent, recipe, "model" if lora is None else "adapter")
    if lora is not None:
        adapted = build_empty_adapted_model(path, read_config(path), lora)
        empty = {name: torch.empty(0) for name, p in adapted.named_parameters() if p.requires_grad}
        model_folder.write_adapter(adapted, empty, folder, tokenizer, card)
        return
    dtype = DTYPES[recipe.model.precision]
    stored = FolderWeights(path, describe_weights(path, dtype))
    split = model_folder.plan_files(stored.stored, model_folder.MAX_FILE_BYTES)
    unfinished = model_folder.begin(folder, num_bytes=0)
    for file, _ in model_folder.collect_files(split, _stream_names(stored)):
        (unfinished / file).touch()
    model_folder.write_config(unfinished, path, dtype, is_complete=stored.is_complete)
    model_folder.finish(folder, tokenizer, card, split)


def _stream_names(stored: FolderWeights) -> Iterator[tuple[str, Tensor | None]]:
    """Stream the tensors to be written as `save_hugging_face` does, without their values."""
    yield from stored.stream((name, stored.weights[name]) for group in stored.groups for name in group.names)
    yield from dict.fromkeys(stored.copied).items()
