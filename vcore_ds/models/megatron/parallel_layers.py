"""A tensor-parallel decoder layer: attention over this rank's heads, MLP over this rank's columns, RMSNorms.

megatron-core shards and allocates the weights of linear layers and embeddings. Its forwards use autograd Functions
without a forward-mode rule, and buffers on the current CUDA device. The forwards here run wherever PyTorch runs, and
compute the same value with and without tangents, so that one forward can give both losses and utilities
(`vcore_ds.utility.fused_forward`). Attention is `vcore_ds.models.attention`; rotary embeddings and norms equal those of
Hugging Face's models bit for bit.

Between layers each rank has a shard of the tokens, so that embeddings, norms and residual sums are computed once per
token, not on every rank: tokens are all-gathered before a layer's matrix multiplications and reduce-scattered after
them, as in Megatron's sequence-parallel regions (https://arxiv.org/abs/2205.05198). Values and tangents travel in one
collective. Values are differentiable if gradients are enabled; tangents are not recorded. Norm weights are replicated,
and their gradient on a rank is that of its tokens or heads, to be summed over the group.

The loop over layers is in `model.ParallelTokenLossModel`: megatron-core's passes only keyword arguments, with which the
backward of a layer fails under ZeRO-3.

Shapes: n tensor-parallel ranks, b packs or unpacked sequences, of which this sequence-parallel rank has t tokens; I
input, O output, H hidden size, D head dimension, A query heads and K key/value heads of this rank.
"""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vcore_ds.common.imports import without_compiler
from vcore_ds.distributed import layout
from vcore_ds.models.attention import SequenceLayout
from vcore_ds.models.dual_tensors import (
    LowRank,
    apply_linear_map,
    linear_tangent,
    make_dual_if_any,
    unpack_parameter,
    unpack_weight,
)
from vcore_ds.models.pointwise import gated_silu, rms_norm, rotate_pair

with warnings.catch_warnings(), without_compiler():
    warnings.simplefilter("ignore")
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer.transformer_config import TransformerConfig


def gather_tokens(part: Tensor) -> Tensor:
    """All-gather `[t / n, b, ...]` to `[t, b, ...]`; takes dual tensors. The backward is a reduce-scatter, since the
    ranks compute different outputs from the gathered tokens."""
    return apply_linear_map(part, all_gather_tokens, lambda gradient: reduce_scatter_tokens(gradient)[0])


def scatter_tokens(partial: Tensor) -> Tensor:
    """Reduce-scatter `[t, b, ...]` to `[t / n, b, ...]`; takes dual tensors, if all ranks have one or none."""
    return apply_linear_map(partial, reduce_scatter_tokens, lambda gradient: all_gather_tokens(gradient)[0])


