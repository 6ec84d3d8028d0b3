"""Losses and gradients that are inf or nan: found before an update, raised on all ranks alike with the sequences."""

from collections.abc import Sequence

from vcore_ds.distributed import layout
from vcore_ds.errors import RunFailed


class NonFiniteLoss(RunFailed):
    """A loss of the batch, or the probe, is inf or nan. The optimizer was not stepped."""


class NonFiniteGradient(RunFailed):
    """The gradient of the batch holds inf or nan. The optimizer was not stepped."""


def sequences_by_rank(own_sequence_ids: Sequence[int]) -> str:
    """The sequence ids of all ranks that have some, for a message. A collective."""
    per_rank = layout.gather_objects("job", list(own_sequence_ids))
    return "; ".join(f"rank {rank}: sequence ids {ids}" for rank, ids in enumerate(per_rank) if ids)
