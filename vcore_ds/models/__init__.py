"""Models: loading, low-rank adapters, per-token losses, attention of all passes, rows that ranks share."""

from vcore_ds.models.attention import FORWARD_MODE_ATTENTION, FUSED_ATTENTION, TRAINING_ATTENTION, RowLayout
from vcore_ds.models.block_attention import block_attention
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.configuration import check_forward_mode, model_shape, read_config, vocabulary_size
from vcore_ds.models.dropout import TokenDropout, token_keys
from vcore_ds.models.dual_numbers import make_dual
from vcore_ds.models.folder_check import check_model_folder, empty_model
from vcore_ds.models.fused_attention import fused_attention
from vcore_ds.models.loading import load_causal_lm
from vcore_ds.models.lora import add_lora
from vcore_ds.models.lora_linear import BaseLinear, linear_sum, linear_tangent
from vcore_ds.models.parameter_counts import count_parameters
from vcore_ds.models.sequence_exchange import gather_losses, own_columns

__all__ = [
    "FORWARD_MODE_ATTENTION",
    "FUSED_ATTENTION",
    "TRAINING_ATTENTION",
    "BaseLinear",
    "RowLayout",
    "TokenDropout",
    "TokenLossModel",
    "add_lora",
    "block_attention",
    "check_forward_mode",
    "check_model_folder",
    "count_parameters",
    "empty_model",
    "fused_attention",
    "gather_losses",
    "linear_sum",
    "linear_tangent",
    "load_causal_lm",
    "make_dual",
    "model_shape",
    "own_columns",
    "read_config",
    "token_keys",
    "vocabulary_size",
]
