"""Which sequences a step sees, and which rank sees them.

Both streams are functions of the step number alone: resuming needs no state, and neither the number of ranks nor the
size of a micro-batch changes which sequences form a step. Ids here are positions in `Dataset.sequences`.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

_MAIN, _PROBE = 0, 1
"""First entry of the entropy of each stream's generator, so that one seed gives independent streams."""


class MainOrder:
    """The main batches: consecutive slices of one shuffled epoch after the other. A batch may span two epochs."""

    def __init__(self, num_sequences: int, batch_size: int, seed: int) -> None:
        """`batch_size`: sequences per optimizer step over all ranks and micro-batches."""
        self.num_sequences, self.batch_size, self.seed = num_sequences, batch_size, seed

    def step(self, k: int) -> list[int]:
        """Ids [batch_size] of the global batch of optimizer step k, from 0."""
        ids = []
        for position in range(k * self.batch_size, (k + 1) * self.batch_size):
            epoch, index = divmod(position, self.num_sequences)
            ids.append(int(_epoch_permutation(self.num_sequences, self.seed, epoch)[index]))
        return ids


class ProbeStream:
    """The probe batches B' (Algorithm 1 of the paper): drawn from all sequences, whatever `MainOrder` does."""

    def __init__(self, num_sequences: int, batch_size: int, seed: int) -> None:
        """`batch_size`: probe sequences per optimizer step over all ranks."""
        self.num_sequences, self.batch_size, self.seed = num_sequences, batch_size, seed

    def step(self, k: int) -> list[int]:
        """Ids [batch_size] of the probe batch of optimizer step k, from 0; none comes twice before all came once."""
        generator = _generator(_PROBE, self.seed, k)
        ids: list[int] = []
        while len(ids) < self.batch_size:
            size = min(self.batch_size - len(ids), self.num_sequences)
            ids += generator.choice(self.num_sequences, size, replace=False).tolist()
        return ids


def split_batch(
    ids: Sequence[int], lengths: Sequence[int], *, data_parallel_size: int, micro_batch_size: int
) -> list[list[list[int]]]:
    """Ids by micro-step and rank of the global batch `ids`, whose sequence `ids[i]` has `lengths[i]` tokens.

    Sorted from long to short, each run of data_parallel_size * micro_batch_size sequences is dealt out to the ranks
    one by one: at any micro-step all ranks have sequences of about the same length and none waits for another.
    Every rank gets the same number of micro-batches; where sequences run out, the last ones may be smaller or empty.
    """
    order = sorted(range(len(ids)), key=lambda i: -lengths[i])
    group_size = data_parallel_size * micro_batch_size
    groups = [order[start : start + group_size] for start in range(0, len(order), group_size)]
    return [
        [[ids[i] for i in group[rank::data_parallel_size]] for rank in range(data_parallel_size)] for group in groups
    ]


@lru_cache(maxsize=4)  # a step needs one or two epochs; more data sets may take turns
def _epoch_permutation(num_sequences: int, seed: int, epoch: int) -> np.ndarray:
    return _generator(_MAIN, seed, epoch).permutation(num_sequences)


def _generator(stream: int, seed: int, counter: int) -> np.random.Generator:
    return np.random.default_rng([stream, seed % 2**64, counter])
