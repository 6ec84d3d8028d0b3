"""A model's config.json on this machine, read without transformers; and of published models, by their name, the fields
of it that a plan reads."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vcore_ds.planning.model_shape import SIZE_NAMES, ModelShape, make_shape

CONFIG_NAME = "config.json"

_TEXT_SECTIONS = ("text_config", "decoder", "generator", "text_encoder")
"""Keys of config.json that may hold the language model, as in transformers' `get_text_config`."""


def read_config_file(file: Path) -> dict[str, Any]:
    """Read a config.json without interpreting it. Raises OSError; ValueError if it is no JSON object."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"found {type(raw).__name__}, expected a JSON object")
    return raw


def find_folder(path: str) -> Path | None:
    """Find the folder of a model's config.json on this machine; None where there is none. `path`: the folder, the file,
    or a hub id that is in Hugging Face's cache."""
    with suppress(OSError):  # in a folder that this user may not read, which is said where the model is opened
        for file in _list_config_files(path):
            if file.is_file():
                return file.parent
    return None


def is_on_disk(path: str) -> bool:
    """Whether a model's configuration is on this machine, in whatever state."""
    return find_folder(path) is not None


def read_shape(path: str) -> ModelShape | None:
    """Read the shape of a model on this machine (`find_folder`); None where it cannot be read."""
    for file in _list_config_files(path):
        with suppress(OSError, ValueError):
            if (shape := parse_shape(read_config_file(file))) is not None:
                return shape
    return None


def _list_config_files(path: str) -> list[Path]:
    """List the places of config.json, by preference; in Hugging Face's cache in the newest revision.
    `huggingface_hub.try_to_load_from_cache` finds the same file, but takes 0.2 s to import."""
    from huggingface_hub.constants import HF_HUB_CACHE

    local = Path(path) if path.endswith(".json") else Path(path) / CONFIG_NAME
    cache = Path(HF_HUB_CACHE) / f"models--{path.replace('/', '--')}"
    with suppress(OSError, ValueError):
        revision = (cache / "refs" / "main").read_text(encoding="utf-8").strip()
        return [local, cache / "snapshots" / revision / CONFIG_NAME]
    return [local]


def parse_shape(raw: Mapping[str, Any]) -> ModelShape | None:
    """Parse the values of a config.json; None where it lacks a size, or has one that cannot be meant."""
    for section in _TEXT_SECTIONS:
        if isinstance(raw.get(section), dict):
            raw = raw[section]
            break
    sizes: dict[str, int | None] = {}
    for size, names in SIZE_NAMES.items():
        values = [raw[name] for name in names if raw.get(name) is not None]
        if any(type(value) is not int or not 1 <= value < 2**31 for value in values):
            return None
        sizes[size] = values[0] if values else None
    return make_shape(sizes, raw)


_SAME_SIZES = {
    "meta-": "",
    "llama-3-": "llama-3.1-",
    "llama-3.3-": "llama-3.1-",
    "qwen2.5-coder-": "qwen2.5-",
    "qwen2.5-math-": "qwen2.5-",
    "deepseek-r1-distill-qwen-": "qwen2.5-",
    "deepseek-r1-distill-llama-": "llama-3.1-",
    "olmo-3-1025-": "olmo-3-",
    "olmo-3-1125-": "olmo-3-",
}
"""Beginnings of names whose models have the sizes of others."""

CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""The fields of config.json that a plan reads, of published models, by the name with which hub ids begin. Positions are
read from config.json alone: they differ between the models of one size. Those of vision-language models are of the
language model, without the image encoder."""

KNOWN_MODELS = {name: shape for name, config in CONFIGS.items() if (shape := parse_shape(config)) is not None}

QWEN3_32B = KNOWN_MODELS["Qwen3-32B"]
"""The model that a plan assumes where it cannot see the real one."""


def find_known_model(path: str) -> str | None:
    """Find the name in `KNOWN_MODELS` of a model's folder or hub id, such as `Qwen/Qwen3-8B-Base`; None for others.

    The last part of the path has to begin with the whole name, so that `Qwen3-4B2` is not taken for another size; the
    longest such name counts.
    """
    last = path.rstrip("/").rpartition("/")[2].lower() + "-"
    names = [name for name in KNOWN_MODELS if last.startswith(f"{name.lower()}-")]
    for beginning, other in _SAME_SIZES.items():
        if not names and last.startswith(beginning):
            return find_known_model(other + last.removeprefix(beginning).removesuffix("-"))
    return max(names, key=len, default=None)


def find_shape(path: str) -> tuple[ModelShape, str] | None:
    """Find the shape of a model that is on this machine or whose name is known, and say which; None for others."""
    shape = read_shape(path)
    if shape is not None:
        return shape, f"read from {path}"
    name = find_known_model(path)
    return None if name is None else (KNOWN_MODELS[name], f"{name} by its name")


def find_or_assume_shape(path: str) -> ModelShape:
    """Find the shape of a model; for one that is neither on this machine nor known assume Qwen3-32B's."""
    known = find_shape(path)
    return replace(QWEN3_32B, is_assumed=True) if known is None else known[0]
