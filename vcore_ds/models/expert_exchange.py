"""Expert parallelism: rows of tokens go to the ranks that have their experts, and the results come back.

Each rank of an expert-parallel group has a block of the experts of every mixture layer, and tokens of its own. A layer
takes three exchanges: how many rows, the rows, their results. Values and tangents travel in one, and gradients the same
way back. All ranks of a group take part in all of them, whatever tokens they have.

Shapes: S rows (a token has one for each of its experts), E experts, N ranks of a group, H hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from vcore_ds.distributed import layout
from vcore_ds.models.dual_numbers import make_dual


def mark_divided(experts: nn.Module) -> None:
    """Says that a module of experts holds those of this rank alone."""
    experts._are_divided = True  # type: ignore[assignment]


def are_divided(experts: nn.Module) -> bool:
    """Whether a module of experts holds those of this rank alone."""
    return getattr(experts, "_are_divided", False)


def row_ends(chosen: Tensor, num_experts: int) -> Tensor:
    """Where the rows of each expert end, int32 `[E]`, of rows that are sorted by expert.

    On the device: no host waits to learn how many tokens an expert has.
    """
    numbers = torch.arange(num_experts, device=chosen.device)
    return torch.searchsorted(chosen, numbers, right=True, out_int32=True)


def at_their_experts(
    x: Tensor, chosen: Tensor, num_experts: int, compute: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """What the experts of the whole group make of this rank's rows, `[S, H]`; dual where `x` or a parameter is, on any
    rank of the group. A collective over `expert`.

    Args:
        x: `[S, H]`, may be dual; sorted by expert.
        chosen: `[S]`, the rows' experts, of all E.
        compute: given rows sorted by expert, their experts numbered from this rank's first, and `row_ends` of those,
            makes of each row what its expert does.
    """
    num_ranks = layout.size("expert")
    num_own = num_experts // num_ranks
    counts = row_ends(chosen, num_experts).long().diff(prepend=chosen.new_zeros(1)).view(num_ranks, num_own)
    # Whether a tangent comes along is agreed on: an idle rank may have none where others have, and would exchange rows
    # of another length.
    is_dual = counts.new_full((num_ranks, 1), forward_ad.unpack_dual(x).tangent is not None)
    theirs, some_dual = layout.all_to_all("expert", torch.cat([counts, is_dual], 1)).split([num_own, 1], 1)
    # The one place where the host waits for the device.
    sent, received, dual = torch.stack([counts.sum(1), theirs.sum(1), some_dual[:, 0]]).tolist()
    x = _exchange(x, sent, received, is_dual=any(dual))
    numbers = torch.arange(num_own, device=chosen.device).repeat(num_ranks)
    own_chosen, order = numbers.repeat_interleave(theirs.flatten(), output_size=sum(received)).sort(stable=True)
    y = compute(x[order], own_chosen, row_ends(own_chosen, num_own))
    # Where the rows have no tangents, those of the parameters alone decide, on all ranks alike.
    return _exchange(y[order.argsort()], received, sent, is_dual=forward_ad.unpack_dual(y).tangent is not None)


def _exchange(x: Tensor, sent: list[int], received: list[int], *, is_dual: bool) -> Tensor:
    """Rows to other ranks, as many to each as `sent` says, and theirs here; the value has a graph, the tangent none."""
    value, tangent = forward_ad.unpack_dual(x)
    if is_dual and tangent is None:
        tangent = torch.zeros_like(value)
    y, d_y = _Exchange.apply(value, None if tangent is None else tangent.detach(), sent, received)
    return y if d_y is None else make_dual(y, d_y)


class _Exchange(torch.autograd.Function):
    """Rows `[x | dx]` to other ranks; the gradient of x comes back the same way. One of a result that nobody has used
    is zeros, not None: the other ranks wait for it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, d_x: Tensor | None, sent: list[int], received: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        ctx.numbers = sent, received
        if d_x is None:
            return layout.exchange_rows("expert", x, sent, received), None
        both = layout.exchange_rows("expert", torch.cat([x, d_x], 1), sent, received)
        y, d_y = (half.contiguous() for half in both.chunk(2, 1))
        ctx.mark_non_differentiable(d_y)
        return y, d_y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.numbers
        return layout.exchange_rows("expert", gradient, received, sent), None, None, None
