"""Random streams of a run, with separate ids, so that no two draw the same numbers from one seed.

A stream's numbers are a function of the run's seed and of a place (step, epoch, rank, sequence ...), so that resuming
needs no generator state.
"""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """Ids of the streams, first word of the entropy; never reused. `[2, s]` and `[2, s, 0]` give the same numbers."""

    MAIN_ORDER = 0  # place: epoch; then the number of the file in data.train_path, 0 for a single one
    PROBE = 1  # place: optimizer step
    RANDOM_MASK = 2  # tokens that the method `random` keeps. Place: sequence id.
    FIDELITY = 3  # sequences measured by the fidelity command
    DROPOUT = 4  # place: the step's seed; then the token, see `vcore_ds.models.dropout`
    STOCHASTIC_ROUNDING = 5  # place: optimizer step, for the step's seed; then rank on the `shards` axis
    TRUSTED = 6  # trusted sequences of the main batch. Place: optimizer step.
    TOKEN_RECORDS = 7  # sequences in the token record of a large batch. Place: optimizer step.
    FOLLOWED_TRACES = 8
    """Traces measured at every recorded step. Place: 0 for the training data, then the held-out sets."""
    EVALUATION = 9  # answers of an evaluation. Place: checksum of task and problem; then the answer's index.
    LOW_RANK_START = 10
    """Random sketch of a low-rank direction. Place: the step's seed; then the width of a matrix."""
    HELD_OUT = 11  # sequences that data.validation_share holds out. Place: number of the file in data.train_path.


def generator(stream: Stream, seed: int, *place: int) -> np.random.Generator:
    """NumPy generator of a stream and place."""
    return np.random.default_rng(_entropy(stream, seed, *place))


def torch_seed(stream: Stream, seed: int, *place: int) -> int:
    """Seed of a stream and place for `torch.Generator.manual_seed`: an integer below 2^63."""
    return int(np.random.SeedSequence(_entropy(stream, seed, *place)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _entropy(stream: Stream, seed: int, *place: int) -> list[int]:
    return [int(stream), seed % 2**64, *place]
