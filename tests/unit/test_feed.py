"""From a step number to micro-batches: where the probe comes from, how often, and equality at every world size."""

import tempfile
from collections import Counter
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import pytest
import torch

from tests.helpers import step_runs, tiny
from vcore_ds.config.schema import Recipe
from vcore_ds.data.batches import Batch
from vcore_ds.data.dataset import JoinedDataset
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.models.description import read_model
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.training.feed import Feed, build_feed
from vcore_ds.training.schedule import derive_schedule

NUM_TRAINING, NUM_TRUSTED, NUM_STEPS = 20, 5, 6


class Sequences(list):
    """The part of a token store that the feed uses."""

    @property
    def sequence_ids(self) -> np.ndarray:
        return np.array([sequence.sequence_id for sequence in self])

    @property
    def lengths(self) -> list[int]:
        return [len(sequence) for sequence in self]


def make_dataset(num_sequences: int, token: int) -> Sequences:
    """Make sequences of one repeated token, each of another length."""

    def sequence(i: int) -> TokenizedSequence:
        supervised = np.arange(4 + i) > 1
        return TokenizedSequence(i, np.full(4 + i, token, dtype=np.int32), supervised)

    return Sequences(sequence(i) for i in range(num_sequences))


@lru_cache(maxsize=1)
def write_config() -> str:
    """Write the configuration that the costs of attention and linear layers are computed from; returns its folder."""
    folder = tempfile.mkdtemp()
    tiny.qwen3().config.save_pretrained(folder)
    return folder


def make_feed(recipe: Recipe, num_ranks: int, probe_dataset: Sequences | None = None) -> Feed:
    plan = plan_batch(derive_plan_settings(recipe), num_ranks, read_model(write_config()).shape)
    training, seed = make_dataset(NUM_TRAINING, token=3), recipe.run.seed
    return build_feed(recipe.method, recipe.probe, plan, training, 0, seed=seed, probe_dataset=probe_dataset)


@pytest.fixture
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "rank", lambda axis, sequence_parallel=1: 0)


def list_ids(batches: list[Batch]) -> list[int]:
    return [i for batch in batches for i in batch.sequence_ids]


@pytest.mark.parametrize("every", [1, 3])
def test_every_kth_step_probes_from_the_trusted_file_or_the_training_data(first_rank, every: int) -> None:
    recipe = step_runs.make_recipe(
        batch={"global_size": 4},
        probe={"batch_size": 2, "every": every},
        method={"kl_budget": 0.1},
        model={"path": write_config(), "precision": "fp32"},
    )
    feed, trusted = make_feed(recipe, 1), make_feed(recipe, 1, make_dataset(NUM_TRUSTED, token=7))
    for k in range(NUM_STEPS):
        batches, trusted_batches = feed.step(k), trusted.step(k)
        assert bool(list_ids(batches.probe)) == bool(list_ids(trusted_batches.probe)) == (k % every == 0)
        for step, token, size in ((batches, 3, NUM_TRAINING), (trusted_batches, 7, NUM_TRUSTED)):
            assert all({int(t) for t in batch.input_ids.unique()} <= {0, token} for batch in step.probe)
            assert all(i < size for i in list_ids(step.probe))
        # A trusted probe does not change the main batches.
        assert list_ids(batches.main) == list_ids(trusted_batches.main)


