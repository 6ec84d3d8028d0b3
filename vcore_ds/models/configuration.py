"""Reading and checking a model's configuration, and its shape for the planner, before any weights are read."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from vcore_ds.common.errors import UserError, first_line, last_line
from vcore_ds.models.causal_lm import is_vision_language, read_unpadded_vocabulary
from vcore_ds.planning.model_shape import QWEN3_32B, REQUIRED_SIZES, SIZE_NAMES, ModelShape, make_shape
from vcore_ds.planning.packing import ATTENTION_LAYERS, OTHER_LAYERS

_EXPECTED = "expected a decoder-only language model (Qwen3, Llama, ...)"

VISION_LANGUAGE = (
    "gemma3", "gemma4", "llama4", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip
"""Types of vision-language models whose language model can be trained: on text, it alone computes the model's logits
from token ids and positions."""

_MAX_SIZES = {"num_hidden_layers": 10_000, "num_layers": 10_000, "n_layer": 10_000, "vocab_size": 2**31 - 1}
"""Largest plausible values: architectures build lists of layers, and token ids are int32."""


def read_config(path: str, *, local_files_only: bool = False) -> PretrainedConfig:
    """Read the configuration of a causal language model from a folder or the hub.

    Raises:
        UserError: it cannot be read, is inconsistent, or is of another kind of model.
    """
    raw = _read_json(path, local_files_only)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        problem = "found no model_type, expected the name of an architecture; is this a Hugging Face model?"
        raise make_config_error(path, problem)
    if model_type not in CONFIG_MAPPING:
        problem = (
            "needs code from its repository (trust_remote_code), which is not run here; "
            f"{_EXPECTED} that is part of transformers"
            if "auto_map" in raw
            else f"is unknown to transformers {transformers.__version__}; install a newer transformers, or choose "
            "another model"
        )
        raise make_config_error(path, f"model_type {model_type!r} {problem}")
    _check_sizes(path, raw)
    try:
        # Unless trust_remote_code is given, transformers asks at the terminal.
        config = AutoConfig.from_pretrained(path, local_files_only=local_files_only, trust_remote_code=False)
    except Exception as error:  # architectures validate their fields with exceptions of any class
        raise UserError(
            f"model.path: {path}: config.json does not describe a model of type {model_type!r}: {last_line(error)}"
        ) from None
    _check_kind(path, config)
    _check_heads(path, config)
    return config


def make_config_error(path: str, problem: str) -> UserError:
    """Make the error about a model's config.json."""
    return UserError(f"model.path: {path}: config.json: {problem}")


def _read_json(path: str, local_files_only: bool) -> dict[str, Any]:
    """Read config.json without interpreting it."""
    try:
        file = cached_file(path, "config.json", local_files_only=local_files_only)
        raw = json.loads(Path(str(file)).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"model.path: {path}: no configuration can be read: {first_line(error)}") from None
    except (ValueError, RecursionError) as error:
        raise make_config_error(path, f"not JSON ({first_line(error)})") from None
    if not isinstance(raw, dict):
        raise make_config_error(path, f"found {type(raw).__name__}, expected a JSON object")
    return raw


def _check_sizes(path: str, raw: dict[str, Any]) -> None:
    """Check sizes that cost time and memory as soon as transformers reads the configuration."""
    text = raw.get("text_config")
    for section in (raw, text if isinstance(text, dict) else {}):
        for key, largest in _MAX_SIZES.items():
            value = section.get(key)
            if isinstance(value, int) and not 1 <= value <= largest:
                raise make_config_error(path, f"{key}: found {value:.6g}, expected 1 to {largest:,}")


