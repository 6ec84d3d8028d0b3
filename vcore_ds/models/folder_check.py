"""Whether a folder holds a model that can be trained: its configuration against the headers of its weights.

Reads a few kilobytes a file and no weights, so that a mistake is found before anything is started.
"""

import json
import re
from copy import deepcopy
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from vcore_ds.errors import UserError, last_line
from vcore_ds.files.model_folder import INDEX, SINGLE_FILE
from vcore_ds.files.safetensors_ranges import BadSafetensors, StoredTensor, read_header
from vcore_ds.files.user_paths import reading
from vcore_ds.models.configuration import bad_config, read_config
from vcore_ds.models.language_model import auto_class

_REMEDY = "is the download complete?"

_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
"""Name of a weight in a decoder layer; layers of a vision or audio tower have other prefixes."""

Shapes = dict[str, tuple[int, ...]]


def check_model_folder(path: str) -> None:
    """Raises UserError where a local folder cannot hold a causal language model; names that are not folders are hub
    ids."""
    folder = Path(path)
    if not folder.exists():
        if path.startswith((".", "/", "~")) or path.count("/") != 1:
            raise UserError(f"model.path: {path}: no such folder, and not a hub id (owner/name)")
        return
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path: {path}: no config.json there; expected a Hugging Face model folder")
    with reading("model.path", folder, "a model folder that can be read"):
        config = read_config(path)
        shapes = _read_shapes(folder)
    if shapes is None:
        if not any(folder.glob("pytorch_model*.bin")):
            raise UserError(f"model.path: {path}: found a config.json but no weights (*.safetensors); {_REMEDY}")
        return
    _check_number_of_layers(path, config, shapes)
    check_shapes(path, empty_model(path, config), shapes)


def empty_model(path: str, config: PretrainedConfig, *, attention: str | None = None) -> PreTrainedModel:
    """The architecture without weights, on the meta device; tenths of a second for 32B parameters.

    Args:
        attention: name of the kernel; None for the architecture's default.

    Raises UserError where the values of the configuration do not make a model.
    """
    try:
        with torch.device("meta"):
            # A copy: transformers writes the attention into the configuration, which others share.
            return auto_class(config).from_config(deepcopy(config), attn_implementation=attention)
    except Exception as error:  # of any class: sizes and names go into the architecture's own code as they are
        problem = f"{type(error).__name__}: {last_line(error)}"
        raise bad_config(path, f"no {config.model_type} can be built from its values: {problem}") from None


def _read_shapes(folder: Path) -> Shapes | None:
    """Shapes of all weights, by name; None where there are no safetensors files."""
    single, index = folder / SINGLE_FILE, folder / INDEX
    if single.is_file():
        return _read_shapes_of(folder, single.name)
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            return None
        raise UserError(
            f"model.path: {folder}: found {files[0].name} and no {INDEX}, expected it beside weights in "
            f"several files; {_REMEDY}"
        )
    file_of = _read_index(folder, index)
    found: Shapes = {}
    for name in sorted(set(file_of.values())):
        if not (folder / name).is_file():
            raise UserError(f"model.path: {folder}: {INDEX} names {name}, which is missing; {_REMEDY}")
        found |= _read_shapes_of(folder, name)
    missing = sorted(file_of.keys() - found.keys())
    if missing:
        raise UserError(
            f"model.path: {folder}: {INDEX} names {missing[0]}, which is not in {file_of[missing[0]]} "
            f"({len(missing):,} such names); index and files are of different models: download the model again"
        )
    return {name: found[name] for name in file_of}


def _read_index(folder: Path, path: Path) -> dict[str, str]:
    """File by name of weight."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        file_of = index["weight_map"]
        if not (file_of and all(isinstance(name, str) and name == Path(name).name for name in file_of.values())):
            raise ValueError("weight_map names no files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"model.path: {folder}: {path.name}: found no weight_map of names to files "
            f"({type(error).__name__}: {last_line(error)}); download the model again"
        ) from None
    return file_of


def stored_tensors(path: str | Path, file: Path) -> dict[str, StoredTensor]:
    """The tensors of one of the model's safetensors files, by name, after its size has been held against them.

    Raises UserError where the file is not whole.
    """
    try:
        return read_header(file)
    except BadSafetensors as error:
        raise UserError(f"model.path: {path}: {file.name}: {error}; {_REMEDY}") from None


def _read_shapes_of(folder: Path, name: str) -> Shapes:
    return {key: stored.shape for key, stored in stored_tensors(folder, folder / name).items()}


def _check_number_of_layers(path: str, config: PretrainedConfig, shapes: Shapes) -> None:
    """A layer too few would be left out silently; one too many would be made of random numbers."""
    text = config.get_text_config()
    # LongCat-Flash counts each layer's two attentions as layers of their own.
    expected = text.num_layers if text.model_type == "longcat_flash" else getattr(text, "num_hidden_layers", None)
    numbers = [int(match[1]) for name in shapes if (match := _LAYER.match(name))]
    if not numbers or not isinstance(expected, int):
        return
    found = max(numbers) + 1
    num_extra = getattr(text, "num_nextn_predict_layers", None) or 0
    if found not in (expected, expected + num_extra):
        raise bad_config(
            path,
            f"num_hidden_layers: found {expected}, expected {found}, the number of layers in the weights; "
            "configuration and weights are of different models",
        )


def check_shapes(path: str, model: PreTrainedModel, shapes: Shapes) -> None:
    """Raises UserError where weights of the same name have other shapes in the model than in the files.

    Names that only one of both has are judged when the weights are loaded: transformers renames and joins many.
    """
    wrong = [
        f"{name} {list(shapes[name])}, expected {list(tensor.shape)}"
        for name, tensor in model.state_dict().items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    ]
    if wrong:
        more = f" ({len(wrong) - 1:,} more weights do not fit)" if len(wrong) > 1 else ""
        raise UserError(
            f"model.path: {path}: the weights do not fit config.json: found {wrong[0]}{more}; configuration and "
            "weights are of different models"
        )
