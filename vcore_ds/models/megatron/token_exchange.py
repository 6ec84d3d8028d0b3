"""Collectives over the tensor axis: all-gather of tokens before a layer's matmuls, reduce-scatter after them.

These are Megatron's sequence-parallel regions (https://arxiv.org/abs/2205.05198): between the layers each rank has a
shard of the tokens, so that embeddings, norms and residual sums are computed once per token, not on every rank.

Values and tangents travel in one collective. Values are differentiable if gradients are enabled; tangents are not
recorded. Forward mode needs no rule, since dual tensors are unpacked before a collective and made again after it.

Shapes: n tensor-parallel ranks, b packs or unpacked sequences, of which this sequence-parallel rank has t tokens.
"""

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from vcore_ds.distributed import layout
from vcore_ds.models.dual_tensors import make_dual_if_any


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
