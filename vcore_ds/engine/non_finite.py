"""Errors for losses and gradients that are inf or nan, raised before an update and on all ranks alike."""

from collections.abc import Sequence

from vcore_ds.distributed import layout
from vcore_ds.errors import RunFailed


class NonFiniteLoss(RunFailed):
    """A loss of the batch, or the probe, is inf or nan. The optimizer was not stepped."""


class NonFiniteGradient(RunFailed):
    """The gradient of the batch holds inf or nan. The optimizer was not stepped."""


def sequences_by_rank(own_sequence_ids: Sequence[int], sequence_parallel: int) -> str:
    """Sequence ids by rank, for a message; ranks without any are left out, and of a sequence- or tensor-parallel
    group all but the first. A collective.

    Args:
        sequence_parallel: degree of the pass that computed the sequences.
    """
    is_first = layout.rank("sequence", sequence_parallel) == layout.rank("tensor") == 0
    per_rank = layout.gather_objects("job", list(own_sequence_ids) if is_first else [])
    return "; ".join(f"rank {rank}: sequence ids {ids}" for rank, ids in enumerate(per_rank) if ids)
