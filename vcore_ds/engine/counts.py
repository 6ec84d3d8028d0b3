"""The numbers of sequences and tokens of a global batch, by which its losses are divided."""

from collections.abc import Sequence

import torch

from vcore_ds.data.batches import Batch
from vcore_ds.distributed import layout
from vcore_ds.method.objective import GlobalCounts


def count_globally(batches: Sequence[Batch], *, kept_only: bool = False) -> GlobalCounts:
    """Counts sequences and supervised tokens over all ranks; needed before the first backward. A collective.

    Args:
        batches: this rank's micro-batches, at least one, all of one degree of sequence parallelism.
        kept_only: count only tokens that the batch's mask keeps (`Batch.kept`).
    """
    num_tokens = torch.cat([b.num_kept_tokens() if kept_only else b.num_supervised_tokens() for b in batches])
    own = [float((num_tokens > 0).sum()), float(num_tokens.sum())]
    sequences, tokens = layout.sum_over("data", own, batches[0].sequence_parallel)
    return GlobalCounts(num_sequences_global=int(sequences), num_supervised_tokens_global=int(tokens))
