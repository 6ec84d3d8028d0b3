"""Writing Hugging Face model folders. No collectives.

A folder is written under a temporary name file by file, each file is read back and checked, and the folder is renamed
when it is complete. Weights come as a stream of (name, tensor), so that memory holds about one file at a time. The
tokens that end a turn in training are added to those at which generation stops.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from vcore_ds.common import paths
from vcore_ds.config.exports import CARD
from vcore_ds.data.conversations import Conversation, render_conversation
from vcore_ds.data.messages import Malformed, Message
from vcore_ds.data.templates import find_end
from vcore_ds.models.description import find_file, read_model
from vcore_ds.planning.known_models import CONFIG_NAME, read_config_file

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
    """Yield (file name, tensors by name) as soon as `weights` has yielded all tensors of a file. `weights`: name and
    tensor, or None for a tensor that another rank writes. Raises BadExport, at the end, if a tensor of `split` is
    missing."""
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
    `is_complete`: whether the weights include all of the input's, also the multi-token prediction layers.
    """
    config = deepcopy(read_model(path).config)
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
    if (settings := find_file(path, GENERATION_CONFIG_NAME)) is not None:
        shutil.copyfile(settings, unfinished / GENERATION_CONFIG_NAME)


def write_adapter(
    model: PeftModel, adapter: dict[str, Tensor], folder: Path, tokenizer: PreTrainedTokenizerBase, card: str | None
) -> int:
    """Write a folder with an adapter in peft's format, and check it; returns the bytes of its weights. `model`: the
    adapted model, for names and configuration; `adapter`: unsharded tensors by their names in it; `card`: as in
    `finish`."""
    num_bytes = sum(tensor.nbytes for tensor in adapter.values())
    unfinished = begin(folder, num_bytes)
    model.save_pretrained(str(unfinished), state_dict=adapter, save_embedding_layers=False)  # "auto" asks the hub
    path = unfinished / SAFETENSORS_WEIGHTS_NAME
    paths.flush(path)
    check_file(path, {name.replace(".default.", "."): tensor.to("meta") for name, tensor in adapter.items()})
    finish(folder, tokenizer, card)
    return num_bytes


def finish(
    folder: Path, tokenizer: PreTrainedTokenizerBase, card: str | None, split: StateDictSplit | None = None
) -> None:
    """Write tokenizer (with its chat template), end tokens, model card and index, and rename the unfinished folder.
    `card`: text of the model card; None for none, not even the placeholder that peft writes; `split`: the weights'
    files, None for an adapter. Raises BadExport if a file that another rank wrote is missing."""
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


_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
_TURNS: tuple[Message, ...] = ({"content": "a", "reasoning_content": "t"}, {"content": "", "tool_calls": [_CALL]})


@lru_cache(maxsize=8)
def find_end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the special tokens with which learned answers and calls end, by the tokenizer's chat template."""
    ends = []
    for turn in _TURNS if tokenizer.chat_template else ():
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", **turn}]
        try:
            rendered = render_conversation(Conversation(messages, [_TOOL] * ("tool_calls" in turn)), tokenizer)
        except Malformed:  # the template knows no calls
            continue
        ends += [find_end(tokenizer, rendered.text[slice(*span)]) for span in rendered.spans]
    ids = [tokenizer.convert_tokens_to_ids(token) for token in dict.fromkeys(ends) if token]
    return tuple(id for id in ids if isinstance(id, int))


def read_end_tokens(path: str) -> list[int]:
    """Return the end tokens of a model's generation_config.json, or else config.json; `path`: folder or hub id."""
    for name in (GENERATION_CONFIG_NAME, CONFIG_NAME):
        if (file := find_file(path, name)) is not None:
            ends = _read_object(file).get("eos_token_id")
            return [token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int)]
    return []


def add_end_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the ends of learned turns to generation_config.json in a model's folder, where it does not list them."""
    listed = read_end_tokens(str(folder))
    if missing := [token for token in find_end_tokens(tokenizer) if token not in listed]:
        path = folder / GENERATION_CONFIG_NAME
        settings = (_read_object(path) if path.is_file() else {}) | {"eos_token_id": listed + missing}
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _read_object(path: Path) -> dict[str, Any]:
    """Read an object; empty for a damaged file, which loading the model reports."""
    try:
        return read_config_file(path)
    except ValueError:
        return {}


def describe_end_tokens(path: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Say, in a line of the start screen, where learned turns end otherwise than the answers of the model at `path`."""
    if not tokenizer.chat_template:
        return []
    ends, listed = find_end_tokens(tokenizer), read_end_tokens(path)
    if not ends:
        return ["End of turn:  none is learned: the chat template writes no special token there"]
    if missing := [token for token in ends if token not in listed]:
        names = " and ".join(map(str, tokenizer.convert_ids_to_tokens(missing)))
        return [f"End of turn:  {names}, added to the model's end tokens in chat, eval and generation_config.json"]
    return []
