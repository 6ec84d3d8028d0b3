"""Micro-steps of a batch, packed and not: every sequence once, no pack too long, equal cost on all ranks."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcore_ds.data.dataset import MainOrder
from vcore_ds.planning.batch_layout import Waste, measure_waste, pack_batch, split_batch
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import TimeModel

PACK_TOKENS = 16_384


def pack_by_rank(
    lengths: list[int], num_ranks: int, pack_tokens: int, attention: float, micro_step_cost: float = 0.0
) -> list[list[list[int]]]:
    """Packs of each rank, as indices of their sequences."""
    micro_steps = pack_batch(
        lengths,
        num_groups=num_ranks,
        pack_tokens=pack_tokens,
        work=lambda n: n * (1.0 + n / attention),
        micro_step_cost=micro_step_cost,
    )
    return [list(packs) for packs in zip(*micro_steps, strict=True)]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 9), st.integers(0, 150), st.floats(1, 1e6)
)
def test_every_sequence_is_packed_once_and_no_pack_is_too_long(lengths, num_ranks, room, attention) -> None:
    pack_tokens = max(lengths) + room
    per_rank = pack_by_rank(lengths, num_ranks, pack_tokens, attention)
    assert len({len(packs) for packs in per_rank}) == 1
    packed = [i for packs in per_rank for pack in packs for i in pack]
    assert sorted(packed) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= pack_tokens for packs in per_rank for pack in packs)
    assert per_rank == pack_by_rank(lengths, num_ranks, pack_tokens, attention)


def test_packs_by_hand() -> None:
    # The longest first, each to the cheapest pack: 9 and 6, then 5 to the 6, then 2 to the 9.
    (first,), (second,) = pack_by_rank([9, 6, 5, 2], 2, 11, 1e9)
    assert sorted([sorted(first), sorted(second)]) == [[0, 3], [1, 2]]
    # A long sequence sets the level of its micro-step, and the short ones are filled up to it: 10 beside 5 + 5, then
    # 3 beside 3. Packs of equal numbers of tokens, 8 and 8 twice, would be waited for as long with less in them.
    per_rank = pack_by_rank([10, 5, 5, 3, 3], 2, 10, 1e9)
    assert {frozenset(packs[0]) for packs in per_rank} == {frozenset({0}), frozenset({1, 2})}
    assert {frozenset(packs[1]) for packs in per_rank} == {frozenset({3}), frozenset({4})}
    # Packs hold a mean of 10.5 where that is more than the longest: 42 tokens on two ranks take 21, not 9 + 8 + 5.
    lengths = [9, 8, 7, 6, 5, 4, 2, 1]
    per_rank = pack_by_rank(lengths, 2, 11, 1e9)
    assert [[sum(lengths[i] for i in pack) for pack in packs] for packs in per_rank] == [[10, 11], [10, 11]]


@pytest.mark.parametrize(
    ("lengths", "pack_tokens", "expected"),
    [
        # Another token beside 9 would make all wait longer than for 9 alone, and 5 + 5 has no room for it.
        ([9, 5, 5, 1, 1], 10, [[[5, 5], [9]], [[1], [1]]]),
        # The second 6 fits into neither pack, the 5 does.
        ([9, 6, 6, 5, 4], 11, [[[6, 5], [9]], [[4], [6]]]),
        # Each micro-step has its share of the work that is left: the third one has 7 and 7, and no 4 beside them.
        ([9, 9, 8, 8, 7, 7, 5, 4], 11, [[[9], [9]], [[8], [8]], [[7], [7]], [[4], [5]]]),
    ],
)
def test_micro_steps_with_attention_by_hand(lengths: list[int], pack_tokens: int, expected: list) -> None:
    """Two packs in each; n tokens cost n + n^2."""
    per_rank = pack_by_rank(lengths, 2, pack_tokens, 1.0)
    assert [sorted([lengths[i] for i in pack] for pack in packs) for packs in zip(*per_rank, strict=True)] == expected


def test_more_ranks_than_sequences_get_one_pack_each() -> None:
    assert sorted(pack_by_rank([7, 7, 7], 5, 10, 1e9)) == [[[0]], [[1]], [[2]]]


def test_another_micro_step_has_to_save_its_cost() -> None:
    def compute_pack_sums(lengths: list[int], micro_step_cost: float) -> list[list[int]]:
        per_rank = pack_by_rank(lengths, 2, 40, 1e9, micro_step_cost)
        return [[sum(lengths[i] for i in pack) for pack in packs] for packs in per_rank]

    # 9 and 4 tokens one after the other take one token less than 14 at once.
    lengths = [2, 9, 6, 4, 3, 2]
    assert compute_pack_sums(lengths, 0.9) == [[9, 4], [9, 4]]
    assert compute_pack_sums(lengths, 1.1) == [[12], [14]]
    # 12 and 8 take as long as 20 at once, but for rounding, which is not the same in Python 3.11 and 3.12.
    assert compute_pack_sums([12, 4, 11, 4, 7], 0.0) == [[20], [18]]


def compute_waste(
    micro_steps: list, lengths: list[int], attention: float, is_packed: bool, num_ranks: int = 2, k: int = 1
) -> Waste:
    time_model = TimeModel(ModelShape(1, 1, 1, 1, attention), num_ranks, num_ranks)
    return measure_waste(micro_steps, lengths, k, time_model, is_packed=is_packed)[0]


def test_waste_by_hand() -> None:
    lengths = [0, 8, 16, 20]
    # One micro-step of two ranks: 8 + 16 tokens beside 20. Without attention, costs are tokens.
    packed = compute_waste([[[1, 2], [3]]], lengths, 1e12, is_packed=True)
    assert packed.padding_share == pytest.approx(4 / 48) and packed.rank_imbalance == pytest.approx(24 / 22)
    assert packed.utilization == pytest.approx(22 / 24) and packed.num_idle_ranks == 0
    # Unpacked: the 8 is padded to 16, and the 20 to 24.
    unpacked = compute_waste([[[1, 2], [3]]], lengths, 1e12, is_packed=False)
    assert unpacked.padding_share == pytest.approx(12 / 56) and unpacked.rank_imbalance == pytest.approx(32 / 28)
    # An idle rank is waited for by nobody, and waits; micro-steps add up.
    idle = compute_waste([[[2], []], [[1], [1]]], lengths, 16, is_packed=True)
    assert idle.rank_imbalance == pytest.approx((16 * 2 + 8 * 1.5) / (16 * 2 / 2 + 8 * 1.5))
    assert idle.num_idle_ranks == 0
    assert compute_waste([[[2], []]], lengths, 16, is_packed=True).num_idle_ranks == 1


def test_waste_of_groups_by_hand() -> None:
    lengths = [8, 16, 20]
    # Six ranks, two to a pack: packs of 24 and 20 tokens, both padded to 32 and 32, and a pair without a pack.
    pairs = compute_waste([[[0, 1], [2]]], lengths, 1e12, is_packed=True, num_ranks=6, k=2)
    assert pairs.padding_share == pytest.approx(20 / 64) and pairs.num_idle_ranks == 2
    assert pairs.rank_imbalance == pytest.approx((24 / 2) / (44 / 6))
    # Passes of different parallel sizes add up.
    alone = compute_waste([[[0, 1, 2]]], lengths, 1e12, is_packed=True, num_ranks=6, k=6)
    assert alone.rank_imbalance == pytest.approx(1.0) and alone.num_idle_ranks == 0
    both = pairs + alone
    assert both.rank_imbalance == pytest.approx((24 / 2 + 44 / 6) / (2 * 44 / 6))
    assert (both.num_idle_ranks, both.num_passes) == (2, 2)


def draw_long_tailed(num_sequences: int, seed: int) -> list[int]:
    """Like the paper's data: mean 3,155 tokens, cut off at 16,384."""
    generator = np.random.default_rng(seed)
    drawn = generator.lognormal(np.log(3155) - 0.5 * 0.8**2, 0.8, 4 * num_sequences)
    return [int(n) for n in drawn if 64 <= n <= PACK_TOKENS][:num_sequences]


