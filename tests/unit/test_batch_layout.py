"""How a batch is spread over sequence-parallel groups: complete, the same everywhere, and even."""

import math
import random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcore_ds.commands.plan.prediction import LengthModel
from vcore_ds.planning.batch_layout import (
    FREE_TOKENS,
    BatchLayout,
    MicroBatchLimit,
    Utilization,
    Waste,
    lay_out_batch,
    list_sequence_parallel_sizes,
    padded_length,
    summarize,
)
from vcore_ds.planning.hardware import Machine
from vcore_ds.planning.known_models import QWEN3_32B
from vcore_ds.planning.model_shape import ModelShape
from vcore_ds.planning.passes import CPU, H100, TimeModel

TINY = ModelShape(2, 4, 2, 16, 30_000)


def test_parallel_sizes_divide_ranks_and_query_heads() -> None:
    assert list_sequence_parallel_sizes(64, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert list_sequence_parallel_sizes(128, 40) == [1, 2, 4, 8]
    assert list_sequence_parallel_sizes(12, 36) == [1, 2, 3, 4, 6, 12]
    assert list_sequence_parallel_sizes(7, 64) == [1]
    assert list_sequence_parallel_sizes(2**31 - 1, 64) == [1]
    assert all(
        list_sequence_parallel_sizes(ranks, heads) == [k for k in range(1, 129) if ranks % k == heads % k == 0]
        for ranks in range(1, 40)
        for heads in range(1, 40)
    )


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    num_ranks=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 64, 1000]),
    num_heads=st.sampled_from([1, 4, 9, 12, 64]),
    room=st.integers(0, 100),
    num_unpacked=st.sampled_from([None, 1, 3]),
    machine=st.sampled_from([H100, CPU]),
)
def test_every_sequence_is_placed_once_where_it_fits(
    lengths, num_ranks, num_heads, room, num_unpacked, machine
) -> None:
    parallel_sizes = list_sequence_parallel_sizes(num_ranks, num_heads)
    pack_tokens = -(-max(lengths) // parallel_sizes[-1]) + room
    limit = MicroBatchLimit(pack_tokens) if num_unpacked is None else MicroBatchLimit(None, num_unpacked)
    shape = ModelShape(2, num_heads, 1, 16, 50_000)
    time_model = TimeModel(shape, num_ranks, min(8, num_ranks), machine)
    ids = [100 + i // 2 for i in range(len(lengths))]  # an id may come twice in a batch

    batch_layout = lay_out_batch(ids, lengths, parallel_sizes=parallel_sizes, limit=limit, time_model=time_model)
    k = batch_layout.sequence_parallel
    assert k in parallel_sizes and batch_layout == lay_out_batch(
        ids, lengths, parallel_sizes=parallel_sizes, limit=limit, time_model=time_model
    )
    per_group = [batch_layout.list_group_ids(group) for group in range(min(num_ranks // k, len(ids) + 2))]
    assert sorted(i for steps in per_group for micro_batch in steps for i in micro_batch) == ids
    assert {len(steps) for steps in per_group} == {len(batch_layout.micro_steps)}
    assert all(len(groups) <= len(ids) for groups in batch_layout.micro_steps)
    if num_unpacked is None:
        # Ids repeat, so the check uses the shortest possible length of each id.
        shortest = {i: min(n for j, n in zip(ids, lengths, strict=True) if i == j) for i in ids}
        assert all(sum(shortest[i] for i in pack) <= k * pack_tokens for steps in per_group for pack in steps)
    else:
        assert all(len(micro_batch) <= num_unpacked for steps in per_group for micro_batch in steps)
    waste = batch_layout.waste
    assert waste.rank_imbalance >= 1 - 1e-9 and waste.num_tokens == sum(lengths)
    busy = sum(any(steps) for steps in per_group)
    assert waste.num_idle_ranks == num_ranks - k * busy


def find_micro_batch_sizes(lengths: list[int], machine: Machine) -> list[int]:
    batch_layout = lay_out_batch(
        range(len(lengths)),
        lengths,
        parallel_sizes=[1],
        limit=MicroBatchLimit(None, None),
        time_model=TimeModel(QWEN3_32B, 2, 2, machine),
    )
    return [len(groups[0]) for groups in batch_layout.micro_steps]


def test_short_sequences_share_a_micro_batch_where_a_pass_costs_more_than_padding() -> None:
    assert find_micro_batch_sizes([128] * 16, H100) == [8]
    assert find_micro_batch_sizes([4096] * 2 + [64] * 32, H100) == [1, 16]
    assert find_micro_batch_sizes([3000] * 2 + [1000] * 2 + [500] * 2, CPU) == [1, 1, 1]  # a pass costs 48 tokens there
    assert find_micro_batch_sizes([3000] * 2 + [1000] * 2 + [976] * 2, CPU) == [1, 2]
    free = Machine(1.0, math.inf, math.inf, 0.0, 0.0)
    assert find_micro_batch_sizes([500, 500, 492, 492], free) == [1, 1]


@pytest.mark.parametrize("latency, num_micro_steps", [(6.9, 2), (7.1, 1)])
def test_the_exchange_counts_among_what_a_micro_step_costs(latency: float, num_micro_steps: int) -> None:
    """On two ranks 65 tokens are padded to 80: 64 others beside them cost 8 tokens, a micro-step 1 and its latency."""
    time_model = TimeModel(ModelShape(1, 1, 1, 1, 10**12), 2, 2, Machine(1e12, math.inf, math.inf, latency, 1.0))
    limit = MicroBatchLimit(None, None)
    batch_layout = lay_out_batch(range(2), [65, 64], parallel_sizes=[2], limit=limit, time_model=time_model)
    assert len(batch_layout.micro_steps) == num_micro_steps


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    num_ranks=st.sampled_from([1, 2, 8]),
    machine=st.sampled_from([H100, CPU]),
    may_pack=st.booleans(),
)
def test_a_chosen_micro_batch_needs_no_more_memory_than_the_longest_sequence(
    lengths, num_ranks, machine, may_pack
) -> None:
    time_model = TimeModel(TINY, num_ranks, num_ranks, machine)
    for size in list_sequence_parallel_sizes(num_ranks, TINY.num_heads):
        limit = MicroBatchLimit(None, None, may_pack)
        batch_layout = lay_out_batch(
            range(len(lengths)), lengths, parallel_sizes=[size], limit=limit, time_model=time_model
        )
        assert batch_layout.is_packed == may_pack
        assert sorted(i for groups in batch_layout.micro_steps for micro_batch in groups for i in micro_batch) == list(
            range(len(lengths))
        )
        bound = max(FREE_TOKENS * size, padded_length(max(lengths), size))
        for groups in batch_layout.micro_steps:
            for micro_batch in groups:
                unpadded = [lengths[i] for i in micro_batch]
                padded = [sum(unpadded)] if may_pack else [max(unpadded, default=0)] * len(unpadded)
                assert sum(padded_length(n, size) for n in padded) <= bound


def test_packing_leaves_less_padding_and_waiting_than_unpacked_sequences() -> None:
    """Four probe sequences on two ranks: the lengths of the overhead benchmark's first one."""

    def lay_out_probe(may_pack: bool) -> BatchLayout:
        time_model = TimeModel(ModelShape(8, 6, 2, 64, 1_720_320), 2, 2, CPU)
        lengths, limit = [111, 138, 164, 512], MicroBatchLimit(None, None, may_pack)
        return lay_out_batch(range(4), lengths, parallel_sizes=[1], limit=limit, time_model=time_model)

    unpacked, packed = lay_out_probe(may_pack=False), lay_out_probe(may_pack=True)
    assert (len(unpacked.micro_steps), len(packed.micro_steps)) == (2, 1)
    assert sorted(map(len, packed.micro_steps[0])) == [1, 3]
    assert packed.time < 0.8 * unpacked.time


def choose_spread(lengths: list[int], num_ranks: int, **options) -> BatchLayout:
    time_model = TimeModel(QWEN3_32B, num_ranks, min(8, num_ranks))
    parallel_sizes = list_sequence_parallel_sizes(num_ranks, QWEN3_32B.num_heads)
    fixed = {"parallel_sizes": parallel_sizes, "limit": MicroBatchLimit(16_384), "time_model": time_model}
    return lay_out_batch(range(len(lengths)), lengths, **fixed | options)


def test_ranks_share_a_pack_only_where_that_is_faster() -> None:
    assert choose_spread([4096] * 64, 8).sequence_parallel == 1  # balanced already: an exchange would only cost
    assert choose_spread([16_000] * 4, 8).sequence_parallel == 2
    assert choose_spread([16_000, 500, 500, 500], 8).sequence_parallel == 8
    assert choose_spread([100_000, 500], 8).sequence_parallel == 8  # no shorter pack holds it
    free = TimeModel(QWEN3_32B, 4, 4, machine=type(H100)(1.0, math.inf, math.inf, 0.0, 0.0))
    assert choose_spread([8, 8, 8, 8], 4, time_model=free, parallel_sizes=[1, 2, 4]).sequence_parallel == 1  # a tie


def test_limits_of_a_micro_batch_by_hand() -> None:
    """A pack's tokens on each rank; else the longest sequence with its padding, or what is free on each rank."""
    assert MicroBatchLimit(16).max_tokens(4, 9) == 64
    shared = MicroBatchLimit(None, None)
    assert [shared.max_tokens(k, n) for k, n in ((1, 9), (4, 9), (1, 2001), (4, 4097))] == [1024, 4096, 2008, 4128]


@pytest.mark.parametrize("latency, num_micro_steps, slowest", [(2.9, 2, 136), (3.1, 1, 144)])
def test_the_time_of_a_layout_by_hand(latency: float, num_micro_steps: int, slowest: int) -> None:
    """A second micro-step saves 8 tokens on two ranks, and costs both a token for its kernels and its latency."""
    shape = ModelShape(1, 1, 1, 1, 10**12)  # without attention to speak of
    machine = Machine(1e12, math.inf, math.inf, latency, 1.0)
    lengths, fixed = [16, 32, 72, 32, 56, 40, 24], dict(limit=MicroBatchLimit(1000), parallel_sizes=[2])
    packed = lay_out_batch(range(7), lengths, **fixed, time_model=TimeModel(shape, 4, 4, machine))
    assert len(packed.micro_steps) == num_micro_steps
    assert packed.time == pytest.approx(slowest / 2 + num_micro_steps * (1 + latency))
    rows = dict(limit=MicroBatchLimit(None, 2), parallel_sizes=[1], time_model=TimeModel(shape, 2, 2, machine))
    unpacked = lay_out_batch(range(4), [17, 5, 16, 5], **rows)
    assert unpacked.time == pytest.approx(2 * 24 + 1) and unpacked.most_tokens == 2 * 24  # padded to the longest
    time_model = TimeModel(QWEN3_32B, 2, 2)
    exchanged = (time_model.work(8000) + 8000 * time_model.estimate_exchange(2)) / 2
    exchanged += time_model.estimate_exchange_latency(2) + time_model.micro_step
    assert choose_spread([8000], 2, parallel_sizes=[2]).time == pytest.approx(exchanged)


def test_ranks_beyond_the_sequences_cost_nothing_to_plan() -> None:
    batch_layout = choose_spread([5000, 3000], 2**31 - 1)
    assert batch_layout.sequence_parallel == 1 and len(batch_layout.micro_steps[0]) == 2
    assert batch_layout.list_group_ids(2**31 - 2) == [[]] and batch_layout.waste.num_idle_ranks == 2**31 - 3
    for limit in (MicroBatchLimit(None, 1), MicroBatchLimit(None, None), MicroBatchLimit(None, None, True)):
        assert len(choose_spread([5000, 3000], 1009, limit=limit).micro_steps[0]) == 2


def test_all_gathers_cost_about_a_thousand_tokens_within_and_between_nodes() -> None:
    for num_ranks in (8, 16, 128):
        gather = TimeModel(QWEN3_32B, num_ranks, 8).micro_step - H100.half_speed_tokens
        assert 900 < gather < 1200
    assert TimeModel(QWEN3_32B, 1, 1).micro_step == H100.half_speed_tokens


def test_exchanges_by_hand() -> None:
    time_model = TimeModel(QWEN3_32B, 64, 8)
    seconds_per_token = 2 * QWEN3_32B.layer_parameters / 400e12
    within = 2 * 128 * (2 * 64 + 2 * 8) * 7 / 8 / 360e9  # bf16, head_dim, heads, all but the own part
    assert time_model.estimate_exchange(8) == pytest.approx(within / seconds_per_token)
    between = 2 * 128 * (2 * 64 + 2 * 16) * (15 / 16) * (8 / 15) / 42e9  # 8 of the 15 others are on another node
    assert time_model.estimate_exchange(16) == pytest.approx(between / seconds_per_token)
    # Groups of 6 straddle nodes of 8: the worst rank has one other of its group at its side.
    straddling = 2 * 128 * (2 * 64 + 2 * 24) / 6 * 4 / 42e9
    assert TimeModel(QWEN3_32B, 24, 8).estimate_exchange(6) == pytest.approx(straddling / seconds_per_token)
    assert time_model.estimate_exchange(1) == time_model.estimate_exchange_latency(1) == 0.0


def test_simulated_lengths_are_reproducible_and_cut_at_the_limit() -> None:
    batches = LengthModel().draw_batches("main", 32, 16_384)
    assert len(batches) == 40 and batches == LengthModel().draw_batches("main", 32, 16_384)
    assert 2_500 < sum(map(sum, batches)) / (40 * 32) < 3_200 and max(map(max, batches)) <= 16_384
    assert (
        len(LengthModel().draw_batches("main", 1000, 100)) == 4
        and LengthModel().draw_batches("main", 2**31 - 1, 100) == []
    )
    assert {n for lengths in LengthModel().draw_batches("main", 4, 2) for n in lengths} == {2}


def test_a_summary_has_the_typical_parallel_size() -> None:
    passes = [choose_spread([16_000] * 4, 8), choose_spread([16_000] * 4, 8), choose_spread([4096] * 64, 8)]
    summary = summarize(passes)
    assert summary.typical_parallel_size == 2 and summary.waste.num_passes == 3 and not summary.is_low
    assert "sequence-parallel size 2; slowest rank 1.000 x mean, 100% useful work; no idle ranks" in summary.describe()
    assert summary.time == pytest.approx(2 * passes[0].time + passes[2].time)
    assert (passes[0].most_tokens, passes[2].most_tokens, summary.most_tokens) == (8000, 16_384, 16_384)
    assert summarize(passes[1:]).typical_parallel_size == 1  # the smaller one where two are as frequent
    # docs/parallelism.md: a run warns below 80% useful work.
    for mean_work, is_low in ((79.0, True), (81.0, False)):
        assert Utilization(1, Waste(1, 1, mean_work, 100.0, 0), 1, 1.0).is_low == is_low
    idle = summarize([choose_spread([900], 3)] * 2)
    assert idle.is_low and "sequence-parallel size 1;" in idle.describe() and "2 idle ranks" in idle.describe()


# ---------------------------------------------------------------- the paper's batch on 8 to 128 GPUs


def lay_out_simulated(num_ranks: int, size: int, **options) -> list[Waste]:
    """The waste of each simulated batch in packs of 16,384 tokens."""
    batches = LengthModel().draw_batches("main", size, 16_384)
    return [choose_spread(lengths, num_ranks, **options).waste for lengths in batches]


@pytest.mark.parametrize("num_ranks", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("size", [4, 32])
def test_the_papers_batch_uses_a_cluster(num_ranks: int, size: int) -> None:
    wastes = lay_out_simulated(num_ranks, size)
    assert mean(waste.rank_imbalance for waste in wastes) <= (1.3 if num_ranks == 128 else 1.15)
    assert max(waste.num_idle_ranks for waste in wastes) == 0


def test_without_sequence_parallelism_the_papers_batch_does_not_use_a_cluster() -> None:
    """The simulated lengths give the same numbers as the lengths on which the problem was first measured."""
    imbalances = {
        num_ranks: mean(waste.rank_imbalance for waste in lay_out_simulated(num_ranks, 32, parallel_sizes=[1]))
        for num_ranks in (8, 16, 32, 64, 128)
    }
    assert imbalances == pytest.approx({8: 1.22, 16: 2.2, 32: 4.4, 64: 8.8, 128: 17.6}, rel=0.05)


def test_the_order_of_a_batch_does_not_matter_to_its_time() -> None:
    generator = random.Random(3)
    lengths = LengthModel().draw_batches("main", 32, 16_384)[0]
    shuffled = generator.sample(lengths, len(lengths))
    assert choose_spread(lengths, 64).waste.slowest_work == pytest.approx(
        choose_spread(shuffled, 64).waste.slowest_work
    )
