"""No two random streams of a run draw the same numbers."""

import itertools

import numpy as np
import torch

from vcore_ds.common.random_streams import Stream, generator, torch_seed

PLACES = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (2**20, 3)]


def test_streams_and_places_are_pairwise_different() -> None:
    first_numbers = {}
    for stream, seed, place in itertools.product(Stream, (0, 1, 2, 3, 42, 2**40), PLACES):
        numbers = tuple(generator(stream, seed, *place).integers(0, 2**60, 3).tolist())
        # A stream's places have one length each: numpy takes a missing last word for a 0.
        padded = (stream, seed, *(*place, 0, 0)[:2])
        assert first_numbers.setdefault(numbers, padded) == padded


def test_streams_draw_what_they_drew_before_they_had_names() -> None:
    """The method random's mask, `[2, s, 0]`, and the fidelity command's draw, `[2, s]`, were once the same."""
    for stream, place, entropy in (
        (Stream.RANDOM_MASK, (0,), [2, 42, 0]),
        (Stream.MAIN_ORDER, (3,), [0, 42, 3]),
        (Stream.PROBE, (3,), [1, 42, 3]),
    ):
        assert np.array_equal(generator(stream, 42, *place).random(4), np.random.default_rng(entropy).random(4))


def test_a_seed_for_torch_fits_into_its_generator() -> None:
    for seed, step in itertools.product((0, 42, 2**63, 2**64 - 1), range(50)):
        assert 0 <= torch_seed(Stream.DROPOUT, seed, step, 7) < 2**63
        torch.Generator().manual_seed(torch_seed(Stream.DROPOUT, seed, step, 7))
    assert torch_seed(Stream.DROPOUT, 1, 2, 3) != torch_seed(Stream.STOCHASTIC_ROUNDING, 1, 2, 3)
