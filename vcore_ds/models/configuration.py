"""A model's configuration: reading it, and what follows from it before any weights are read."""

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    PretrainedConfig,
)
from transformers.utils import cached_file

from vcore_ds.errors import UserError, first_line
from vcore_ds.planning import ModelShape, layer_parameters

_EXPECTED = "expected a decoder-only language model (Qwen3, Llama, ...)"

_MAX_SIZES = {"num_hidden_layers": 10_000, "num_layers": 10_000, "n_layer": 10_000, "vocab_size": 2**31 - 1}
"""Largest values that can be meant: an architecture builds lists of its layers, and token ids are int32."""


def read_config(path: str, *, local_files_only: bool = False) -> PretrainedConfig:
    """The configuration of the causal language model in a folder or of a hub id.

    Raises:
        UserError: it cannot be read, does not agree with itself, or is of another kind of model.
    """
    raw = _read_json(path, local_files_only)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(
            f"model.path: {path}: config.json: found no model_type, expected the name of an architecture; "
            "is this a Hugging Face model?"
        )
    if model_type not in CONFIG_MAPPING:
        if "auto_map" in raw:
            raise UserError(
                f"model.path: {path}: config.json: model_type {model_type!r} needs code of the model's own "
                f"(trust_remote_code), which is not run here; {_EXPECTED} that transformers has itself"
            )
        raise UserError(
            f"model.path: {path}: config.json: model_type {model_type!r} is unknown to transformers "
            f"{transformers.__version__}; install a newer transformers, or choose another model"
        )
    _check_sizes(path, raw)
    try:
        # Without a decision about the model's own code, transformers asks at the terminal.
        config = AutoConfig.from_pretrained(path, local_files_only=local_files_only, trust_remote_code=False)
    except Exception as error:  # each architecture checks its own fields, with a class of exception of its own
        raise UserError(
            f"model.path: {path}: config.json does not describe a model of type {model_type!r}: {last_line(error)}"
        ) from None
    _check_kind(path, config)
    _check_heads(path, config)
    return config


def _read_json(path: str, local_files_only: bool) -> dict[str, Any]:
    """config.json as it is written."""
    try:
        file = cached_file(path, "config.json", local_files_only=local_files_only)
        raw = json.loads(Path(str(file)).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"model.path: {path}: no configuration can be read: {first_line(error)}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"model.path: {path}: config.json: not JSON ({first_line(error)})") from None
    if not isinstance(raw, dict):
        raise UserError(f"model.path: {path}: config.json: found {type(raw).__name__}, expected a JSON object")
    return raw


def _check_sizes(path: str, raw: dict[str, Any]) -> None:
    """The sizes that cost time and memory as soon as transformers sees them."""
    text = raw.get("text_config")
    for section in (raw, text if isinstance(text, dict) else {}):
        for key, largest in _MAX_SIZES.items():
            value = section.get(key)
            if isinstance(value, int) and not 1 <= value <= largest:
                raise UserError(f"model.path: {path}: config.json: {key}: found {value:.6g}, expected 1 to {largest:,}")


def _check_kind(path: str, config: PretrainedConfig) -> None:
    if config.is_encoder_decoder:
        kind = "an encoder and a decoder (seq2seq)"
    elif type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        kind = "an encoder, whose tokens see those behind them"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "no causal language model"
    else:
        return
    raise UserError(f"model.path: {path}: config.json: model_type {config.model_type!r} is {kind}; {_EXPECTED}")


def _check_heads(path: str, config: PretrainedConfig) -> None:
    text = config.get_text_config()
    num_heads, num_kv_heads = (getattr(text, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    for key, value in (("num_attention_heads", num_heads), ("num_key_value_heads", num_kv_heads)):
        if isinstance(value, int) and value < 1:
            raise UserError(f"model.path: {path}: config.json: {key}: found {value}, expected at least 1")
    if isinstance(num_heads, int) and isinstance(num_kv_heads, int) and num_heads % num_kv_heads:
        raise UserError(
            f"model.path: {path}: config.json: found num_attention_heads {num_heads} together with "
            f"num_key_value_heads {num_kv_heads}; expected a multiple of it"
        )


def last_line(error: Exception) -> str:
    """The last line of the error's message, or its class where it has none: validators name the field there."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


def vocabulary_size(path: str) -> int:
    """Rows of the input embedding: token ids are below it."""
    return read_config(path).get_text_config().vocab_size


def model_shape(path: str) -> ModelShape:
    """What the time of a pass depends on. Architectures whose configuration has other names are taken for dense
    Llama-like ones."""
    config = read_config(path)
    text = config.get_text_config()
    hidden, num_heads = text.hidden_size, text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // num_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    intermediate = getattr(text, "intermediate_size", None)
    return ModelShape(
        text.num_hidden_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        layer_parameters(hidden, num_heads, num_kv_heads, head_dim, intermediate),
        can_share_rows=can_replace_attention(config),
    )


def check_forward_mode(path: str) -> None:
    """Raises UserError where forward mode cannot go through the model: its attention is its own code, and cannot be
    replaced by one with a tangent. A model that is not there yet, or cannot be read, passes: loading says so."""
    try:
        config = read_config(path, local_files_only=True)
    except UserError:
        return
    if not can_replace_attention(config):
        name = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
        raise UserError(
            f"utility.estimator: found jvp together with model.path {path} ({name}), whose attention "
            "cannot be replaced by one with a forward-mode derivative; expected finite_difference "
            "(utility.estimator=finite_difference utility.epsilon=auto), or another architecture"
        )


def can_replace_attention(config: PretrainedConfig) -> bool:
    """Whether the architecture finds its attention function by name, so that one of our own can serve."""
    return bool(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_attention_backend)