def _check_kind(path: str, config: PretrainedConfig) -> None:
    if config.model_type == "phimoe":
        # The start check would report it too, but only after loading 42 billion parameters.
        kind = (
            "an MoE model that draws the experts of each token at random in training and estimates its router's "
            "gradient (SparseMixer), so that neither losses nor gradients are those of the model"
        )
    elif config.is_encoder_decoder:
        kind = "an encoder and a decoder (seq2seq)"
    elif is_vision_language(config) and config.model_type not in VISION_LANGUAGE:
        kind = (
            f"not among the vision-language models whose language model can be trained ({', '.join(VISION_LANGUAGE)}); "
            "save its language model as a separate model"
        )
    elif _is_encoder(config):
        kind = "an encoder, whose attention is not causal"
    elif not is_vision_language(config) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "not a causal language model"
    else:
        return
    raise make_config_error(path, f"model_type {config.model_type!r} is {kind}; {_EXPECTED}")


def _is_encoder(config: PretrainedConfig) -> bool:
    """Whether attention is bidirectional, by the model's type or by a field of its configuration."""
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        return not getattr(config, "is_decoder", False)
    text = config.get_text_config()
    # Embedding models are decoders with one of these fields. Gemma 4's value "vision" leaves text causal.
    return not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None) in (True, "all")


def _check_heads(path: str, config: PretrainedConfig) -> None:
    sizes = {key: _read_size(config, key) for key in ("num_attention_heads", "num_key_value_heads")}
    for key, value in sizes.items():
        if value is not None and value < 1:
            raise make_config_error(path, f"{key}: found {value}, expected at least 1")
    num_heads, num_kv_heads = sizes.values()
    if num_heads is not None and num_kv_heads is not None and num_heads % num_kv_heads:
        problem = f"found num_attention_heads {num_heads} together with num_key_value_heads {num_kv_heads}"
        raise make_config_error(path, f"{problem}; expected a multiple of it")


def read_vocabulary_size(path: str) -> int:
    """Read the vocabulary size without padding: token ids are below it."""
    config = read_config(path)
    return read_unpadded_vocabulary(config) or config.get_text_config().vocab_size


def read_model_shape(path: str) -> ModelShape:
    """Read the sizes that determine time and memory of a pass.

    Architectures with unknown field names are assumed to be dense and Llama-like; those without attention heads get the
    sizes of Qwen3-32B, without packing and sequence parallelism.
    """
    config = read_config(path)
    sizes = {size: _read_size(config, names[0]) for size, names in SIZE_NAMES.items()}
    text = config.get_text_config()
    # Jamba, Falcon-H1 and others derive layer_types, which to_dict() leaves out.
    shape = make_shape(sizes, text.to_dict() | {"layer_types": getattr(text, "layer_types", None)})
    if shape is None:
        missing = next(SIZE_NAMES[size][0] for size in REQUIRED_SIZES if sizes[size] is None)
        why = f"whose configuration has no single {missing}"
        return replace(QWEN3_32B, no_sequence_parallelism=why, unpackable=why, hidden_size=0)
    if can_replace_attention(config):
        return shape
    # Such an attention may not isolate packed sequences.
    why = "whose attention cannot be replaced"
    return replace(shape, no_sequence_parallelism=why, unpackable=shape.unpackable or why)


def _read_size(config: PretrainedConfig, name: str) -> int | None:
    """Return a size, None if the architecture does not have it, or has one per layer."""
    try:
        value = getattr(config.get_text_config(), name, None)
    except RuntimeError:  # transformers raises it if the size differs between layers
        return None
    return value if isinstance(value, int) else None


def find_causal_lm_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that transformers loads."""
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_vision_language(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    return cast(type[PreTrainedModel], mapping[type(config)])  # typed for mappings whose values may be pairs


def can_replace_attention(config: PretrainedConfig) -> bool:
    """Whether the architecture's attention can be replaced by that of `vcore_ds.models.attention`.

    It must look up its attention function by name, and use only causal masks, sliding windows and chunks, no sparse
    attention with masks computed from the data.
    """
    causal_lm = find_causal_lm_class(config)
    # Hybrids of attention and recurrences look up names without setting `_supports_attention_backend`.
    finds_by_name = causal_lm._supports_attention_backend or hasattr(
        sys.modules[causal_lm.__module__], "ALL_ATTENTION_FUNCTIONS"
    )
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    return finds_by_name and set(layer_types) <= ATTENTION_LAYERS | OTHER_LAYERS | {"chunked_attention"}
