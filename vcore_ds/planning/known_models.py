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


def _config(
    model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, width: int, vocabulary: int,
    *, tied: bool = False, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return dict(
        model_type=model_type,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=width,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        **more,
    )


def _qwen3(layers: int, hidden: int, heads: int, width: int, *, tied: bool = False) -> dict[str, Any]:
    return _config("qwen3", layers, hidden, heads, 8, width, 151936, tied=tied, head_dim=128)


CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _qwen3(28, 1024, 16, 3072, tied=True),
    "Qwen3-1.7B": _qwen3(28, 2048, 16, 6144, tied=True),
    "Qwen3-4B": _qwen3(36, 2560, 32, 9728, tied=True),
    "Qwen3-8B": _qwen3(36, 4096, 32, 12288),
    "Qwen3-14B": _qwen3(40, 5120, 40, 17408),
    "Qwen3-32B": _qwen3(64, 5120, 64, 25600),
    "Qwen2.5-0.5B": _config("qwen2", 24, 896, 14, 2, 4864, 151936, tied=True),
    "Qwen2.5-1.5B": _config("qwen2", 28, 1536, 12, 2, 8960, 151936, tied=True),
    "Qwen2.5-3B": _config("qwen2", 36, 2048, 16, 2, 11008, 151936, tied=True),
    "Qwen2.5-7B": _config("qwen2", 28, 3584, 28, 4, 18944, 152064),
    "Qwen2.5-14B": _config("qwen2", 48, 5120, 40, 8, 13824, 152064),
    "Qwen2.5-32B": _config("qwen2", 64, 5120, 40, 8, 27648, 152064),
    "Qwen2.5-72B": _config("qwen2", 80, 8192, 64, 8, 29568, 152064),
    "DeepSeek-R1-Distill-Qwen-1.5B": _config("qwen2", 28, 1536, 12, 2, 8960, 151936),
    "Llama-3.1-8B": _config("llama", 32, 4096, 32, 8, 14336, 128256),
    "Llama-3.1-70B": _config("llama", 80, 8192, 64, 8, 28672, 128256),
    "Llama-3.1-405B": _config("llama", 126, 16384, 128, 8, 53248, 128256),
    "Llama-3.2-1B": _config("llama", 16, 2048, 32, 8, 8192, 128256, tied=True),
    "Llama-3.2-3B": _config("llama", 28, 3072, 24, 8, 8192, 128256, tied=True),
    "gemma-2-2b": _config("gemma2", 26, 2304, 8, 4, 9216, 256000, tied=True, head_dim=256),
    "gemma-2-9b": _config("gemma2", 42, 3584, 16, 8, 14336, 256000, tied=True, head_dim=256),
    "gemma-2-27b": _config("gemma2", 46, 4608, 32, 16, 36864, 256000, tied=True, head_dim=128),
    "gemma-3-1b": _config("gemma3_text", 26, 1152, 4, 1, 6912, 262144, tied=True, head_dim=256),
    # The language models of vision-language models, without the image encoder.
    "gemma-3-4b": _config("gemma3_text", 34, 2560, 8, 4, 10240, 262208, tied=True, head_dim=256),
    "gemma-3-12b": _config("gemma3_text", 48, 3840, 16, 8, 15360, 262208, tied=True, head_dim=256),
    "gemma-3-27b": _config("gemma3_text", 62, 5376, 32, 16, 21504, 262208, tied=True, head_dim=128),
    "OLMo-2-0425-1B": _config("olmo2", 16, 2048, 16, 16, 8192, 100352),
    "OLMo-2-1124-7B": _config("olmo2", 32, 4096, 32, 32, 11008, 100352),
    "OLMo-2-1124-13B": _config("olmo2", 40, 5120, 40, 40, 13824, 100352),
    "OLMo-2-0325-32B": _config("olmo2", 64, 5120, 40, 8, 27648, 100352),
    "Olmo-3-7B": _config("olmo3", 32, 4096, 32, 32, 11008, 100278),
    "Olmo-3-32B": _config("olmo3", 64, 5120, 40, 8, 27648, 100278),
    "Mistral-7B": _config("mistral", 32, 4096, 32, 8, 14336, 32000),
    "Mistral-7B-v0.3": _config("mistral", 32, 4096, 32, 8, 14336, 32768),
    "Mistral-7B-Instruct-v0.3": _config("mistral", 32, 4096, 32, 8, 14336, 32768),
    "Mistral-Nemo": _config("mistral", 40, 5120, 32, 8, 14336, 131072, head_dim=128),
    "Mistral-Small-24B": _config("mistral", 40, 5120, 32, 8, 32768, 131072, head_dim=128),
    "SmolLM2-135M": _config("llama", 30, 576, 9, 3, 1536, 49152, tied=True),
    "SmolLM2-360M": _config("llama", 32, 960, 15, 5, 2560, 49152, tied=True),
    "SmolLM2-1.7B": _config("llama", 24, 2048, 32, 32, 8192, 49152, tied=True),
    "Qwen3-30B-A3B": _config(
        "qwen3_moe", 48, 2048, 32, 4, 6144, 151936, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "Qwen3-235B-A22B": _config(
        "qwen3_moe", 94, 4096, 64, 4, 12288, 151936, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
    ),
    "DeepSeek-V3": _config(
        "deepseek_v3", 61, 7168, 128, 128, 18432, 129280, first_k_dense_replace=3,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1,
    ),
    "GLM-4.5": _config(
        "glm4_moe", 92, 5120, 96, 8, 12288, 151552, first_k_dense_replace=3, head_dim=128, use_qk_norm=True,
        n_routed_experts=160, num_experts_per_tok=8, moe_intermediate_size=1536, n_shared_experts=1,
    ),
    "GLM-4.5-Air": _config(
        "glm4_moe", 46, 4096, 96, 8, 10944, 151552, first_k_dense_replace=1, head_dim=128,
        n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408, n_shared_experts=1,
    ),
    "gpt-oss-20b": _config(
        "gpt_oss", 24, 2880, 64, 8, 2880, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
    ),
    "gpt-oss-120b": _config(
        "gpt_oss", 36, 2880, 64, 8, 2880, 201088, head_dim=64, num_local_experts=128, num_experts_per_tok=4,
    ),
    "Mixtral-8x7B": _config("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
}  # fmt: skip
"""Sizes by the name with which hub ids begin. Positions are read from config.json alone: they differ between the models
of one size."""

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