def test_the_trusted_share_of_each_batch_comes_from_the_pool(first_rank) -> None:
    """With any method, such as SFT; ids of the pool's sequences follow those of the training data."""
    recipe = step_runs.make_recipe(
        batch={"global_size": 8, "micro_batch_size_per_rank": 8},
        method={"name": "sft"},
        data={"train_path": "none", "probe_path": "none", "trusted_share": 0.25},
        model={"path": write_config(), "precision": "fp32"},
        schedule={"num_epochs": 2},
    )
    pool = make_dataset(NUM_TRUSTED, token=7)
    feed = make_feed(recipe, 1, pool)
    schedule = derive_schedule(recipe.schedule, 1.0, NUM_TRAINING, feed.main_order.batch_size)
    assert schedule.num_steps == 7  # 40 of the training data, 6 a step
    assert feed.first_trusted_id == NUM_TRAINING
    counts: Counter[int] = Counter()
    for k in range(10):
        step = feed.step(k)
        (batch,) = step.main
        num_tokens = int((batch.input_ids != 0).sum())
        assert step.measured["padding_share"] == pytest.approx(1 - num_tokens / batch.input_ids.numel())
        assert step.measured["rank_imbalance"] == 1  # of one rank
        for i, row in zip(batch.sequence_ids, batch.input_ids, strict=True):
            is_trusted = i >= NUM_TRAINING
            assert int(row[0]) == (7 if is_trusted else 3)
            assert int((row != 0).sum()) == 4 + (i - NUM_TRAINING if is_trusted else i)
        counts.update(batch.sequence_ids)
        assert sum(i >= NUM_TRAINING for i in batch.sequence_ids) == 2
    assert {counts[i] for i in range(NUM_TRAINING)} == {3}  # 60 of them
    # Drawn independently of a probe of as many.
    method = {"method": recipe.method.model_copy(update={"name": "vcore"})}
    probed = make_feed(recipe.model_copy(update=method), 1, pool)
    probed.probe_stream.batch_size = probed.trusted_stream.batch_size
    assert any(probed.trusted_stream.step(k) != probed.probe_stream.step(k) for k in range(10))
    assert set(counts) == set(range(NUM_TRAINING + NUM_TRUSTED))
    # All of it depends on the run's seed.
    other = make_feed(recipe.model_copy(update=method | {"run": recipe.run.model_copy(update={"seed": 1})}), 1, pool)
    other.probe_stream.batch_size = probed.probe_stream.batch_size
    for name in ("main_order", "probe_stream", "trusted_stream"):
        assert getattr(other, name).step(0) != getattr(probed, name).step(0)
    # Other data sets are read in micro-batches of any size.
    batches = feed.batches([4, 1], 1, pool)
    assert [batch.sequence_ids for batch in batches] == [[4], [1]] and all(7 in batch.input_ids for batch in batches)
    (batch,) = feed.batches([2, 9, 4], None)
    assert sorted(batch.sequence_ids) == [2, 4, 9] and 7 not in batch.input_ids
    assert feed.epoch(10) == 3.0


def test_ids_of_joined_stores_are_unique_where_a_store_has_dropped_rows() -> None:
    def store(*ids: int) -> Sequences:
        return Sequences(
            replace(sequence, sequence_id=i) for i, sequence in zip(ids, make_dataset(len(ids), 3), strict=True)
        )

    joined = JoinedDataset([store(4, 11, 7), store(0, 4, 8)])
    assert [sequence.sequence_id for sequence in joined] == [4, 11, 7, 12, 16, 20]
    assert joined.first_ids == [0, 12]


def test_a_probe_of_all_is_the_whole_pool_and_sft_has_none(first_rank) -> None:
    for method, size in (({"kl_budget": 0.1}, NUM_TRUSTED), ({"name": "sft"}, 0)):
        recipe = step_runs.make_recipe(
            method=method,
            probe={"batch_size": "all"},
            data={"train_path": "none", "probe_path": "none"},
            model={"path": write_config(), "precision": "fp32"},
        )
        feed = make_feed(recipe, 1, make_dataset(NUM_TRUSTED, token=7))
        assert feed.first_trusted_id is None
        for k in (0, 1):
            assert sorted(i for batch in feed.step(k).probe for i in batch.sequence_ids) == list(range(size))
        assert ("probe the whole pool" in feed.plan.describe()) == bool(size)


