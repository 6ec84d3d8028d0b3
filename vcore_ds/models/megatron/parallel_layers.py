"""megatron-core's parallel layers with forwards that take dual tensors.

megatron-core shards and allocates the weights. Its forwards use autograd Functions without a forward-mode rule, and
buffers on the current CUDA device. The forwards here run wherever PyTorch runs, and compute the same value with and
without tangents, so that one forward can give both losses and utilities (`vcore_ds.utility.fused_forward`).

Between layers each rank has a shard of the tokens, so that embeddings, norms and residual sums are computed once per
token, not on every rank: tokens are all-gathered before a layer's matrix multiplications and reduce-scattered after
them, as in Megatron's sequence-parallel regions (https://arxiv.org/abs/2205.05198). Values and tangents travel in one
collective. Values are differentiable if gradients are enabled; tangents are not recorded. Forward mode needs no rule,
since dual tensors are unpacked before a collective and made again after it.

Shapes: n tensor-parallel ranks, b packs or unpacked sequences, of which this sequence-parallel rank has t tokens; I
input, O output size.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from vcore_ds.common.imports import without_compiler
from vcore_ds.distributed import layout
from vcore_ds.models.dual_tensors import LowRank, make_dual_if_any, unpack_parameter, unpack_weight
from vcore_ds.models.lora_linear import linear_tangent

with warnings.catch_warnings(), without_compiler():
    warnings.simplefilter("ignore")
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer.transformer_config import TransformerConfig


def gather_tokens(part: Tensor) -> Tensor:
    """All-gather `[t / n, b, ...]` to `[t, b, ...]`; takes dual tensors. The backward is a reduce-scatter, since the
    ranks compute different outputs from the gathered tokens."""
    return make_dual_if_any(*_GatherTokens.apply(*forward_ad.unpack_dual(part)))


def scatter_tokens(partial: Tensor) -> Tensor:
    """Reduce-scatter `[t, b, ...]` to `[t / n, b, ...]`; takes dual tensors, if all ranks have one or none."""
    return make_dual_if_any(*_ScatterTokens.apply(*forward_ad.unpack_dual(partial)))


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


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, tangent: Tensor | None) -> tuple[Tensor, Tensor | None]:
        gathered = all_gather_tokens(part, tangent)
        if tangent is not None:
            ctx.mark_non_differentiable(gathered[1])
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
        return reduce_scatter_tokens(gradient)[0], None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, tangent: Tensor | None) -> tuple[Tensor, Tensor | None]:
        summed = reduce_scatter_tokens(partial, tangent)
        if tangent is not None:
            ctx.mark_non_differentiable(summed[1])
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
        return all_gather_tokens(gradient)[0], None


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
