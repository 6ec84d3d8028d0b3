"""Writing, reading and checking Hugging Face model folders. No collectives.

A folder is written under a temporary name file by file, each file is read back and checked, and the folder is renamed
when it is complete. Weights come as a stream of (name, tensor), so that memory holds about one file at a time.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from copy import deepcopy
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from vcore_ds.common import paths
from vcore_ds.common.errors import UserError, last_line
from vcore_ds.common.paths import reading
from vcore_ds.models.causal_lm import find_auto_class
from vcore_ds.models.configuration import make_config_error, read_config
from vcore_ds.models.end_tokens import add_end_tokens
from vcore_ds.models.model_identity import CARD, find_local_folder, read_weight_map
from vcore_ds.models.safetensors_ranges import BadSafetensors, StoredTensor, read_header

MAX_FILE_BYTES = 5 * 10**9


class BadExport(RuntimeError):
    """The files read back differ from the tensors that were written."""


def plan_files(weights: dict[str, Tensor], max_file_bytes: int) -> StateDictSplit:
    """Assign tensors to files, from shapes and dtypes alone; meta tensors suffice."""
    return split_torch_state_dict_into_shards(weights, max_shard_size=max_file_bytes)


def begin(folder: Path, num_bytes: int) -> Path:
    """Create the empty temporary folder in which `folder` is written. Raises `paths.NoRoom`."""
    return paths.begin_folder(folder, num_bytes, "the weights. Make room")


def collect_files(
    split: StateDictSplit, weights: Iterable[tuple[str, Tensor | None]]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (file name, tensors by name) as soon as `weights` has yielded all tensors of a file.

    Args:
        weights: name and tensor, or None for a tensor that another rank writes.

    Raises:
        BadExport: at the end, if a tensor of `split` is missing.
    """
    waiting = {file: set(names) for file, names in split.filename_to_tensors.items()}
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        file = split.tensor_to_filename[name]
        if tensor is not None:
            held.setdefault(file, {})[name] = tensor
        waiting[file].remove(name)
        if not waiting[file]:
            yield file, held.pop(file, {})
    missing = sorted(name for names in waiting.values() for name in names)
    if missing:
        raise BadExport(f"no tensor for {', '.join(missing)}")