@pytest.mark.parametrize("pack_tokens_per_rank", [None, 64])
@pytest.mark.parametrize(("main_size", "probe_size"), [("auto", "auto"), (1, 2), (2, 1), (2, 2)])
def test_1_2_4_and_8_ranks_take_the_same_batches_in_the_same_order(
    monkeypatch, pack_tokens_per_rank: int | None, main_size, probe_size
) -> None:
    """The feeds of all ranks run one after the other in this process, since a feed uses no collective."""

    def recipe(num_ranks: int) -> Recipe:
        sizes = (main_size, probe_size) if num_ranks > 1 else ("auto", "auto")
        return step_runs.make_recipe(
            batch={"global_size": 8, "pack_tokens_per_rank": pack_tokens_per_rank, "sequence_parallel": sizes[0]},
            probe={"batch_size": 4, "sequence_parallel": sizes[1]},
            data={"train_path": "none", "cutoff_length": 64},
            model={"path": write_config(), "precision": "fp32"},
        )

    def rank_of(rank: int, axis: str, sequence_parallel: int = 1) -> int:
        return {"data": rank // sequence_parallel, "shards": rank}[axis]

    def count_sequences(num_ranks: int) -> list[tuple]:
        steps_by_rank = []
        for rank in range(num_ranks):
            monkeypatch.setattr(layout, "rank", partial(rank_of, rank))
            feed = make_feed(recipe(num_ranks), num_ranks)
            steps_by_rank.append([feed.step(k) for k in range(NUM_STEPS)])
        sequence_counts = []
        for batches in zip(*steps_by_rank, strict=True):
            counts = []
            for part in ("main", "probe"):
                rank_batches = [getattr(step, part) for step in batches]
                assert len({len(micro_batches) for micro_batches in rank_batches}) == 1
                (size,) = {batch.sequence_parallel for micro_batches in rank_batches for batch in micro_batches}
                wanted = {"main": main_size, "probe": probe_size}[part]
                assert size == wanted or wanted == "auto" or num_ranks == 1
                key = {"main": "sequence_parallel", "probe": "probe_sequence_parallel"}[part]
                assert all(step.measured[key] == size for step in batches)
                groups = [rank_batches[start : start + size] for start in range(0, num_ranks, size)]
                for group in groups:  # the ranks that share a pack hold the same tokens
                    pairs = [pair for micro_batches in group for pair in zip(micro_batches, group[0], strict=True)]
                    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in pairs)
                    assert all(
                        batch.input_ids.shape[1] % (8 * size) == 0 for micro_batches in group for batch in micro_batches
                    )
                counts.append(Counter(i for group in groups for batch in group[0] for i in batch.sequence_ids))
            sequence_counts.append(tuple(counts))
        return sequence_counts

    alone = count_sequences(1)
    assert all(main.total() == 8 and probe.total() == 4 for main, probe in alone)
    assert len({frozenset(main.items()) for main, _ in alone}) > 1
    assert count_sequences(2) == count_sequences(4) == count_sequences(8) == alone


def test_utilization_counts_passes_and_idle_ranks_of_the_next_steps(first_rank) -> None:
    recipe = step_runs.make_recipe(
        batch={"global_size": 2, "sequence_parallel": 1},
        probe={"batch_size": 4, "every": 4},
        model={"path": write_config(), "precision": "fp32"},
    )
    feed = make_feed(recipe, 4)
    utilization = feed.utilization(1, 10)  # steps 1 to 9, with a probe in 4 and 8
    assert (utilization["main"].waste.num_passes, utilization["probe"].waste.num_passes) == (9, 2)
    assert utilization["main"].is_low and utilization["main"].waste.num_idle_ranks == 2 * 9
    assert feed.utilization(1, 4).keys() == {"main"} and len(feed.next_layouts(1, 100)) == 50
    assert feed.utilization(10, 10)["main"].waste.num_passes == 1  # a run that is resumed after its last step
    assert feed.step(1).measured["probe_sequence_parallel"] is None
    assert feed.step(4).measured["probe_rank_imbalance"] >= 1.0
