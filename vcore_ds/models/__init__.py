"""Models: loading, low-rank adapters, per-token losses, attention with a tangent. No process groups."""

from vcore_ds.models.attention import FORWARD_MODE_ATTENTION, block_attention
from vcore_ds.models.causal_lm import TokenLossHead, TokenLossModel
from vcore_ds.models.configuration import check_forward_mode, model_shape, read_config, vocabulary_size
from vcore_ds.models.folder_check import check_model_folder
from vcore_ds.models.loading import load_causal_lm
from vcore_ds.models.lora import add_lora
from vcore_ds.models.lora_linear import BaseLinear, linear_sum

__all__ = [
    "FORWARD_MODE_ATTENTION",
    "BaseLinear",
    "TokenLossHead",
    "TokenLossModel",
    "add_lora",
    "block_attention",
    "check_forward_mode",
    "check_model_folder",
    "linear_sum",
    "load_causal_lm",
    "model_shape",
    "read_config",
    "vocabulary_size",
]
