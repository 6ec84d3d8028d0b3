"""Exchanges over the tensor axis: between the layers a rank has a part of the tokens, within them all tokens.

Megatron's sequence-parallel regions (https://arxiv.org/abs/2205.05198): embeddings, norms and residual sums are
computed once for each token, instead of once on each rank. A layer's products gather the tokens before and scatter the
sums of their partial results after.

Values and tangents travel in one collective. A value has a graph where gradients are enabled; its tangent has none, and
forward mode needs no rule: dual numbers are taken apart before and put together after.

Shapes: n ranks along the tensor axis, t tokens of the row on this rank's place along `sequence`, b rows.
"""

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from vcore_ds.distributed import layout
from vcore_ds.models.dual_tensors import make_dual


def gather_tokens(part: Tensor) -> Tensor:
    """`[t / n, b, ...]` of each rank to `[t, b, ...]`. A collective; takes dual numbers.

    Its gradient is the sum over the ranks: each computes something else from the whole.
    """
    return make_dual_if_any(*_GatherTokens.apply(*forward_ad.unpack_dual(part)))


def scatter_tokens(partial: Tensor) -> Tensor:
    """The sum over the ranks of `[t, b, ...]`, of which each gets its tokens `[t / n, b, ...]`. A collective; takes
    dual numbers, where either all ranks have one or none."""
    return make_dual_if_any(*_ScatterTokens.apply(*forward_ad.unpack_dual(partial)))


def make_dual_if_any(value: Tensor, tangent: Tensor | None) -> Tensor:
    """A dual number where there is a tangent, else the value."""
    return value if tangent is None else make_dual(value, tangent)


def all_gather_tokens(part: Tensor, tangent: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """What `gather_tokens` gives, of a value and its tangent, without a graph."""
    if tangent is None:
        return layout.all_gather("tensor", part).flatten(0, 1), None
    gathered = layout.all_gather("tensor", torch.stack([part, tangent]))  # [n, 2, t / n, b, ...]
    value, d_value = gathered.transpose(0, 1).flatten(1, 2)
    return value, d_value


def reduce_scatter_tokens(partial: Tensor, tangent: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """What `scatter_tokens` gives, of a value and its tangent, without a graph."""
    num_ranks = layout.size("tensor")
    if tangent is None:
        return layout.reduce_scatter("tensor", partial.unflatten(0, (num_ranks, -1))), None
    return reduce_scatter_both(torch.stack([x.unflatten(0, (num_ranks, -1)) for x in (partial, tangent)], 1))


def reduce_scatter_both(sent: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's sums of values and tangents `[n, 2, t / n, b, ...]`. The value has memory of its own, or a graph that
    keeps it would keep the tangent with it."""
    value, d_value = layout.reduce_scatter("tensor", sent)
    return value.clone(), d_value


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, tangent: Tensor | None) -> tuple[Tensor, Tensor | None]:
        found = all_gather_tokens(part, tangent)
        if tangent is not None:
            ctx.mark_non_differentiable(found[1])
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
        return reduce_scatter_tokens(gradient)[0], None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, tangent: Tensor | None) -> tuple[Tensor, Tensor | None]:
        found = reduce_scatter_tokens(partial, tangent)
        if tangent is not None:
            ctx.mark_non_differentiable(found[1])
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
        return all_gather_tokens(gradient)[0], None
