"""From a step number to micro-batches: where the probe comes from, how often, and the same at any world size."""

import tempfile
from collections import Counter
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import pytest
import torch

from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.config.schema import Recipe
from vcore_ds.data.dataset import JoinedDataset
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.models.configuration import read_model_shape
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.settings import derive_plan_settings
from vcore_ds.train.feed import Feed, build_feed
from vcore_ds.train.settings import derive_schedule, derive_step_settings

pytestmark = pytest.mark.dist

NUM_TRAINING, NUM_TRUSTED, NUM_STEPS = 20, 5, 6


class Sequences(list):
    """A token store as the feed sees it."""

    @property
    def sequence_ids(self) -> np.ndarray:
        return np.array([sequence.sequence_id for sequence in self])

    @property
    def lengths(self) -> list[int]:
        return [len(sequence) for sequence in self]


def dataset(num_sequences: int, token: int) -> Sequences:
    """Sequences of one repeated token, each of its own length."""

    def sequence(i: int) -> TokenizedSequence:
        supervised = np.arange(4 + i) > 1
        return TokenizedSequence(i, np.full(4 + i, token, dtype=np.int32), supervised)

    return Sequences(sequence(i) for i in range(num_sequences))


@lru_cache(maxsize=1)
def model_folder() -> str:
    """A model with the configuration that the costs of attention and linear layers are computed from."""
    folder = tempfile.mkdtemp()
    tiny.qwen3().config.save_pretrained(folder)
    return folder


def feed_of(recipe: Recipe, num_ranks: int, probe_dataset: Sequences | None = None) -> Feed:
    plan = plan_batch(derive_plan_settings(recipe), num_ranks, read_model_shape(model_folder()))
    training, settings = dataset(NUM_TRAINING, token=3), derive_step_settings(recipe)
    return build_feed(settings, plan, training, 0, seed=recipe.run.seed, probe_dataset=probe_dataset)


def ids_by_step(probe_every: int, trusted: bool) -> list[tuple[list[int], list[int], set[int]]]:
    """This rank's sequence ids in the main and the probe batch, and the tokens of the probe."""
    recipe = step_runs.make_recipe(
        batch={"global_size": 4},
        probe={"batch_size": 2, "every": probe_every},
        method={"kl_budget": 0.1},
        model={"path": model_folder(), "precision": "fp32"},
    )
    feed = feed_of(recipe, layout.size("shards"), dataset(NUM_TRUSTED, token=7) if trusted else None)
    found = []
    for k in range(NUM_STEPS):
        batches = feed.step(k)
        tokens = {int(t) for batch in batches.probe for t in batch.input_ids.unique()} - {0}
        main, probe = ([i for batch in part for i in batch.sequence_ids] for part in (batches.main, batches.probe))
        found.append((main, probe, tokens))
    return found


def every_case() -> dict[tuple[int, bool], list]:
    return {(every, trusted): ids_by_step(every, trusted) for every in (1, 3) for trusted in (False, True)}


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict]]:
    return {world_size: run_ranks(every_case, world_size) for world_size in (1, 2)}


@pytest.mark.parametrize("case", [(every, trusted) for every in (1, 3) for trusted in (False, True)])
def test_the_same_sequences_at_any_number_of_ranks(found, case) -> None:
    for k in range(NUM_STEPS):
        for part in (0, 1):
            together = sorted(i for of_rank in found[2] for i in of_rank[case][k][part])
            assert together == sorted(found[1][0][case][k][part])


@pytest.mark.parametrize("every", [1, 3])
def test_only_every_kth_step_probes(found, every: int) -> None:
    for of_rank in found[2]:
        assert [bool(ids) for _, ids, _ in of_rank[every, False]] == [k % every == 0 for k in range(NUM_STEPS)]


def test_a_trusted_probe_comes_from_its_own_file(found) -> None:
    (alone,) = found[1]
    assert all(tokens == {7} and max(ids) < NUM_TRUSTED for _, ids, tokens in alone[1, True])
    assert all(tokens == {3} for _, _, tokens in alone[1, False])
    # The main batches are what they are without it.
    assert [main for main, _, _ in alone[1, True]] == [main for main, _, _ in alone[1, False]]


def test_a_share_of_each_batch_is_trusted(monkeypatch) -> None:
    """With any method; ids of the pool's sequences follow those of the training data."""
    monkeypatch.setattr(layout, "rank", lambda axis, sequence_parallel=1: 0)
    recipe = step_runs.make_recipe(
        batch={"global_size": 8, "micro_batch_size_per_rank": 8},
        method={"name": "sft"},
        data={"train_path": "none", "probe_path": "none", "trusted_share": 0.25},
        model={"path": model_folder(), "precision": "fp32"},
        schedule={"num_epochs": 2},
    )
    feed = feed_of(recipe, 1, dataset(NUM_TRUSTED, token=7))
    assert derive_schedule(recipe, NUM_TRAINING).num_steps == 7  # 40 of the training data, 6 a step
    assert feed.first_trusted_id == NUM_TRAINING
    seen: Counter[int] = Counter()
    for k in range(10):
        (batch,) = feed.step(k).main
        for i, row in zip(batch.sequence_ids, batch.input_ids, strict=True):
            is_trusted = i >= NUM_TRAINING
            assert int(row[0]) == (7 if is_trusted else 3)
            assert int((row != 0).sum()) == 4 + (i - NUM_TRAINING if is_trusted else i)
        seen.update(batch.sequence_ids)
        assert sum(i >= NUM_TRAINING for i in batch.sequence_ids) == 2
    assert {seen[i] for i in range(NUM_TRAINING)} == {3}  # 60 of them
    assert set(seen) == set(range(NUM_TRAINING + NUM_TRUSTED))
    assert feed.epoch(10) == 3.0