def write_file(path: Path, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Write one safetensors file, flush it to disk, read it back and check it. Raises BadExport as `check_file`."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    paths.flush(path)
    check_file(path, expected)


def check_file(path: Path, expected: dict[str, Tensor]) -> None:
    """Raise BadExport unless a safetensors file has exactly the names, shapes and dtypes of `expected`, all finite."""
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if names != expected.keys():
            raise BadExport(f"{path}: missing or unexpected names: {', '.join(sorted(names ^ expected.keys()))}")
        for name, like in expected.items():
            tensor = file.get_tensor(name)
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                raise BadExport(
                    f"{path}: {name}: found {tuple(tensor.shape)} {tensor.dtype}; "
                    f"expected {tuple(like.shape)} {like.dtype}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise BadExport(f"{path}: {name}: not all values are finite")


MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Configuration fields with the number of multi-token prediction layers (DeepSeek and GLM, Qwen, MiniMax)."""


def write_config(unfinished: Path, path: str, dtype: torch.dtype, *, is_complete: bool) -> None:
    """Write configuration and generation settings next to the weights.

    They come from the folder of the model, since training changes the configuration of the model in memory.

    Args:
        is_complete: whether the weights include all of the input's, also the multi-token prediction layers.
    """
    config = AutoConfig.from_pretrained(path)
    config.dtype = dtype
    for section in {id(section): section for section in (config, config.get_text_config())}.values():
        if hasattr(section, "quantization_config"):
            del section.quantization_config  # the weights are not quantized
        for name in () if is_complete else MTP_FIELDS:
            if getattr(section, name, None):
                setattr(section, name, 0)
    config.save_pretrained(unfinished)
    # Copied: transformers refuses to save contradictory settings, which some released models have, and a finished run
    # must not fail because of them.
    settings = cached_file(path, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    if settings is not None:
        shutil.copyfile(settings, unfinished / GENERATION_CONFIG_NAME)


def write_adapter(
    model: PeftModel, adapter: dict[str, Tensor], folder: Path, tokenizer: PreTrainedTokenizerBase, card: str | None
) -> int:
    """Write a folder with an adapter in peft's format, and check it; returns the bytes of its weights.

    Args:
        model: the adapted model, for names and configuration; its tensors are not used.
        adapter: unsharded tensors by their names in `model`.
        card: see `finish`.
    """
    num_bytes = sum(tensor.nbytes for tensor in adapter.values())
    unfinished = begin(folder, num_bytes)
    model.save_pretrained(str(unfinished), state_dict=adapter)
    path = unfinished / SAFETENSORS_WEIGHTS_NAME
    paths.flush(path)
    check_file(path, {name.replace(".default.", "."): tensor.to("meta") for name, tensor in adapter.items()})
    finish(folder, tokenizer, card)
    return num_bytes


def finish(
    folder: Path, tokenizer: PreTrainedTokenizerBase, card: str | None, split: StateDictSplit | None = None
) -> None:
    """Write tokenizer (with its chat template), end tokens, model card and index, and rename the unfinished folder.

    Args:
        card: text of the model card; None for none, not even the placeholder that peft writes.
        split: the weights' files; None for an adapter.

    Raises:
        BadExport: a file that another rank wrote is missing.
    """
    unfinished = paths.unfinished_path(folder)
    for file in split.filename_to_tensors if split is not None else ():
        if not (unfinished / file).is_file():
            raise BadExport(
                f"{unfinished / file}: found no such file, though another rank has written it; expected run.output_dir "
                "on a file system that all nodes share"
            )
    if split is not None and split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (unfinished / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(unfinished)
    if split is not None:
        add_end_tokens(unfinished, tokenizer)
    (unfinished / CARD).unlink(missing_ok=True)
    if card is not None:
        (unfinished / CARD).write_text(card, encoding="utf-8")
    paths.finish_folder(folder)


class WeightFiles:
    """Reader of single tensors from a model's folder (or hub id)."""

    def __init__(self, path: str, file: str = SAFE_WEIGHTS_NAME):
        """Raise UserError if the folder has no weights in safetensors format."""
        self.path = path
        folder = find_local_folder(path)
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        if index.is_file():
            self._file_by_name = {name: folder / file for name, file in read_weight_map(index).items()}
        elif (folder / file).is_file():
            with safe_open(folder / file, framework="pt") as weights:
                self._file_by_name = dict.fromkeys(weights.keys(), folder / file)
        else:
            raise UserError(f"{path}: found neither {index.name} nor {file}; expected weights in safetensors format")

    @property
    def names(self) -> list[str]:
        """Names of all tensors in the folder."""
        return list(self._file_by_name)

    def read(self, name: str) -> Tensor:
        """Read one tensor. Raises UserError if the folder does not have it."""
        if name not in self._file_by_name or not self._file_by_name[name].is_file():
            raise UserError(f"{self.path}: found no tensor {name} in its safetensors files; expected one")
        with safe_open(self._file_by_name[name], framework="pt") as file:
            return file.get_tensor(name)


_REMEDY = "is the download complete?"

_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
"""Matches names of weights in decoder layers; those of vision and audio towers have other prefixes."""

Shapes = dict[str, tuple[int, ...]]


def check_model_folder(path: str) -> None:
    """Check a local folder's configuration against the headers of its weights, without reading weights.

    Does nothing for a hub id. Raises UserError if the folder does not hold a complete causal language model.
    """
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
    check_shapes(path, build_empty_model(path, config), shapes)


def build_empty_model(path: str, config: PretrainedConfig, *, attention: str | None = None) -> PreTrainedModel:
    """Build a model on the meta device; takes tenths of a second for 32B parameters.

    Args:
        attention: name of the attention implementation; None for the architecture's default.

    Raises UserError if no model can be built from the configuration.
    """
    try:
        with torch.device("meta"):
            # A copy: transformers writes the attention into the configuration, which is shared.
            return find_auto_class(config).from_config(deepcopy(config), attn_implementation=attention)
    except Exception as error:  # any class: architectures use sizes and names from config.json unchecked
        problem = f"{type(error).__name__}: {last_line(error)}"
        raise make_config_error(path, f"no {config.model_type} can be built from its values: {problem}") from None


def _read_shapes(folder: Path) -> Shapes | None:
    """Read the shapes of all weights, by name; None without safetensors files."""
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if single.is_file():
        return _read_file_shapes(folder, single.name)
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            return None
        raise UserError(
            f"model.path: {folder}: found {files[0].name} and no {index.name}, expected it for weights in several "
            f"files; {_REMEDY}"
        )
    file_by_name = read_weight_map(index)
    shapes: Shapes = {}
    for name in sorted(set(file_by_name.values())):
        if not (folder / name).is_file():
            raise UserError(f"model.path: {folder}: {index.name} names {name}, which is missing; {_REMEDY}")
        shapes |= _read_file_shapes(folder, name)
    missing = sorted(file_by_name.keys() - shapes.keys())
    if missing:
        raise UserError(
            f"model.path: {folder}: {index.name} names {missing[0]}, which is not in {file_by_name[missing[0]]} "
            f"({len(missing):,} such names); index and files are of different models: download the model again"
        )
    return {name: shapes[name] for name in file_by_name}


def read_stored_tensors(path: str | Path, file: Path) -> dict[str, StoredTensor]:
    """Read the header of one of the model's safetensors files. Raises UserError if the file is truncated or damaged."""
    try:
        return read_header(file)
    except BadSafetensors as error:
        raise UserError(f"model.path: {path}: {file.name}: {error}; {_REMEDY}") from None


def _read_file_shapes(folder: Path, name: str) -> Shapes:
    return {key: stored.shape for key, stored in read_stored_tensors(folder, folder / name).items()}


def _check_number_of_layers(path: str, config: PretrainedConfig, shapes: Shapes) -> None:
    """Compare the number of layers in config.json and in the weights: transformers would silently drop layers, or
    initialise missing ones at random."""
    text = config.get_text_config()
    # LongCat-Flash has two attentions per layer, and counts each in num_hidden_layers.
    expected = text.num_layers if text.model_type == "longcat_flash" else getattr(text, "num_hidden_layers", None)
    numbers = [int(match[1]) for name in shapes if (match := _LAYER.match(name))]
    if not numbers or not isinstance(expected, int):
        return
    num_layers = max(numbers) + 1
    num_mtp_layers = getattr(text, "num_nextn_predict_layers", None) or 0
    if num_layers not in (expected, expected + num_mtp_layers):
        raise make_config_error(
            path,
            f"num_hidden_layers: found {expected}, expected {num_layers}, the number of layers in the weights; "
            "configuration and weights are of different models",
        )


def check_shapes(path: str, model: PreTrainedModel, shapes: Shapes) -> None:
    """Raise UserError if a weight has another shape in the model than in the files.

    Names that only one of them has are checked when weights are loaded, since transformers renames and fuses many.
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