@pytest.mark.parametrize("batch_size", [64, 128, 512])
def test_ranks_wait_little_for_each_other_on_long_tailed_lengths(batch_size: int) -> None:
    """Qwen3-32B on 8 ranks. With few sequences a step the longest one alone may cost more than a rank's share."""
    attention, waiting, padding = 59_000.0, [], []
    for seed in range(20):
        lengths = draw_long_tailed(batch_size, seed)
        per_rank = pack_by_rank(lengths, 8, PACK_TOKENS, attention, micro_step_cost=1272.0)
        costs = np.array(
            [[sum(lengths[i] * (1 + lengths[i] / attention) for i in pack) for pack in packs] for packs in per_rank]
        )
        waiting.append(costs.max(0).sum() / costs.mean(0).sum())  # of every micro-step, the slowest rank
        tokens = [sum(lengths[i] for i in pack) for packs in per_rank for pack in packs]
        padding.append(1 - sum(tokens) / sum(-(-n // 8) * 8 for n in tokens))
        by_position = [list(packs) for packs in zip(*per_rank, strict=True)]
        waste = compute_waste(by_position, lengths, attention, is_packed=True, num_ranks=8)
        assert waste.padding_share == pytest.approx(padding[-1]) and waste.rank_imbalance == pytest.approx(waiting[-1])
    print(f"|B| {batch_size}: slowest rank {np.mean(waiting):.3f} x mean, padding {np.mean(padding):.2%}")
    assert np.mean(waiting) < 1.05 and np.mean(padding) < 0.02


def split_by_group(ids: list[int], lengths: list[int], num_groups: int, micro_batch_size: int) -> list:
    micro_steps = split_batch(lengths, num_groups=num_groups, micro_batch_size=micro_batch_size)
    return [[[ids[i] for i in micro] for micro in group] for group in zip(*micro_steps, strict=True)]


@pytest.mark.parametrize("num_groups", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_any_number_of_ranks_sees_the_same_global_batches(num_groups: int, micro_batch_size: int) -> None:
    order = MainOrder([100], batch_size=32, seed=42)
    lengths = [(7 * i) % 41 + 1 for i in range(100)]
    for k in range(5):
        ids = order.step(k)
        per_group = split_by_group(ids, [lengths[i] for i in ids], num_groups, micro_batch_size)
        num_micro_batches = len(ids) // (num_groups * micro_batch_size)
        assert all([len(micro) for micro in group] == [micro_batch_size] * num_micro_batches for group in per_group)
        assert Counter(i for group in per_group for micro in group for i in micro) == Counter(ids)
        # At one micro-step no rank has a sequence shorter than any of a later micro-step.
        steps = [[lengths[i] for group in per_group for i in group[m]] for m in range(len(per_group[0]))]
        assert all(min(earlier) >= max(later) for earlier, later in itertools.pairwise(steps))


def test_equal_lengths_keep_the_order_of_the_batch() -> None:
    assert split_by_group([5, 3, 9, 1], [2, 2, 2, 2], 2, 1) == [[[5], [9]], [[3], [1]]]


def test_more_groups_than_sequences_get_one_micro_batch_each() -> None:
    assert split_by_group([4, 8, 6], [10, 20, 30], 4, 2) == [[[6]], [[8]], [[4]]]
