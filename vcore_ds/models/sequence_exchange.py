"""Ulysses sequence parallelism (https://arxiv.org/abs/2309.14509): all-to-alls around attention, all-gather of losses.

Each rank of a sequence-parallel group computes a slice of the columns of the group's batch: embeddings, linear layers,
norms and losses are per token. Before attention one all-to-all gives each rank all tokens of some heads; after it
another one gives back all heads of the rank's tokens.

DeepSpeed's class for this (`UlyssesSPAttentionHF`) loses tangents in its custom operator, has one sequence-parallel
size per process, and treats a pack as one sequence.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vcore_ds.data.batches import to_device
from vcore_ds.distributed import layout
from vcore_ds.models.dual_tensors import LinearMap, apply_linear_map


def take_local_columns(tensor: Tensor, sequence_parallel: int) -> Tensor:
    """Return this rank's columns of `[b, T]`; T is a multiple of the sequence-parallel size."""
    return tensor.chunk(sequence_parallel, 1)[layout.rank("sequence", sequence_parallel)]


def take_local_heads(tensor: Tensor, sequence_parallel: int) -> Tensor:
    """Return the elements of `[A]` for the heads that `tokens_to_heads` gives this rank."""
    k = sequence_parallel
    return tensor if k == 1 else tensor.chunk(k)[layout.rank("sequence", k)]


Duals = tuple[list[Tensor], list[Tensor | None]]
"""Values, and their tangents or None."""


def tokens_to_heads(values: list[Tensor], tangents: list[Tensor | None], sequence_parallel: int) -> Duals:
    """Exchange all heads of this rank's tokens for all tokens of this rank's heads: one all-to-all for all tensors.
    Values are differentiable, tangents are not recorded.

    Queries `[b, A, t, D]`, keys and values `[b, K, t, D]`, and tangents of them become `[b, A / k, T, D]` and `[b,
    lcm(K, k) / k, T, D]`. A is a multiple of K and of the sequence-parallel size k. If k does not divide K, key and
    value heads are repeated to the least common multiple of K and k, which divides A: each rank gets those that its
    query heads attend to.
    """
    k = sequence_parallel

    def send(x: Tensor) -> Tensor:  # to [k, b, h, t, D]
        return x.repeat_interleave(math.lcm(x.shape[1], k) // x.shape[1], 1).unflatten(1, (k, -1)).movedim(1, 0)

    return _exchange(values, tangents, k, send, lambda x: x.permute(1, 2, 0, 3, 4).flatten(2, 3))


def heads_to_tokens(values: list[Tensor], tangents: list[Tensor | None], sequence_parallel: int) -> Duals:
    """Reverse `tokens_to_heads`, from `[b, A / k, T, D]` to `[b, A, t, D]`."""
    k = sequence_parallel
    return _exchange(
        values, tangents, k, lambda x: x.unflatten(2, (k, -1)).movedim(2, 0), lambda x: x.transpose(0, 1).flatten(1, 2)
    )


def _exchange(
    values: list[Tensor],
    tangents: list[Tensor | None],
    sequence_parallel: int,
    send: Callable[[Tensor], Tensor],
    receive: Callable[[Tensor], Tensor],
) -> Duals:
    """All-to-all, whose backward is an all-to-all too. Every rank of a group must run the backward, even without
    targets: it carries the gradients of the other ranks' tokens. `send`: to a part for each rank, `[k, b, h, t, D]`;
    `receive`: from such parts."""
    if sequence_parallel == 1:
        return values, tangents
    parts, d_parts = [send(x) for x in values], [send(x) for x in tangents if x is not None]

    def move(sent: Tensor) -> Tensor:
        return layout.all_to_all("sequence", sent, sequence_parallel)

    def move_both(value: Tensor, tangent: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if tangent is None:
            return move(value), None
        value, tangent = move(torch.cat([value, tangent], 2)).split([value.shape[2], tangent.shape[2]], 2)
        return value, tangent

    d_sent = torch.cat(d_parts, 2) if d_parts else None
    value, tangent = LinearMap.apply(torch.cat(parts, 2), d_sent, move_both, move)
    received = [receive(x) for x in value.split([part.shape[2] for part in parts], 2)]
    if tangent is None:
        return received, tangents
    d_received = iter([receive(x) for x in tangent.split([part.shape[2] for part in d_parts], 2)])
    return received, [None if x is None else next(d_received) for x in tangents]


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
