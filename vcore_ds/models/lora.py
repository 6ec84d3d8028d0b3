"""Low-rank adapters (peft) on a causal language model."""

import warnings
from collections.abc import Sequence

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from ..errors import UserError
from .lora_linear import add_before_rounding


def add_lora(
    model: PreTrainedModel, *, rank: int, alpha: float, dropout: float, target_modules: str | Sequence[str]
) -> PeftModel:
    """Freezes the model and adds trainable adapters, in place.

    Args:
        target_modules: "all-linear" (every linear layer but the output embedding), or names of layers.

    Raises UserError where no layer of the model has one of the names.
    """
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM", bias="none"
    )
    try:
        with warnings.catch_warnings():
            # peft asks transformers for gradient checkpointing by the name it had before 5.23.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            adapted = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"lora.target_modules: {target_modules!r}: {error}") from None
    # peft keeps a set, whose order is another one in every process: the same run writes the same adapter_config.json.
    config.target_modules = sorted(config.target_modules or ())
    add_before_rounding(adapted)
    # The first layer's input comes out of a frozen embedding. Unless it requires a gradient, an activation checkpoint
    # around that layer passes none to the adapters, and ZeRO-3's backward hook on it runs before they have theirs.
    adapted.enable_input_require_grads()
    return adapted
