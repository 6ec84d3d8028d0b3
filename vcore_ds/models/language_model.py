"""The language model of a Hugging Face model: its decoder, and what it does to the products with its output embedding.

Read off `*ForCausalLM.forward` and `*ForConditionalGeneration.forward` of transformers 5.23; a test reads them again.
"""

from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from vcore_ds.models.token_loss import LogitTransform

FACTORS = ("logit_scale", "lm_head_multiplier")
"""Fields by which logits are multiplied (Cohere; Falcon-H1)."""
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Fields by which logits, or the hidden states they are made of, are divided (Granite, MiniCPM3; Inkling)."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Fields with the bound of capped logits (Gemma; RecurrentGemma; xLSTM)."""


def is_vision_language(config: PretrainedConfig) -> bool:
    """Whether the language model is one of the parts of the model, with a configuration of its own."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and config.get_text_config() is not config


def auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """What opens the whole model. Of a vision-language model, the class for causal language models opens the language
    model alone, or nothing."""
    return AutoModelForImageTextToText if is_vision_language(config) else AutoModelForCausalLM


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """What the architecture does to its logits."""
    if config.model_type in ("gemma3", "mpt"):  # have such fields, and do not read them
        return LogitTransform()
    text = config.get_text_config()
    factor, divisor, softcap = (_declared(text, names) for names in (FACTORS, DIVISORS, SOFTCAPS))
    if text.model_type == "hyperclovax":  # its field of Granite's name is a factor
        factor, divisor = divisor, None
    return LogitTransform((factor or 1.0) / (divisor or 1.0), softcap)


def _declared(config: PretrainedConfig, names: tuple[str, ...]) -> float | None:
    """Value of the one of the fields that the architecture has. A config.json may hold others, which nothing reads."""
    return next((getattr(config, name) for name in names if hasattr(type(config), name)), None)


def unpadded_vocabulary(config: PretrainedConfig) -> int | None:
    """Rows of the output embedding that are tokens, where the rest have no probability (Inkling); None for all."""
    return getattr(config.get_text_config(), "unpadded_vocab_size", None)


def decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its head: token ids to hidden states. Of a vision-language model, the language model's."""
    found = model.get_decoder()
    if found is model.get_output_embeddings():  # which ModernBERT's decoder calls `decoder`
        return model.base_model
    # Where the architecture calls it by none of the names that transformers looks for (Llama 4), it gives the model
    # with the head.
    return found.model if hasattr(found, "lm_head") else found


def freeze_towers(model: PreTrainedModel) -> None:
    """Freezes what is neither decoder nor head, in place: no text goes through it."""
    used = {id(p) for part in (decoder(model), model.get_output_embeddings()) for p in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in used:
            parameter.requires_grad_(False)
