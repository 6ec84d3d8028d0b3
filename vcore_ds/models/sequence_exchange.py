"""Sequence parallelism (Ulysses, https://arxiv.org/abs/2309.14509): exchanges around attention and of the losses.

Each rank of a sequence-parallel group computes columns of its rows: embeddings, linear layers, norms and losses are
per token. Attention is not. Before it one all-to-all gives each rank all tokens of some heads, after it another one
gives back all heads of the rank's own tokens.

DeepSpeed's class for this (`UlyssesSPAttentionHF`) loses tangents in its custom operator, has one degree a process, and
takes packed rows for one sequence.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vcore_ds.data.batches import to_device
from vcore_ds.distributed import layout


def take_local_columns(tensor: Tensor, sequence_parallel: int) -> Tensor:
    """This rank's columns of `[b, T]`; T is a multiple of the degree."""
    return tensor.chunk(sequence_parallel, 1)[layout.rank("sequence", sequence_parallel)]


def take_local_heads(tensor: Tensor, sequence_parallel: int) -> Tensor:
    """Of a tensor of all query heads, `[A]`, those whose tokens `tokens_to_heads` gives this rank."""
    k = sequence_parallel
    return tensor if k == 1 else tensor.chunk(k)[layout.rank("sequence", k)]


def tokens_to_heads(tensors: Sequence[Tensor], sequence_parallel: int) -> list[Tensor]:
    """All heads of this rank's tokens to all tokens of this rank's heads. A collective, one for all tensors.

    Args:
        tensors: queries `[b, A, t, D]`, keys and values `[b, K, t, D]`, and tangents of them; A is a multiple of K and
            of the degree k. Key and value heads that k does not divide are repeated for the exchange, to the least
            common multiple of K and k, which divides A: each rank gets those that its query heads look at.

    Returns:
        Queries `[b, A / k, T, D]`, keys and values `[b, lcm(K, k) / k, T, D]`. Differentiable.
    """
    k = sequence_parallel
    if k == 1:
        return list(tensors)
    parts = []
    for tensor in tensors:
        num_heads = tensor.shape[1]
        repeated = tensor.repeat_interleave(math.lcm(num_heads, k) // num_heads, 1)
        parts.append(repeated.unflatten(1, (k, -1)).movedim(1, 0))  # [k, b, h, t, D]
    received: Tensor = _Exchange.apply(torch.cat(parts, 2), k)  # from each rank its tokens, for this rank's heads
    # [k, b, sum of h, t, D] -> [b, sum of h, T, D]
    return list(received.permute(1, 2, 0, 3, 4).flatten(2, 3).split([part.shape[2] for part in parts], 1))


def heads_to_tokens(tensors: Sequence[Tensor], sequence_parallel: int) -> list[Tensor]:
    """The way back, each `[b, A / k, T, D]` to `[b, A, t, D]`. A collective, one for all tensors; differentiable."""
    k = sequence_parallel
    if k == 1:
        return list(tensors)
    num_heads = tensors[0].shape[1]
    sent = torch.cat([tensor.unflatten(2, (k, -1)).movedim(2, 0) for tensor in tensors], 2)  # [k, b, sum of h, t, D]
    received: Tensor = _Exchange.apply(sent, k)
    # Of each tensor [k, b, h, t, D] -> [b, A, t, D].
    return [part.transpose(0, 1).flatten(1, 2) for part in received.split(num_heads, 2)]


def exchange_with_tangents(
    exchange: Callable[[Sequence[Tensor]], list[Tensor]], values: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Both through an exchange; tangents stay None where there is none. One exchange serves both where there is no
    graph; where there is one, no tangent may be part of it."""
    there = [x for x in tangents if x is not None]
    if there and torch.is_grad_enabled():
        exchanged = exchange(values)
        with torch.no_grad():
            exchanged += exchange(there)
    else:
        exchanged = exchange([*values, *there])
    found = iter(exchanged)
    return [next(found) for _ in values], [None if x is None else next(found) for x in tangents]


def gather_losses(own: Tensor, supervised: Tensor, sequence_parallel: int) -> Tensor:
    """The losses of a whole batch, on every rank that shares it. A collective; takes dual tensors.

    Its gradient is the slice of this rank's own tokens, not the sum over the ranks: what is computed from the whole is
    the same on each of them, and each is to differentiate its own tokens only. A summing gather would give k times the
    gradient.

    Args:
        own: `[n]`, the losses of the supervised tokens among this rank's columns, row-major.
        supervised: bool `[b, T]` on the host, where the whole batch has a target.

    Returns:
        `[N]`, row-major.
    """
    k = sequence_parallel
    if k == 1:
        return own
    # Positions are found on the host: a boolean mask on the device would be waited for.
    mine = to_device(take_local_columns(supervised, k).flatten().nonzero()[:, 0], own.device)
    all_of_them = to_device(supervised.flatten().nonzero()[:, 0], own.device)
    num_rows, num_columns = supervised.shape
    spread = own.new_zeros(num_rows * num_columns // k).index_copy(0, mine, own)
    whole: Tensor = _GatherColumns.apply(spread.view(num_rows, -1), k)
    return whole.flatten().index_select(0, all_of_them)


class _Exchange(torch.autograd.Function):
    """The exchange is its own transpose. Every rank of a group runs its backward, with targets or without: it carries
    the gradients of the others' tokens."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, sequence_parallel: int) -> Tensor:
        ctx.sequence_parallel = sequence_parallel
        return layout.all_to_all("sequence", sent, sequence_parallel)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return layout.all_to_all("sequence", gradient, ctx.sequence_parallel), None


class _GatherColumns(torch.autograd.Function):
    """`[b, t]` of each rank to `[b, T]`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sequence_parallel: int) -> Tensor:
        ctx.sequence_parallel = sequence_parallel
        return layout.all_gather("sequence", own, sequence_parallel).movedim(0, 1).flatten(1)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return layout.all_gather("sequence", tangent, ctx.sequence_parallel).movedim(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return take_local_columns(gradient, ctx.sequence_parallel), None
