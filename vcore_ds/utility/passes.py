"""Passes over a batch without gradient: several micro-batches at a time."""

from collections.abc import Sequence

from torch import Tensor

from vcore_ds.data import Batch, merge_batches
from vcore_ds.engine import Engine


def measured_losses(engine: Engine, batches: Sequence[Batch], batches_per_pass: int) -> list[Tensor]:
    """Losses `[N]` of each micro-batch of this rank, without gradient and without dropout. A collective."""
    losses: list[Tensor] = []
    with engine.without_gradient():
        for merged, sizes in merged_passes(batches, batches_per_pass):
            losses += engine.token_losses(merged).split(sizes)
    return losses


def merged_passes(batches: Sequence[Batch], batches_per_pass: int) -> list[tuple[Batch, list[int]]]:
    """Consecutive micro-batches merged into passes, with the number of supervised tokens of each.

    The number of passes depends on numbers that all ranks share, never on what a batch holds: each pass is a
    collective.
    """
    merged = []
    for start in range(0, len(batches), batches_per_pass):
        part = list(batches[start : start + batches_per_pass])
        merged.append((merge_batches(part), [int(batch.num_supervised_tokens().sum()) for batch in part]))
    return merged
