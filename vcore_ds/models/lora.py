"""Low-rank adapters (peft) on a causal language model."""

import re
import warnings

import peft
import torch
from peft import PeftModel, get_peft_model
from transformers import PretrainedConfig, PreTrainedModel

from vcore_ds.config.sections import LoraConfig
from vcore_ds.errors import UserError
from vcore_ds.models.folder_check import empty_model
from vcore_ds.models.language_model import decoder, is_vision_language
from vcore_ds.models.lora_linear import add_before_rounding
from vcore_ds.models.lora_targets import find_targets, names_as_they_are, taken_for_experts, write_as_parameters


def add_lora(model: PreTrainedModel, lora: LoraConfig) -> PeftModel:
    """Freezes the model and adds trainable adapters to its language model, in place.

    Raises UserError where no layer of the model has one of the names in `lora.target_modules`, or experts would get
    dropout.
    """
    layers, parameters = find_targets(model, lora.target_modules)
    if parameters and lora.dropout:
        raise UserError(
            f"lora.dropout: found {lora.dropout:g} together with adapters on {', '.join(parameters)}; expected 0: an "
            "expert computes with its weight plus the adapter's product, so that there is no adapter's input to drop"
        )
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft divides it by the rank, whatever its type
        lora_dropout=lora.dropout,
        target_modules=layers,
        target_parameters=parameters or None,
        exclude_modules=_outside_the_decoder(model),
        task_type="CAUSAL_LM",
        bias="none",
    )
    taken = taken_for_experts(model, layers)
    try:
        with warnings.catch_warnings(), names_as_they_are():
            # peft asks transformers for gradient checkpointing by the name it had before 5.23.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            adapted = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"lora.target_modules: {lora.target_modules!r}: {error}") from None
    # peft keeps a set, whose order is another one in every process: the same run writes the same adapter_config.json.
    config.target_modules = sorted(config.target_modules or ())
    if taken:
        write_as_parameters(config, taken)
    add_before_rounding(adapted)
    # The first layer's input comes out of a frozen embedding. Unless it requires a gradient, an activation checkpoint
    # around that layer passes none to the adapters, and ZeRO-3's backward hook on it runs before they have theirs.
    adapted.enable_input_require_grads()
    return adapted


def empty_adapted(path: str, config: PretrainedConfig, lora: LoraConfig) -> PeftModel:
    """A model without weights, with adapters, for names, shapes and configuration; see `empty_model`.

    Raises UserError as `empty_model` and `add_lora` do.
    """
    base = empty_model(path, config)
    with torch.device("meta"):  # nor is anything drawn
        return add_lora(base, lora)


def _outside_the_decoder(model: PreTrainedModel) -> str | None:
    """Pattern of the layers of a vision-language model that no text goes through: some have the decoder's names."""
    if not is_vision_language(model.config):
        return None
    name = next(name for name, module in model.named_modules() if module is decoder(model))
    return rf"(?!{re.escape(name)}\.).*"
