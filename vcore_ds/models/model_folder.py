"""Hugging Face folders: written aside file by file, read back, and renamed when they are whole. No collectives.

Weights come as a stream of (name, tensor), so that about one file's worth of them is in memory at a time.
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
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from vcore_ds.common import paths
from vcore_ds.common.errors import UserError, last_line
from vcore_ds.common.paths import reading
from vcore_ds.models.causal_lm import auto_class
from vcore_ds.models.configuration import bad_config, read_config
from vcore_ds.models.model_identity import CARD, find_local_folder
from vcore_ds.models.safetensors_ranges import BadSafetensors, StoredTensor, read_header

MAX_FILE_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class BadExport(RuntimeError):
    """The files read back differ from what was to be written."""


# ---- what a folder holds -------------------------------------------------------------------------------------------


def plan_files(weights: dict[str, Tensor], max_file_bytes: int = MAX_FILE_BYTES) -> StateDictSplit:
    """Which tensor goes into which file, from shapes and dtypes alone (meta tensors serve)."""
    return split_torch_state_dict_into_shards(weights, max_shard_size=max_file_bytes)


# ---- writing -------------------------------------------------------------------------------------------------------


def begin(folder: Path, num_bytes: int) -> Path:
    """The empty folder that `folder` is written in. Raises `paths.NoRoom`."""
    return paths.begin_folder(folder, num_bytes, "the weights. Make room")


def collect_files(
    split: StateDictSplit, weights: Iterable[tuple[str, Tensor | None]]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(file name, its tensors), each as soon as `weights` has yielded the last of them.

    Args:
        weights: name and tensor, None for a tensor that another rank keeps.

    Raises:
        BadExport: at the end, where a tensor of `split` never came.
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
    """One safetensors file, on the disk when this returns, read back and compared with what was to be written.

    Raises:
        BadExport: names, shapes or dtypes are not those of `expected`, or a value is not finite.
    """
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    paths.flush(path)
    check_file(path, expected)


def check_file(path: Path, expected: dict[str, Tensor]) -> None:
    """Raises BadExport where a safetensors file does not hold exactly `expected`, in finite numbers."""
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if names != expected.keys():
            raise BadExport(f"{path}: other names than expected: {', '.join(sorted(names ^ expected.keys()))}")
        for name, like in expected.items():
            tensor = file.get_tensor(name)
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                raise BadExport(
                    f"{path}: {name}: found {tuple(tensor.shape)} {tensor.dtype}; "
                    f"expected {tuple(like.shape)} {like.dtype}"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise BadExport(f"{path}: {name}: not all values are finite")


FURTHER_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Fields of configurations that count layers which predict further tokens (DeepSeek and GLM, Qwen, MiniMax)."""


def describe(unfinished: Path, path: str, dtype: torch.dtype, *, is_whole: bool) -> None:
    """Configuration and generation settings beside the weights.

    From the model's own folder, not from the model in memory, whose configuration was changed for training.

    Args:
        is_whole: the weights have all that the input's have, also the layers that predict further tokens.
    """
    config = AutoConfig.from_pretrained(path)
    config.dtype = dtype
    for section in {id(one): one for one in (config, config.get_text_config())}.values():
        if hasattr(section, "quantization_config"):
            del section.quantization_config  # the weights are not quantized
        for name in () if is_whole else FURTHER_LAYERS:
            if getattr(section, name, None):
                setattr(section, name, 0)
    config.save_pretrained(unfinished)
    # Copied, not saved again: transformers refuses to save settings that contradict each other, which some models are
    # shipped with, and a finished run must not fail for that.
    settings = cached_file(path, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    if settings is not None:
        shutil.copyfile(settings, unfinished / GENERATION_CONFIG_NAME)


def write_adapter(
    model: PeftModel, adapter: dict[str, Tensor], folder: Path, tokenizer: PreTrainedTokenizerBase, card: str | None
) -> int:
    """Writes a whole folder with the adapter in peft's format, read back; returns the bytes of its weights.

    Args:
        model: the adapted model, for names and configuration; its tensors are not used.
        adapter: name in `model` -> whole tensor.
        card: text of the model card; None for a folder without one.
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
    """Writes tokenizer (its chat template too), model card and index beside the weights, and gives what was written
    beside `folder` its name: from here on it is whole.

    Args:
        card: text of the model card; None for a folder without one, also without the placeholder that peft writes.
        split: the weights' files; None for an adapter.

    Raises:
        BadExport: a file that another rank wrote is not there.
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
        (unfinished / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(unfinished)
    (unfinished / CARD).unlink(missing_ok=True)
    if card is not None:
        (unfinished / CARD).write_text(card, encoding="utf-8")
    paths.finish_folder(folder)


# ---- reading -------------------------------------------------------------------------------------------------------


class WeightFiles:
    """The weights of a model's folder (or hub id), one tensor at a time."""

    def __init__(self, path: str, file: str = SINGLE_FILE):
        """Raises UserError where the folder has no weights in safetensors format."""
        self.path = path
        folder = find_local_folder(path)
        if (folder / INDEX).is_file():
            self._file_of = {
                name: folder / file
                for name, file in json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].items()
            }
        elif (folder / file).is_file():
            with safe_open(folder / file, framework="pt") as weights:
                self._file_of = dict.fromkeys(weights.keys(), folder / file)
        else:
            raise UserError(f"{path}: found neither {INDEX} nor {file}; expected weights in safetensors format")

    @property
    def names(self) -> list[str]:
        """Of all tensors in the folder."""
        return list(self._file_of)

    def read(self, name: str) -> Tensor:
        """Raises UserError where the folder has no such tensor."""
        if name not in self._file_of or not self._file_of[name].is_file():
            raise UserError(f"{self.path}: found no tensor {name} in its safetensors files; expected one")
        with safe_open(self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)


# Whether a folder holds a model that can be trained: its configuration against the headers of its weights.
#
# Reads a few kilobytes a file and no weights, so that a mistake is found before anything is started.


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
    check_shapes(path, build_empty_model(path, config), shapes)


def build_empty_model(path: str, config: PretrainedConfig, *, attention: str | None = None) -> PreTrainedModel:
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
