"""Models: loading, low-rank adapters, per-token losses, attention with a tangent. No process groups."""

from .attention import FORWARD_MODE_ATTENTION, block_attention
from .causal_lm import (
    TokenLossHead,
    TokenLossModel,
    attention_length,
    check_forward_mode,
    check_model_folder,
    load_causal_lm,
    load_tokenizer,
)
from .lora import add_lora
from .lora_linear import BaseLinear, linear_sum

__all__ = [
    "BaseLinear",
    "FORWARD_MODE_ATTENTION",
    "TokenLossHead",
    "TokenLossModel",
    "add_lora",
    "attention_length",
    "block_attention",
    "check_forward_mode",
    "check_model_folder",
    "load_causal_lm",
    "linear_sum",
    "load_tokenizer",
]
