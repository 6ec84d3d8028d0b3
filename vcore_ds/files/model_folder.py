"""Hugging Face folders: written aside file by file, read back, and renamed when they are whole. No collectives.

Weights come as a stream of (name, tensor), so that about one file's worth of them is in memory at a time.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from vcore_ds.errors import UserError
from vcore_ds.files import aside
from vcore_ds.files.base_model import CARD
from vcore_ds.files.model_digest import digest_of_model as digest_of_model
from vcore_ds.files.model_digest import local_folder as local_folder

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
    """The empty folder that `folder` is written in. Raises `aside.NoRoom`."""
    return aside.begin_folder(folder, num_bytes, "the weights. Make room")


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
    aside.flush(path)
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
    aside.flush(path)
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
    unfinished = aside.unfinished_path(folder)
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
    aside.finish_folder(folder)


# ---- reading -------------------------------------------------------------------------------------------------------


class WeightFiles:
    """The weights of a model's folder (or hub id), one tensor at a time."""

    def __init__(self, path: str, file: str = SINGLE_FILE):
        """Raises UserError where the folder has no weights in safetensors format."""
        self.path = path
        folder = local_folder(path)
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
