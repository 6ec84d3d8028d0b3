"""A tensor-parallel decoder that returns the loss of every supervised token: the counterpart of
`vcore_ds.models.causal_lm.TokenLossModel`. Models without support for tensor parallelism are refused by
`transformer_config`, before anything is built."""

import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.functional import silu
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import supervised_tokens
from vcore_ds.distributed import layout
from vcore_ds.models.attention import TRAINING_ATTENTION, SequenceLayout
from vcore_ds.models.causal_lm import TokenLossHead, store_activations
from vcore_ds.models.megatron.parallel_layers import (
    ColumnLinears,
    DecoderLayer,
    RMSNorm,
    RowLinear,
    TokenEmbedding,
    TransformerConfig,
    gather_tokens,
)
from vcore_ds.models.megatron.weight_slices import head_dim, padded_vocabulary
from vcore_ds.models.token_loss import PredictionStatistic, VocabularyShard
from vcore_ds.planning.settings import ActivationMemory

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Dense decoders with RMSNorm before attention and MLP, rotary positions and a gated MLP."""

ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary embeddings whose frequencies do not depend on the length of the input."""


def transformer_config(path: str, config: PretrainedConfig, *, tensor: int, dtype: torch.dtype) -> TransformerConfig:
    """Make megatron-core's configuration of the Hugging Face model `path` with this `config`. `tensor`: tensor-parallel
    size (`parallel.tensor`), which the batch plan has checked; `dtype`: of the parameters. Raises UserError if the
    architecture is not one of `ARCHITECTURES` as released."""
    _check_architecture(path, config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that its own defaults are deprecated
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
            use_cpu_initialization=True,  # create parameters on torch's default device
            perform_initialization=False,  # they are filled from the model's files
        )


def _check_architecture(path: str, config: PretrainedConfig) -> None:
    conflict = f"model.provider: found megatron together with model.path {path} ({config.model_type})"
    if config.model_type not in ARCHITECTURES:
        raise UserError(
            f"{conflict}; expected one of {', '.join(ARCHITECTURES)}, or huggingface: tensor parallelism is "
            "implemented for those architectures"
        )
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    released = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    checked = {key: (getattr(config, key, value), (value,)) for key, value in released.items()}
    for key, (found, expected) in {"rope_type": (rotary, ROTARY_TYPES), **checked}.items():
        if found not in expected:
            raise UserError(f"{conflict} with {key} {found}; expected {', '.join(map(str, expected))}, or huggingface")


class ParallelTokenLossModel(nn.Module):
    """A decoder whose layers are sharded over a tensor-parallel group; `forward` returns the loss of each supervised
    token, the same on all ranks.

    Parameters are created without values. Sharded ones have DeepSpeed's attribute `tensor_model_parallel`; the others
    are replicated, and their gradients have to be summed over the group.
    """

    def __init__(
        self,
        path: str,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        gradient_checkpointing: bool = False,
        activation_offload: bool = False,
    ):
        """`path`, `config`, `dtype`: as in `transformer_config`, which may raise UserError; `gradient_checkpointing`:
        save only the input of each layer for the backward; `activation_offload`: keep tensors saved for the backward in
        host memory."""
        super().__init__()
        tensor = layout.size("tensor")
        megatron_config = transformer_config(path, config, tensor=tensor, dtype=dtype)
        config._attn_implementation = TRAINING_ATTENTION
        self.config, self._activation_offload = config, activation_offload
        num_rows = padded_vocabulary(config, tensor)
        self.embed_tokens = TokenEmbedding(
            num_rows,
            megatron_config.hidden_size,
            config=megatron_config,
            init_method=nn.init.zeros_,
            tp_group=layout.group("tensor"),
        )
        self.rotary = _build_rotary(config)
        layers = [DecoderLayer(megatron_config, config, i) for i in range(megatron_config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(megatron_config.hidden_size, megatron_config)
        weight = self.embed_tokens.weight
        if not config.tie_word_embeddings:
            weight = ColumnLinears(megatron_config, megatron_config.hidden_size, {"head": num_rows}).head
        first = layout.rank("tensor") * (num_rows // tensor)
        num_tokens = min(num_rows // tensor, config.vocab_size - first)
        shard = VocabularyShard(first, num_tokens, lambda local: layout.all_gather("tensor", local))
        self.lm_head = TokenLossHead(weight, shard=shard)
        if gradient_checkpointing:
            for layer in layers:
                layer.checkpoint_activations()
        for module in self.modules():
            if isinstance(module, ColumnLinears | RowLinear | TokenEmbedding | TokenLossHead):
                for parameter in module.parameters(recurse=False):
                    parameter.tensor_model_parallel = True  # type: ignore[union-attr]  # megatron's and DeepSpeed's

    @property
    def base(self) -> SimpleNamespace:
        """Object with the configuration, like `TokenLossModel.base`."""
        return SimpleNamespace(config=self.config)

    def store_activations(self, activations: ActivationMemory) -> None:
        """As `TokenLossModel.store_activations`."""
        store_activations(list(self.layers), self.lm_head, activations)

    def compute_buffers(self) -> None:
        """Recompute the rotary frequencies, which are not in the files: under zero.Init, which replaces torch's
        constructors, they may have been rounded to bf16."""
        self.rotary = _build_rotary(self.config)

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor,
        position_ids: Tensor,
        sequence_layout: SequenceLayout,
        *,
        statistic: PredictionStatistic | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute losses in nats, fp32, `[N]`, of the supervised tokens among this rank's columns, in row-major order,
        from the arguments of `TokenLossModel`; t is a multiple of the tensor-parallel size. A collective over the
        tensor axis, whose ranks have the same columns."""
        with save_on_cpu(pin_memory=input_ids.is_cuda) if self._activation_offload else nullcontext():
            hidden = self.embed_tokens(input_ids)
            angles = self.rotary(hidden, position_ids)
            for layer in self.layers:
                hidden = layer(hidden, angles, sequence_layout)
        hidden, targets = supervised_tokens(gather_tokens(self.norm(hidden)).transpose(0, 1), targets)
        return self.lm_head(hidden, targets, statistic=statistic)


def _build_rotary(config: PretrainedConfig) -> LlamaRotaryEmbedding:
    """Build LLaMA's rotary embedding, whose configuration fields all supported architectures have."""
    return LlamaRotaryEmbedding(cast(LlamaConfig, config))
