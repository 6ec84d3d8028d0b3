"""Which sequences a step sees.

Both streams are functions of the step number alone: resuming needs no state, and neither the number of ranks nor the
size of a micro-batch changes which sequences form a step. Ids here are positions in the data set.
"""

from functools import lru_cache

import numpy as np

from vcore_ds.random_streams import Stream, generator


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


class RandomDraws:
    """Batches drawn from all sequences, whatever `MainOrder` does: the probe batches B' (Algorithm 1 of the paper), and
    the trusted part of the main batches."""

    def __init__(self, num_sequences: int, batch_size: int, seed: int, stream: Stream) -> None:
        """`batch_size`: sequences per optimizer step over all ranks."""
        self.num_sequences, self.batch_size, self.seed, self.stream = num_sequences, batch_size, seed, stream

    def step(self, k: int) -> list[int]:
        """Ids [batch_size] of optimizer step k, from 0; none comes twice before all came once."""
        drawn = generator(self.stream, self.seed, k)
        ids: list[int] = []
        while len(ids) < self.batch_size:
            size = min(self.batch_size - len(ids), self.num_sequences)
            ids += drawn.choice(self.num_sequences, size, replace=False).tolist()
        return ids


@lru_cache(maxsize=4)  # a step needs one or two epochs; more data sets may take turns
def _epoch_permutation(num_sequences: int, seed: int, epoch: int) -> np.ndarray:
    return generator(Stream.MAIN_ORDER, seed, epoch).permutation(num_sequences)
