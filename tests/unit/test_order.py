"""Which sequences a step sees, and which rank sees them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcore_ds.data import MainOrder, ProbeStream, split_batch


def test_each_epoch_is_a_permutation_and_batches_run_across_epochs() -> None:
    order = MainOrder(num_sequences=10, batch_size=4, seed=42)
    positions = [i for k in range(15) for i in order.step(k)]
    epochs = [positions[start : start + 10] for start in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_steps_are_stateless_and_a_batch_may_exceed_the_data() -> None:
    order = MainOrder(num_sequences=3, batch_size=7, seed=0)
    forward = [order.step(k) for k in range(6)]
    backward = [MainOrder(num_sequences=3, batch_size=7, seed=0).step(k) for k in reversed(range(6))]
    assert forward == backward[::-1]
    assert Counter(i for step in forward for i in step) == {0: 14, 1: 14, 2: 14}


def test_the_position_in_the_data_depends_on_sequences_seen_not_on_batch_size() -> None:
    small, large = MainOrder(100, 8, seed=1), MainOrder(100, 32, seed=1)
    assert [i for k in range(20) for i in small.step(k)] == [i for k in range(5) for i in large.step(k)]


def test_order_of_a_seed_does_not_change_between_versions() -> None:
    # A resumed run continues in this order: a change here breaks the runs of others.
    assert MainOrder(8, 8, seed=42).step(0) == [6, 1, 0, 2, 4, 7, 3, 5]
    assert ProbeStream(100, 4, seed=42).step(3) == [43, 76, 15, 31]


def test_seeds_differ_also_negative_ones() -> None:
    assert len({tuple(MainOrder(50, 50, seed).step(0)) for seed in (-1, 0, 1, 42)}) == 4
    assert len({tuple(ProbeStream(50, 8, seed).step(0)) for seed in (-1, 0, 1, 42)}) == 4


def test_probe_is_drawn_without_replacement_and_wraps() -> None:
    for k in range(50):
        ids = ProbeStream(num_sequences=6, batch_size=4, seed=42).step(k)
        assert len(ids) == len(set(ids)) == 4 and set(ids) <= set(range(6))
        wrapped = ProbeStream(num_sequences=3, batch_size=7, seed=42).step(k)
        assert sorted(Counter(wrapped).values()) == [2, 2, 3]
        assert sorted(wrapped[:3]) == sorted(wrapped[3:6]) == [0, 1, 2]


def test_probe_and_main_order_are_independent() -> None:
    num_steps, num_sequences = 2000, 20
    main, probe = MainOrder(num_sequences, 4, seed=42), ProbeStream(num_sequences, 4, seed=42)
    main_before = [main.step(k) for k in range(num_steps)]
    overlap = sum(len(set(main_before[k]) & set(probe.step(k))) for k in range(num_steps)) / num_steps
    # Two independent draws of 4 of 20 share 4 * 4 / 20 on average; the standard error is about 0.017.
    assert overlap == pytest.approx(0.8, abs=0.08)
    assert [main.step(k) for k in range(num_steps)] == main_before
    # All sequences serve as probe, each about as often.
    counts = Counter(i for k in range(num_steps) for i in probe.step(k))
    assert set(counts) == set(range(num_sequences)) and max(counts.values()) < 1.2 * min(counts.values())


def by_rank(ids: list[int], lengths: list[int], data_parallel_size: int, micro_batch_size: int) -> list:
    micro_steps = split_batch(ids, lengths, data_parallel_size=data_parallel_size, micro_batch_size=micro_batch_size)
    return [list(micro_batches) for micro_batches in zip(*micro_steps, strict=True)]


@pytest.mark.parametrize("data_parallel_size", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_any_number_of_ranks_sees_the_same_global_batches(data_parallel_size: int, micro_batch_size: int) -> None:
    order = MainOrder(num_sequences=100, batch_size=32, seed=42)
    lengths = [(7 * i) % 41 + 1 for i in range(100)]
    for k in range(5):
        ids = order.step(k)
        per_rank = by_rank(ids, [lengths[i] for i in ids], data_parallel_size, micro_batch_size)
        num_micro_batches = len(ids) // (data_parallel_size * micro_batch_size)
        assert all([len(micro) for micro in rank] == [micro_batch_size] * num_micro_batches for rank in per_rank)
        assert Counter(i for rank in per_rank for micro in rank for i in micro) == Counter(ids)
        # At one micro-step no rank has a sequence shorter than any of a later micro-step.
        steps = [[lengths[i] for rank in per_rank for i in rank[m]] for m in range(len(per_rank[0]))]
        assert all(min(earlier) >= max(later) for earlier, later in zip(steps, steps[1:], strict=False))


def test_equal_lengths_keep_the_order_of_the_batch() -> None:
    assert by_rank([5, 3, 9, 1], [2, 2, 2, 2], 2, 1) == [[[5], [9]], [[3], [1]]]


def test_ranks_without_a_probe_sequence_get_an_empty_micro_batch() -> None:
    assert by_rank([4, 8, 6], [10, 20, 30], 4, 2) == [[[6]], [[8]], [[4]], [[]]]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    data_parallel_size=st.integers(1, 9),
    micro_batch_size=st.integers(1, 5),
)
def test_every_sequence_goes_to_one_rank(lengths: list[int], data_parallel_size: int, micro_batch_size: int) -> None:
    ids = [100 + i % 7 for i in range(len(lengths))]  # also with an id that comes twice in a batch
    per_rank = by_rank(ids, lengths, data_parallel_size, micro_batch_size)
    assert Counter(i for rank in per_rank for micro in rank for i in micro) == Counter(ids)
    assert len({len(rank) for rank in per_rank}) == 1
    assert all(len(micro) <= micro_batch_size for rank in per_rank for micro in rank)
