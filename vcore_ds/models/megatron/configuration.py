"""megatron-core's configuration of a dense decoder, made from that of a Hugging Face model.

Models that cannot be divided among the ranks of a tensor-parallel group are refused here, before anything is built.
"""

import warnings

import torch
from torch.nn.functional import silu
from transformers import PretrainedConfig

from vcore_ds.errors import UserError
from vcore_ds.imports import without_compiler
from vcore_ds.planning.mixtures import is_mixture

with warnings.catch_warnings(), without_compiler():
    # They are about packages for GPUs that the layers used here do without; nor is anything compiled of what is called.
    warnings.simplefilter("ignore")
    from megatron.core.transformer.transformer_config import TransformerConfig

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Dense decoders with RMSNorm before attention and MLP, rotary positions and a gated MLP."""

ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary frequencies that do not depend on the length of the row."""


def transformer_config(path: str, config: PretrainedConfig, *, tensor: int, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's configuration of the model.

    Args:
        path: folder or hub id, for messages.
        config: of the Hugging Face model.
        tensor: ranks of a tensor-parallel group (`parallel.tensor`).
        dtype: of the parameters.

    Raises:
        UserError: the architecture is not one of `ARCHITECTURES` as released, or has sizes that cannot be divided.
    """
    _check_architecture(path, config)
    _check_sizes(path, config, tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # defaults of its own that it calls deprecated
        return TransformerConfig(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=head_dim(config),
            ffn_hidden_size=config.intermediate_size,
            gated_linear_unit=True,
            activation_func=silu,
            normalization="RMSNorm",
            layernorm_epsilon=config.rms_norm_eps,
            qk_layernorm=config.model_type == "qwen3",
            add_bias_linear=False,
            add_qkv_bias=config.model_type == "qwen2",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            tensor_model_parallel_size=tensor,
            sequence_parallel=tensor > 1,
            use_cpu_initialization=True,  # parameters are made on torch's default device
            perform_initialization=False,  # and filled from the model's files
        )


def head_dim(config: PretrainedConfig) -> int:
    """Dimensions of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def sliding_window(config: PretrainedConfig, layer: int) -> int | None:
    """Keys that a query of this layer sees, itself included; None for all before it."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def padded_vocabulary(config: PretrainedConfig, tensor: int) -> int:
    """Rows of the embeddings over all ranks of a tensor group, equally many on each; the last ones are no tokens."""
    return -(-config.vocab_size // tensor) * tensor


def _check_architecture(path: str, config: PretrainedConfig) -> None:
    found = f"model.provider: found megatron together with model.path {path} ({config.model_type})"
    if is_mixture(config.to_dict()):
        raise UserError(
            f"{found}, a mixture of experts; expected a dense model, or huggingface: routed experts are not divided "
            "among the ranks of a tensor-parallel group"
        )
    if config.model_type not in ARCHITECTURES:
        raise UserError(
            f"{found}; expected one of {', '.join(ARCHITECTURES)}, or huggingface: megatron-core's layers are put "
            "together here as those architectures need them"
        )
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in ROTARY_TYPES:
        raise UserError(
            f"{found} with rotary positions of type {rotary}; expected {', '.join(ROTARY_TYPES)}, or huggingface: "
            "other frequencies depend on the length of the row"
        )
    for key, expected in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        value = getattr(config, key, expected)
        if value != expected:
            raise UserError(
                f"{found} with {key} {value}; expected {expected}, or huggingface: the released models of these "
                "architectures have no other layers"
            )


def _check_sizes(path: str, config: PretrainedConfig, tensor: int) -> None:
    num_kv_heads, intermediate = config.num_key_value_heads, config.intermediate_size
    found = f"parallel.tensor: found {tensor} together with model.path {path}, which has"
    if num_kv_heads % tensor:  # the query heads are a multiple of them
        raise UserError(
            f"{found} {num_kv_heads} key/value heads; expected a divisor of {num_kv_heads}: a rank computes whole heads"
        )
    if intermediate % tensor:
        raise UserError(
            f"{found} an intermediate size of {intermediate}; expected a divisor of it: ranks have equal parts of the "
            "MLP"
        )
    rows = padded_vocabulary(config, tensor) // tensor
    if config.vocab_size <= (tensor - 1) * rows:
        raise UserError(
            f"{found} a vocabulary of {config.vocab_size}; expected fewer ranks: some would have no token at all"
        )
