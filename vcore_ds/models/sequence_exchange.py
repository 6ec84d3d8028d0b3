"""Ulysses sequence parallelism (https://arxiv.org/abs/2309.14509): all-to-alls around attention, all-gather of losses.

Each rank of a sequence-parallel group computes a slice of the columns of the group's batch: embeddings, linear layers,
norms and losses are per token. Before attention one all-to-all gives each rank all tokens of some heads; after it
another one gives back all heads of the rank's tokens.

DeepSpeed's class for this (`UlyssesSPAttentionHF`) loses tangents in its custom operator, has one sequence-parallel
size per process, and treats a pack as one sequence.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vcore_ds.data.batches import to_device
from vcore_ds.distributed import layout
from vcore_ds.models.dual_tensors import apply_linear_map


def take_local_columns(tensor: Tensor, sequence_parallel: int) -> Tensor:
    """Return this rank's columns of `[b, T]`; T is a multiple of the sequence-parallel size."""
    return tensor.chunk(sequence_parallel, 1)[layout.rank("sequence", sequence_parallel)]


def take_local_heads(tensor: Tensor, sequence_parallel: int) -> Tensor:
    """Return the elements of `[A]` for the heads that `tokens_to_heads` gives this rank."""
    k = sequence_parallel
    return tensor if k == 1 else tensor.chunk(k)[layout.rank("sequence", k)]


def tokens_to_heads(tensors: Sequence[Tensor], sequence_parallel: int) -> list[Tensor]:
    """Exchange all heads of this rank's tokens for all tokens of this rank's heads: one all-to-all for all tensors,
    differentiable.

    Queries `[b, A, t, D]`, keys and values `[b, K, t, D]`, and tangents of them become `[b, A / k, T, D]` and `[b,
    lcm(K, k) / k, T, D]`. A is a multiple of K and of the sequence-parallel size k. If k does not divide K, key and
    value heads are repeated to the least common multiple of K and k, which divides A: each rank gets those that its
    query heads attend to.
    """
    k = sequence_parallel
    if k == 1:
        return list(tensors)
    parts = []
    for tensor in tensors:
        num_heads = tensor.shape[1]
        repeated = tensor.repeat_interleave(math.lcm(num_heads, k) // num_heads, 1)
        parts.append(repeated.unflatten(1, (k, -1)).movedim(1, 0))  # [k, b, h, t, D]
    received = _exchange(torch.cat(parts, 2), k)  # from each rank, its tokens of this rank's heads
    # [k, b, sum of h, t, D] -> [b, sum of h, T, D]
    return list(received.permute(1, 2, 0, 3, 4).flatten(2, 3).split([part.shape[2] for part in parts], 1))


def heads_to_tokens(tensors: Sequence[Tensor], sequence_parallel: int) -> list[Tensor]:
    """Reverse `tokens_to_heads`, from `[b, A / k, T, D]` to `[b, A, t, D]`: one all-to-all, differentiable."""
    k = sequence_parallel
    if k == 1:
        return list(tensors)
    num_heads = tensors[0].shape[1]
    sent = torch.cat([tensor.unflatten(2, (k, -1)).movedim(2, 0) for tensor in tensors], 2)  # [k, b, sum of h, t, D]
    received = _exchange(sent, k)
    # [k, b, h, t, D] of each tensor -> [b, A, t, D]
    return [part.transpose(0, 1).flatten(1, 2) for part in received.split(num_heads, 2)]


def _exchange(sent: Tensor, sequence_parallel: int) -> Tensor:
    """All-to-all, whose backward is an all-to-all too. Every rank of a group must run the backward, even without
    targets: it carries the gradients of the other ranks' tokens."""

    def send(x: Tensor) -> Tensor:
        return layout.all_to_all("sequence", x, sequence_parallel)

    return apply_linear_map(sent, lambda value, _: (send(value), None), send)


def exchange_with_tangents(
    exchange: Callable[[Sequence[Tensor]], list[Tensor]], values: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Exchange values and tangents; tangents that are None stay None.

    One exchange moves both, unless gradients are enabled: the tangents must not become part of the graph.
    """
    present = [x for x in tangents if x is not None]
    if present and torch.is_grad_enabled():
        exchanged = exchange(values)
        with torch.no_grad():
            exchanged += exchange(present)
    else:
        exchanged = exchange([*values, *present])
    results = iter(exchanged)
    return [next(results) for _ in values], [None if x is None else next(results) for x in tangents]


def gather_losses(losses: Tensor, supervised: Tensor, sequence_parallel: int) -> Tensor:
    """All-gather the losses of a batch over its sequence-parallel group, row-major: from those of the supervised tokens
    among this rank's columns, `[n]`, to all, `[N]`; takes dual tensors. `supervised`: bool `[b, T]` on the host, True
    where the batch has a target.

    The backward returns the slice of this rank's tokens: all ranks compute the same from the gathered losses, so a
    reduce-scatter, the usual backward of an all-gather, would give k times the gradient.
    """
    k = sequence_parallel
    if k == 1:
        return losses
    # Positions come from the host: indexing with a boolean mask on the device would be a host-device synchronisation.
    local_positions = to_device(take_local_columns(supervised, k).flatten().nonzero()[:, 0], losses.device)
    positions = to_device(supervised.flatten().nonzero()[:, 0], losses.device)
    num_rows, num_columns = supervised.shape
    local = losses.new_zeros(num_rows * num_columns // k).index_copy(0, local_positions, losses)

    def gather(part: Tensor) -> Tensor:
        return layout.all_gather("sequence", part, k).movedim(0, 1).flatten()

    gathered = apply_linear_map(
        local.view(num_rows, -1),
        lambda value, tangent: (gather(value), None if tangent is None else gather(tangent)),
        lambda gradient: take_local_columns(gradient.view(num_rows, -1), k),
    )
    return gathered.index_select(0, positions)
