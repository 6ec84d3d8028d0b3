"""Gradient-free passes over several micro-batches at a time."""

from collections.abc import Sequence

from torch import Tensor

from vcore_ds.data.batches import Batch, merge_batches
from vcore_ds.engine.zero3 import Engine


def measured_losses(engine: Engine, batches: Sequence[Batch], batches_per_pass: int) -> list[Tensor]:
    """Losses `[N]` of each micro-batch of this rank, without gradient and without dropout. A collective."""
    losses: list[Tensor] = []
    with engine.without_gradient():
        for merged, sizes in merged_passes(batches, batches_per_pass):
            losses += engine.token_losses(merged).split(sizes)
    return losses


def merged_passes(batches: Sequence[Batch], batches_per_pass: int) -> list[tuple[Batch, list[int]]]:
    """Consecutive micro-batches merged into passes, each with its micro-batches' numbers of supervised tokens.

    A pass is a collective, so the number of passes depends only on values that all ranks share, never on a batch's
    content.
    """
    merged = []
    for start in range(0, len(batches), batches_per_pass):
        part = list(batches[start : start + batches_per_pass])
        merged.append((merge_batches(part), [int(batch.num_supervised_tokens().sum()) for batch in part]))
    return merged