def test_ids_stay_different_where_a_store_has_dropped_rows() -> None:
    def store(*ids: int) -> Sequences:
        return Sequences(
            replace(sequence, sequence_id=i) for i, sequence in zip(ids, dataset(len(ids), 3), strict=True)
        )

    joined = JoinedDataset([store(4, 11, 7), store(0, 4, 8)])
    assert [sequence.sequence_id for sequence in joined[:]] == [4, 11, 7, 12, 16, 20]
    assert joined.first_ids == [0, 12]


def test_the_whole_pool_is_a_probe_batch_and_sft_draws_none(monkeypatch) -> None:
    monkeypatch.setattr(layout, "rank", lambda axis, sequence_parallel=1: 0)
    for method, size in (({"kl_budget": 0.1}, NUM_TRUSTED), ({"name": "sft"}, 0)):
        recipe = step_runs.make_recipe(
            method=method,
            probe={"batch_size": "all"},
            data={"train_path": "none", "probe_path": "none"},
            model={"path": model_folder(), "precision": "fp32"},
        )
        feed = feed_of(recipe, 1, dataset(NUM_TRUSTED, token=7))
        assert feed.first_trusted_id is None
        for k in (0, 1):
            assert sorted(i for batch in feed.step(k).probe for i in batch.sequence_ids) == list(range(size))
        assert ("probe the whole pool" in feed.plan.describe()) == bool(size)


@pytest.mark.parametrize("pack_tokens_per_rank", [None, 64])
@pytest.mark.parametrize(("main_degree", "probe_degree"), [("auto", "auto"), (1, 2), (2, 1), (2, 2)])
def test_the_same_batches_in_the_same_order_at_1_2_4_and_8_ranks(
    monkeypatch, pack_tokens_per_rank: int | None, main_degree, probe_degree
) -> None:
    """The feed of each rank, one after the other in this process: nothing of it is a collective."""

    def recipe(num_ranks: int) -> Recipe:
        degrees = (main_degree, probe_degree) if num_ranks > 1 else ("auto", "auto")
        return step_runs.make_recipe(
            batch={"global_size": 8, "pack_tokens_per_rank": pack_tokens_per_rank, "sequence_parallel": degrees[0]},
            probe={"batch_size": 4, "sequence_parallel": degrees[1]},
            data={"train_path": "none", "cutoff_length": 64},
            model={"path": model_folder(), "precision": "fp32"},
        )

    def rank_of(rank: int, axis: str, sequence_parallel: int = 1) -> int:
        return {"data": rank // sequence_parallel, "shards": rank}[axis]

    def steps(num_ranks: int) -> list[tuple]:
        of_ranks = []
        for rank in range(num_ranks):
            monkeypatch.setattr(layout, "rank", partial(rank_of, rank))
            feed = feed_of(recipe(num_ranks), num_ranks)
            of_ranks.append([feed.step(k) for k in range(NUM_STEPS)])
        found = []
        for batches in zip(*of_ranks, strict=True):
            counts = []
            for part in ("main", "probe"):
                of_part = [getattr(of_rank, part) for of_rank in batches]
                assert len({len(own) for own in of_part}) == 1  # as many micro-batches
                (degree,) = {batch.sequence_parallel for own in of_part for batch in own}
                wanted = {"main": main_degree, "probe": probe_degree}[part]
                assert degree == wanted or wanted == "auto" or num_ranks == 1
                key = {"main": "sequence_parallel", "probe": "probe_sequence_parallel"}[part]
                assert all(of_rank.measured[key] == degree for of_rank in batches)
                groups = [of_part[start : start + degree] for start in range(0, num_ranks, degree)]
                for group in groups:  # the ranks that share a row hold the same
                    pairs = [pair for own in group for pair in zip(own, group[0], strict=True)]
                    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in pairs)
                    assert all(batch.input_ids.shape[1] % (8 * degree) == 0 for own in group for batch in own)
                counts.append(Counter(i for group in groups for batch in group[0] for i in batch.sequence_ids))
            found.append(tuple(counts))
        return found

    alone = steps(1)
    assert all(main.total() == 8 and probe.total() == 4 for main, probe in alone)
    assert len({frozenset(main.items()) for main, _ in alone}) > 1
    assert steps(2) == steps(4) == steps(8) == alone


def test_how_the_next_steps_use_the_ranks(monkeypatch) -> None:
    monkeypatch.setattr(layout, "rank", lambda axis, sequence_parallel=1: 0)
    recipe = step_runs.make_recipe(
        batch={"global_size": 2, "sequence_parallel": 1},
        probe={"batch_size": 4, "every": 4},
        model={"path": model_folder(), "precision": "fp32"},
    )
    feed = feed_of(recipe, 4)
    found = feed.utilization(1, 10)  # steps 1 to 9, with a probe in 4 and 8
    assert (found["main"].waste.num_passes, found["probe"].waste.num_passes) == (9, 2)
    assert found["main"].is_low and found["main"].waste.mean_idle_ranks == 2
    assert feed.utilization(1, 4).keys() == {"main"}
    assert feed.utilization(10, 10)["main"].waste.num_passes == 1  # a run that is resumed after its last step
    assert feed.step(1).measured["probe_sequence_parallel"] is None
    assert feed.step(4).measured["probe_rank_imbalance"] >= 1.0
