"""Order of the sequences of the main and probe batches."""

from collections import Counter

import pytest

from vcore_ds.common.random_streams import Stream
from vcore_ds.data.dataset import MainOrder, RandomDraws


def test_each_epoch_is_a_permutation_and_batches_run_across_epochs() -> None:
    order = MainOrder([10], batch_size=4, seed=42)
    positions = [i for k in range(15) for i in order.step(k)]
    epochs = [positions[start : start + 10] for start in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_steps_are_stateless_and_a_batch_may_exceed_the_data() -> None:
    order = MainOrder([3], batch_size=7, seed=0)
    forward = [order.step(k) for k in range(6)]
    backward = [MainOrder([3], batch_size=7, seed=0).step(k) for k in reversed(range(6))]
    assert forward == backward[::-1]
    assert Counter(i for step in forward for i in step) == {0: 14, 1: 14, 2: 14}


def test_the_position_in_the_data_depends_on_sequences_seen_not_on_batch_size() -> None:
    small, large = MainOrder([100], 8, seed=1), MainOrder([100], 32, seed=1)
    assert [i for k in range(20) for i in small.step(k)] == [i for k in range(5) for i in large.step(k)]


def test_order_of_a_seed_does_not_change_between_versions() -> None:
    # A resumed run continues in this order: a change here breaks the runs of others.
    assert MainOrder([8], 8, seed=42).step(0) == [6, 1, 0, 2, 4, 7, 3, 5]
    assert RandomDraws([100], 4, seed=42, stream=Stream.PROBE).step(3) == [43, 76, 15, 31]


def test_different_seeds_give_different_orders() -> None:
    assert len({tuple(MainOrder([50], 50, seed).step(0)) for seed in (-1, 0, 1, 42)}) == 4
    assert len({tuple(RandomDraws([50], 8, seed, Stream.PROBE).step(0)) for seed in (-1, 0, 1, 42)}) == 4


def test_probe_is_drawn_without_replacement_and_wraps() -> None:
    for k in range(50):
        ids = RandomDraws([6], batch_size=4, seed=42, stream=Stream.PROBE).step(k)
        assert len(ids) == len(set(ids)) == 4 and set(ids) <= set(range(6))
        wrapped = RandomDraws([3], batch_size=7, seed=42, stream=Stream.PROBE).step(k)
        assert sorted(Counter(wrapped).values()) == [2, 2, 3]
        assert sorted(wrapped[:3]) == sorted(wrapped[3:6]) == [0, 1, 2]


def test_probe_and_main_order_are_independent() -> None:
    num_steps, num_sequences = 2000, 20
    main, probe = MainOrder([num_sequences], 4, seed=42), RandomDraws([num_sequences], 4, seed=42, stream=Stream.PROBE)
    main_before = [main.step(k) for k in range(num_steps)]
    overlap = sum(len(set(main_before[k]) & set(probe.step(k))) for k in range(num_steps)) / num_steps
    # Two independent draws of 4 of 20 share 4 * 4 / 20 on average; the standard error is about 0.017.
    assert overlap == pytest.approx(0.8, abs=0.08)
    assert [main.step(k) for k in range(num_steps)] == main_before
    # All sequences serve as probe, each about as often.
    counts = Counter(i for k in range(num_steps) for i in probe.step(k))
    assert set(counts) == set(range(num_sequences)) and max(counts.values()) < 1.2 * min(counts.values())
