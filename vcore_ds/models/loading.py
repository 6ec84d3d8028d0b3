"""Loading a pretrained causal language model from a folder or the hub."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.models.causal_lm import find_auto_class, freeze_towers
from vcore_ds.models.description import read_model, refuse_unreadable_model, resolve_attention
from vcore_ds.models.experts import OUR_EXPERTS
from vcore_ds.models.stored_weights import check_nothing_is_missing

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""By their names in recipes and on command lines."""

FUNCTIONAL_DROPOUT = (
    "attention_dropout",
    "residual_dropout",  # Seed-OSS, StarCoder 2
    "embedding_dropout",
    "hidden_dropout",
    "activation_dropout",  # OPT, BioGPT, XGLM
    "dropout",
    "layerdrop",
    "router_jitter_noise",  # Mixtral, MiniMax
    "input_jitter_noise",
)
"""Dropout rates in config.json that architectures apply by functions, which `vcore_ds.models.dropout` cannot replace,
unlike modules (`resid_pdrop` of GPT-2 and Phi)."""


def load_causal_lm(
    path: str, *, dtype: torch.dtype | str, attention: str, gradient_checkpointing: bool
) -> PreTrainedModel:
    """Load a model that passed `check_model_folder` by transformers' `from_pretrained`, and prepare it for training.
    `dtype`: of the weights in memory, "auto" for that of the files; `attention`: see `resolve_attention`. Raises
    UserError if the model cannot be loaded, or some of its weights are missing."""
    config = read_training_config(path)
    try:
        with refuse_unreadable_model(path), refuse_failing_code(path):
            loaded: Any = find_auto_class(config).from_pretrained(  # a pair, by output_loading_info
                path,
                config=config,
                dtype=dtype,
                attn_implementation=resolve_attention(config, attention),
                trust_remote_code=False,
                output_loading_info=True,
            )
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise UserError(f"model.path: {path}: the weights do not fit config.json: {first_line(error)}") from None
    model, info = loaded
    check_nothing_is_missing(path, info["missing_keys"])
    return prepare_for_training(model, gradient_checkpointing)


@contextmanager
def refuse_failing_code(name: str) -> Iterator[None]:
    """Context that turns an exception in an architecture's code in transformers into a UserError about the model.

    Some cannot be built under ZeRO-3, or do not run with the arguments of training or their configuration.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
        file = Path(frames[-1].filename)
        if not file.is_relative_to(Path(transformers.__file__).parent / "models"):
            raise
        raise UserError(
            f"model.path: {name}: the architecture's own code fails: {type(error).__name__}: {first_line(error)} "
            f"({file.name}:{frames[-1].lineno}); expected another model, or another version of transformers"
        ) from error


def read_training_config(path: str) -> PretrainedConfig:
    """Read the model's configuration and change it for training. Raises UserError as `read_model` does."""
    config = deepcopy(read_model(path).config)
    text = config.get_text_config()
    for name in FUNCTIONAL_DROPOUT:
        if isinstance(getattr(text, name, None), float | int):
            # Utilities are of the model without dropout, and these rates cannot be switched off by hooks.
            setattr(text, name, 0.0)
    config._experts_implementation = OUR_EXPERTS  # no effect on dense models
    return config


def prepare_for_training(model: PreTrainedModel, gradient_checkpointing: bool) -> PreTrainedModel:
    """Disable the KV cache, `freeze_towers`, and optionally enable activation checkpointing; in place."""
    model.config.use_cache = False
    freeze_towers(model)
    if gradient_checkpointing:
        checkpoint_activations(model)
    return model


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Make each decoder layer save only its input, and recompute the rest in the backward."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # the name in transformers 5.17
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
