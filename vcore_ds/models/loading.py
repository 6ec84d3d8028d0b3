"""A pretrained causal language model, read from its folder or the hub."""

from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from vcore_ds.errors import UserError, first_line
from vcore_ds.models.attention import TRAINING_ATTENTION
from vcore_ds.models.configuration import can_replace_attention, read_config


def load_causal_lm(path: str, *, dtype: torch.dtype, attention: str, gradient_checkpointing: bool) -> PreTrainedModel:
    """The pretrained model, ready to train. Under ZeRO-3 loading each rank keeps its shards only.

    What `check_model_folder` says cheaply of a local folder is not asked again.

    Args:
        attention: `auto` for attention of our own where the architecture lets it be replaced, else Hugging Face's
            `sdpa`; or the name of one of Hugging Face's kernels.

    Raises:
        UserError: there is no model that can be used, or not all of its weights.
    """
    config = read_config(path)
    if getattr(config, "attention_dropout", 0.0):
        # Utilities are those of the model without dropout, and attention reads its rate where no hook can reach it.
        config.attention_dropout = 0.0
    if attention == "auto":
        attention = TRAINING_ATTENTION if can_replace_attention(config) else "sdpa"
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, TypeError, KeyError, ImportError, SafetensorError, UnpicklingError) as error:
        raise UserError(f"model.path: {path}: no causal language model can be loaded: {first_line(error)}") from None
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise UserError(f"model.path: {path}: the weights do not fit config.json: {first_line(error)}") from None
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise UserError(
            f"model.path: {path}: found no weights for {missing[0]}{more}, which would be random numbers; expected all "
            "weights of a causal language model (not a classifier, a bare decoder, or an adapter)"
        )
    model.config.use_cache = False
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model