def all_gather_tokens(part: Tensor, tangent: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """`gather_tokens` of a value and its tangent, not differentiable."""
    if tangent is None:
        return layout.all_gather("tensor", part).flatten(0, 1), None
    gathered = layout.all_gather("tensor", torch.stack([part, tangent]))  # [n, 2, t / n, b, ...]
    value, d_value = gathered.transpose(0, 1).flatten(1, 2)
    return value, d_value


def reduce_scatter_tokens(partial: Tensor, tangent: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """`scatter_tokens` of a value and its tangent, not differentiable."""
    num_ranks = layout.size("tensor")
    if tangent is None:
        return layout.reduce_scatter("tensor", partial.unflatten(0, (num_ranks, -1))), None
    return reduce_scatter_both(torch.stack([x.unflatten(0, (num_ranks, -1)) for x in (partial, tangent)], 1))


def reduce_scatter_both(sent: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce-scatter values and tangents, stacked as `[n, 2, t / n, b, ...]`. The value is cloned: a graph that saves
    it as a view would also keep the tangent's memory."""
    value, d_value = layout.reduce_scatter("tensor", sent)
    return value.clone(), d_value


class ColumnLinears(nn.Module):
    """Column-parallel linear layers with a common input, `[t / n, b, I]` to `[t, b, O / n]`: one all-gather of tokens.

    Weights have the names of the layers, biases these names plus `_bias`. They are separate, so that each output can be
    freed as soon as it is used.
    """

    reads_low_rank_tangents = True

    def __init__(
        self, config: TransformerConfig, num_inputs: int, num_outputs: Mapping[str, int], *, bias: bool = False
    ):
        """`num_inputs`: I; `num_outputs`: O over all ranks, by the layer's name."""
        super().__init__()
        self.names = tuple(num_outputs)
        for name in self.names:
            layer = ColumnParallelLinear(
                num_inputs,
                num_outputs[name],
                config=config,
                init_method=nn.init.zeros_,
                bias=bias,
                tp_group=layout.group("tensor"),
            )
            self.register_parameter(name, layer.weight)
            self.register_parameter(f"{name}_bias", layer.bias)

    def forward(self, x: Tensor) -> list[Tensor]:
        flat = []
        for name in self.names:
            weight, d_weight = unpack_weight(self, name)
            has_bias = getattr(self, f"{name}_bias") is not None
            bias, d_bias = unpack_parameter(self, f"{name}_bias") if has_bias else (None, None)
            flat += [weight, bias, d_weight, d_bias]
        outputs = _ColumnMatmuls.apply(*forward_ad.unpack_dual(x), *flat)
        return [make_dual_if_any(*pair) for pair in zip(outputs[::2], outputs[1::2], strict=True)]


class RowLinear(RowParallelLinear):
    """Row-parallel linear layer without a bias, `[t, b, I / n]` to `[t / n, b, O]`: a reduce-scatter of tokens."""

    reads_low_rank_tangents = True

    def __init__(self, config: TransformerConfig, num_inputs: int, num_outputs: int):
        """`num_inputs`: I; `num_outputs`: O, over all ranks."""
        super().__init__(
            num_inputs,
            num_outputs,
            config=config,
            init_method=nn.init.zeros_,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=layout.group("tensor"),
        )

    def forward(self, x: Tensor) -> Tensor:
        return make_dual_if_any(*_RowMatmul.apply(*forward_ad.unpack_dual(x), *unpack_weight(self, "weight")))


class TokenEmbedding(VocabParallelEmbedding):
    """Vocabulary-parallel embedding, `[b, t]` token ids to `[t / n, b, H]`: a reduce-scatter of tokens."""

    reads_low_rank_tangents = True

    def forward(self, ids: Tensor) -> Tensor:
        weight, d_weight = unpack_weight(self, "weight")
        ids = ids.t()
        is_remote = (ids < self.vocab_start_index) | (ids >= self.vocab_end_index)
        rows = (ids - self.vocab_start_index).masked_fill(is_remote, 0)
        partial = embedding(rows, weight).masked_fill(is_remote[..., None], 0.0)
        d_partial = None
        if d_weight is not None:
            with torch.no_grad():
                if isinstance(d_weight, LowRank):
                    d_partial = embedding(rows, d_weight.left) @ d_weight.right
                else:
                    d_partial = embedding(rows, d_weight)
                d_partial = d_partial.masked_fill(is_remote[..., None], 0.0)
        return scatter_tokens(make_dual_if_any(partial, d_partial))


class _ColumnMatmuls(torch.autograd.Function):
    """Computes `x W^T + b` and its tangent for several layers on the gathered tokens. `layers`: for each W, b and their
    tangents (W's may be `LowRank`). Only this rank's tokens are saved for the backward, which gathers them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, d_x: Tensor | None, *layers: Any) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)  # otherwise zeros are allocated for each tangent
        ctx.save_for_backward(x, *layers[::4])
        tokens, d_tokens = all_gather_tokens(x, d_x)
        outputs: list[Tensor | None] = []
        for weight, bias, d_weight, d_bias in zip(*(layers[i::4] for i in range(4)), strict=True):
            outputs.append(linear(tokens, weight, bias))
            outputs.append(linear_tangent(tokens, weight, d_x=d_tokens, d_weight=d_weight, d_bias=d_bias))
        ctx.mark_non_differentiable(*(d_out for d_out in outputs[1::2] if d_out is not None))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        tokens = all_gather_tokens(x)[0].flatten(0, -2) if any(needs[::4]) else None
        x_gradient, layer_gradients = None, []
        for d_out, weight, needs_weight, needs_bias in zip(
            gradients[::2], weights, needs[::4], needs[1::4], strict=True
        ):
            assert d_out is not None  # the outputs of all layers are used
            gradient = d_out.flatten(0, -2)
            if needs_x:
                x_gradient = gradient @ weight if x_gradient is None else x_gradient.addmm_(gradient, weight)
            weight_gradient = gradient.t() @ tokens if needs_weight and tokens is not None else None
            layer_gradients += [weight_gradient, gradient.sum(0) if needs_bias else None, None, None]
        del tokens
        if x_gradient is not None:
            x_gradient = reduce_scatter_tokens(x_gradient.view(-1, *x.shape[1:]))[0]
        return x_gradient, None, *layer_gradients


class _RowMatmul(torch.autograd.Function):
    """Reduce-scatters `x W^T` and its tangent."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, d_x: Tensor | None, weight: Tensor, d_weight: Tensor | LowRank | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        output = linear(x, weight)
        if d_x is None and d_weight is None:
            return reduce_scatter_tokens(output)[0], None
        # Value and tangent are copied to one send buffer in turn, so that only one of them is in memory besides it.
        sent = x.new_empty(layout.size("tensor"), 2, len(x) // layout.size("tensor"), x.shape[1], len(weight))
        sent[:, 0] = output.view(sent[:, 0].shape)
        del output
        d_output = linear_tangent(x, weight, d_x=d_x, d_weight=d_weight)
        assert d_output is not None  # since there is a tangent
        sent[:, 1] = d_output.view(sent[:, 1].shape)
        del d_output
        out, d_out = reduce_scatter_both(sent)
        ctx.mark_non_differentiable(d_out)
        return out, d_out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_weight, _ = ctx.needs_input_grad
        gathered = all_gather_tokens(gradient)[0]
        weight_gradient = gathered.flatten(0, -2).t() @ x.flatten(0, -2) if needs_weight else None
        return gathered @ weight if needs_x else None, None, weight_gradient, None


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, with the values and gradients of Hugging Face's."""

    def __init__(self, size: int, config: TransformerConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        self.eps = config.layernorm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        weight, d_weight = unpack_parameter(self, "weight")
        return rms_norm(x, weight, self.eps, d_weight=d_weight)


def sliding_window(config: PretrainedConfig, layer: int) -> int | None:
    """Number of keys that a query of this layer sees, itself included; None for all."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


Angles = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary embedding, `[b, t, D]` each."""


class ParallelAttention(nn.Module):
    """Self-attention over this rank's heads."""

    def __init__(self, config: TransformerConfig, hf_config: PretrainedConfig, layer: int):
        super().__init__()
        self.layer_idx, self.head_dim = layer, config.kv_channels
        self._config, self._sliding_window = hf_config, sliding_window(hf_config, layer)
        num_heads, num_kv_heads = config.num_attention_heads, config.num_query_groups
        outputs = {"q_proj": num_heads, "k_proj": num_kv_heads, "v_proj": num_kv_heads}
        self.qkv = ColumnLinears(
            config,
            config.hidden_size,
            {name: number * self.head_dim for name, number in outputs.items()},
            bias=config.add_qkv_bias,
        )
        self.o_proj = RowLinear(config, num_heads * self.head_dim, config.hidden_size)
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, config) if config.qk_layernorm else nn.Identity() for _ in range(2)
        )

    def forward(self, hidden: Tensor, angles: Angles, sequence_layout: SequenceLayout) -> Tensor:
        """Compute `[t / n, b, H]` from `[t / n, b, H]`; arguments as for `DecoderLayer`."""
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in self.qkv(hidden))  # [t, b, A or K, D]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (self.q_norm(query), self.k_norm(key), value))
        query, key = rotate_pair(query, key, *angles)
        attend = ALL_ATTENTION_FUNCTIONS[self._config._attn_implementation]
        output, _ = attend(
            self, query, key, value, None, sliding_window=self._sliding_window, sequence_layout=sequence_layout
        )  # [b, t, A, D]
        # Contiguous: for strided inputs PyTorch chooses the matmul kernel by whether a gradient is needed. It is not in
        # a checkpointed forward with tangents, so the last bit of a loss would differ there.
        return self.o_proj(output.transpose(0, 1).flatten(2).contiguous())


class ParallelMLP(nn.Module):
    """Gated MLP over this rank's columns."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        outputs = dict.fromkeys(("gate_proj", "up_proj"), config.ffn_hidden_size)
        self.gate_up = ColumnLinears(config, config.hidden_size, outputs)
        self.down_proj = RowLinear(config, config.ffn_hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        # Nested, so that no local variable keeps gate and up alive during the last matmul.
        return self.down_proj(gated_silu(*self.gate_up(hidden)))


class DecoderLayer(GradientCheckpointingLayer):
    """Norm, attention, norm, MLP, with residual connections and optional activation checkpointing."""

    def __init__(self, config: TransformerConfig, hf_config: PretrainedConfig, layer: int):
        super().__init__()
        self.self_attn = ParallelAttention(config, hf_config, layer)
        self.mlp = ParallelMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)

    def checkpoint_activations(self) -> None:
        """Save only the layer's input, and recompute the rest in the backward."""
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(self, hidden: Tensor, angles: Angles, sequence_layout: SequenceLayout) -> Tensor:
        """Compute the hidden states of this rank's tokens after the layer. `hidden`: `[t / n, b, H]`, positional so
        that ZeRO-3's hooks see it; `angles`: of all t tokens; `sequence_layout`: the sequences of the batch, and the
        sequence-parallel size."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), angles, sequence_layout)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
