"""Rows of packed sequences: every sequence once, no row too long, equal cost on all ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcore_ds.data import measure_waste, pack_batch
from vcore_ds.models import attention_length

ROW_TOKENS = 16_384


def all_rows(lengths: list[int], num_ranks: int, row_tokens: int, attention: float) -> list[list[list[int]]]:
    """By rank."""
    ids = [1000 + i for i in range(len(lengths))]
    micro_steps = pack_batch(
        ids, lengths, data_parallel_size=num_ranks, row_tokens=row_tokens, attention_length=attention
    )
    return [list(rows) for rows in zip(*micro_steps, strict=True)]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 9), st.integers(0, 150), st.floats(1, 1e6)
)
def test_every_sequence_once_and_no_row_too_long(lengths, num_ranks, room, attention) -> None:
    row_tokens = max(lengths) + room
    per_rank = all_rows(lengths, num_ranks, row_tokens, attention)
    assert len({len(rows) for rows in per_rank}) == 1
    packed = [i for rows in per_rank for row in rows for i in row]
    assert sorted(packed) == [1000 + i for i in range(len(lengths))]
    assert all(sum(lengths[i - 1000] for i in row) <= row_tokens for rows in per_rank for row in rows)
    assert per_rank == all_rows(lengths, num_ranks, row_tokens, attention)


def test_by_hand() -> None:
    # The longest first, each to the cheapest row: 9 and 6, then 5 to the 6, then 2 to the 9.
    (first,), (second,) = all_rows([9, 6, 5, 2], 2, 11, 1e9)
    assert sorted([sorted(first), sorted(second)]) == [[1000, 1003], [1001, 1002]]
    # A long sequence sets the level of its micro-step, and the short ones are filled up to it: 10 beside 5 + 5, then
    # 3 beside 3. Rows of equal numbers of tokens, 8 and 8 twice, would be waited for as long with less in them.
    per_rank = all_rows([10, 5, 5, 3, 3], 2, 10, 1e9)
    assert {frozenset(rows[0]) for rows in per_rank} == {frozenset({1000}), frozenset({1001, 1002})}
    assert {frozenset(rows[1]) for rows in per_rank} == {frozenset({1003}), frozenset({1004})}


def test_more_ranks_than_sequences() -> None:
    assert sorted(all_rows([7, 7, 7], 5, 10, 1e9)) == [[[]], [[]], [[1000]], [[1001]], [[1002]]]


def test_waste_by_hand() -> None:
    lengths = {1: 8, 2: 16, 3: 20}
    # One micro-step of two ranks: 8 + 16 tokens beside 20. Without attention, costs are tokens.
    packed = measure_waste([[[1, 2], [3]]], lengths, attention_length=1e12, is_packed=True)
    assert packed.padding_share == pytest.approx(4 / 48) and packed.rank_imbalance == pytest.approx(24 / 22)
    # A row each: the 8 is padded to 16, and the 20 to 24.
    rows = measure_waste([[[1, 2], [3]]], lengths, attention_length=1e12, is_packed=False)
    assert rows.padding_share == pytest.approx(12 / 56) and rows.rank_imbalance == pytest.approx(32 / 28)
    # An idle rank is waited for by nobody, and waits; micro-steps add up.
    idle = measure_waste([[[2], []], [[1], [1]]], lengths, attention_length=16, is_packed=True)
    assert idle.rank_imbalance == pytest.approx((16 * 2 + 8 * 1.5) / (16 * 2 / 2 + 8 * 1.5))


def long_tailed(num_sequences: int, seed: int) -> list[int]:
    """Like the paper's data: mean 3,155 tokens, cut off at 16,384."""
    generator = np.random.default_rng(seed)
    drawn = generator.lognormal(np.log(3155) - 0.5 * 0.8**2, 0.8, 4 * num_sequences)
    return [int(n) for n in drawn if 64 <= n <= ROW_TOKENS][:num_sequences]


@pytest.mark.parametrize("batch_size", [64, 128, 512])
def test_ranks_wait_little_for_each_other_on_long_tailed_lengths(batch_size: int) -> None:
    """Qwen3-32B on 8 ranks. With few sequences a step the longest one alone may cost more than a rank's share."""
    attention, waiting, padding = 59_000.0, [], []
    for seed in range(20):
        lengths = long_tailed(batch_size, seed)
        per_rank = all_rows(lengths, 8, ROW_TOKENS, attention)
        costs = np.array(
            [
                [sum(lengths[i - 1000] * (1 + lengths[i - 1000] / attention) for i in row) for row in rows]
                for rows in per_rank
            ]
        )
        waiting.append(costs.max(0).sum() / costs.mean(0).sum())  # of every micro-step, the slowest rank
        tokens = [sum(lengths[i - 1000] for i in row) for rows in per_rank for row in rows]
        padding.append(1 - sum(tokens) / sum(-(-n // 8) * 8 for n in tokens))
        waste = measure_waste(
            list(zip(*per_rank, strict=True)),
            {1000 + i: n for i, n in enumerate(lengths)},
            attention_length=attention,
            is_packed=True,
        )
        assert waste.padding_share == pytest.approx(padding[-1]) and waste.rank_imbalance == pytest.approx(waiting[-1])
    print(f"|B| {batch_size}: slowest rank {np.mean(waiting):.3f} x mean, padding {np.mean(padding):.2%}")
    assert np.mean(waiting) < 1.05 and np.mean(padding) < 0.02


def test_the_length_at_which_attention_costs_as_much(tmp_path) -> None:
    from transformers import Qwen3Config

    sizes = dict(hidden_size=5120, num_attention_heads=64, num_key_value_heads=8, head_dim=128, intermediate_size=25600)
    Qwen3Config(**sizes).save_pretrained(tmp_path)
    per_layer = 5120 * 8192 * 2 + 5120 * 1024 * 2 + 3 * 5120 * 25600  # q and o, k and v, the MLP
    assert attention_length(str(tmp_path)) == pytest.approx(per_layer / 8192)
