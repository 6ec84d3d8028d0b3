"""Failures and checkpoints of a long run, against a simulation and the best interval by search."""

import random
from dataclasses import replace

import pytest

from vcore_ds.planning.hardware import GPUS, Cluster
from vcore_ds.planning.memory import MemorySettings, ParameterCounts
from vcore_ds.planning.run_plan import Goodput


def simulate(goodput: Goodput, minutes: float, num_intervals: int) -> float:
    """The share of the time of a run of that many checkpoints, failure by failure."""
    draw, between = random.Random(0), 3600 * goodput.hours_between_failures()
    needed, seconds = 60 * minutes + goodput.seconds_checkpoint, 0.0
    for _ in range(num_intervals):
        until_failure = draw.expovariate(1 / between)
        while until_failure < needed:
            seconds += until_failure
            while (started := draw.expovariate(1 / between)) < goodput.seconds_restart:  # fails while it starts
                seconds += started
            seconds += goodput.seconds_restart
            until_failure = draw.expovariate(1 / between)
        seconds += needed
    return num_intervals * 60 * minutes / seconds


@pytest.mark.parametrize(("num_gpus", "minutes"), [(256, 30.0), (2048, 30.0), (16384, 10.0)])
def test_the_share_is_that_of_a_simulated_run(num_gpus: int, minutes: float) -> None:
    goodput = Goodput(40.0, 40.0, 340.0, num_gpus)
    assert goodput.share(minutes) == pytest.approx(simulate(goodput, minutes, 40_000), rel=0.01)


@pytest.mark.parametrize("num_gpus", [16, 256, 2048, 16384])
def test_no_interval_is_better_than_the_best(num_gpus: int) -> None:
    goodput = Goodput(40.0, 40.0, 340.0, num_gpus)
    others = [goodput.share(0.1 * 1.01**i) for i in range(1500)]
    assert max(others) <= 1.0005 * goodput.share(goodput.best_minutes)
    assert 0 < goodput.share(goodput.best_minutes) < 1


def test_a_checkpoint_of_twelve_bytes_a_parameter_by_hand() -> None:
    """32e9 x 12 bytes, written at 20 GB/s and read back. A minute of Young's formula: sqrt(2 x 38.4 x M)."""
    counts, settings = (
        ParameterCounts(32 * 10**9, 32 * 10**9),
        MemorySettings(num_ranks=1, main_tokens=1, number_bytes=2),
    )
    goodput = Goodput.derive(Cluster(GPUS["H100"], 1000), counts, settings)
    assert goodput.seconds_checkpoint == pytest.approx(38.4)
    assert goodput.hours_between_failures() == pytest.approx(20.0)
    assert goodput.best_minutes == pytest.approx((2 * 38.4 * 20 * 3600) ** 0.5 / 60, rel=0.02)
    halved = Goodput.derive(Cluster(GPUS["H100"], 1000, storage_bandwidth=40e9), counts, settings)
    assert halved.seconds_checkpoint == pytest.approx(19.2)
    # Copied to the host at 50 GB/s on each of 1,000 GPUs, and no more often than it is written.
    beside = Goodput.derive(Cluster(GPUS["H100"], 1000), counts, replace(settings, stages_checkpoints=True))
    assert beside.seconds_checkpoint == pytest.approx(384 / 1000 / 50)
    assert beside.best_minutes == pytest.approx((38.4 - 0.00768) / 60)
    assert beside.share(beside.best_minutes) > goodput.share(goodput.best_minutes)
