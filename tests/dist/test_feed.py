"""From a step number to micro-batches: where the probe comes from, how often, and the same at any number of ranks."""

import tempfile
from collections import Counter
from functools import lru_cache

import numpy as np
import pytest

from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.config import plan_batch
from vcore_ds.data import TokenizedSequence
from vcore_ds.distributed import layout
from vcore_ds.feed import build_feed
from vcore_ds.planning import QWEN3_32B

pytestmark = pytest.mark.dist

NUM_TRAINING, NUM_TRUSTED, NUM_STEPS = 20, 5, 6


class Tokenizer:
    pad_token_id = 0


class Sequences(list):
    """A token store as the feed sees it."""

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


def ids_by_step(probe_every: int, trusted: bool) -> list[tuple[list[int], list[int], set[int]]]:
    """This rank's sequence ids in the main and the probe batch, and the tokens of the probe."""
    recipe = step_runs.recipe(
        batch={"global_size": 4},
        probe={"batch_size": 2, "every": probe_every},
        method={"kl_budget": 0.1},
        model={"path": model_folder(), "precision": "fp32"},
    )
    plan = plan_batch(recipe, layout.size("shards"), QWEN3_32B)
    probe_dataset = dataset(NUM_TRUSTED, token=7) if trusted else None
    feed = build_feed(recipe, plan, dataset(NUM_TRAINING, token=3), Tokenizer(), probe_dataset)
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


@pytest.mark.parametrize("packed_row_tokens", [None, 64])
def test_the_same_batches_in_the_same_order_at_1_2_4_and_8_ranks(monkeypatch, packed_row_tokens: int | None) -> None:
    """The feed of each rank, one after the other in this process: nothing of it is a collective."""
    recipe = step_runs.recipe(
        batch={"global_size": 8, "packed_row_tokens": packed_row_tokens},
        probe={"batch_size": 4, "round_up": False},  # else 8 ranks draw 8
        data={"train_path": "none", "cutoff_length": 64},
        model={"path": model_folder(), "precision": "fp32"},
    )

    def steps(num_ranks: int) -> list[tuple]:
        of_ranks = []
        for rank in range(num_ranks):
            monkeypatch.setattr(layout, "rank", lambda axis, rank=rank: rank)
            feed = build_feed(recipe, plan_batch(recipe, num_ranks, QWEN3_32B), dataset(NUM_TRAINING, token=3), Tokenizer())
            of_ranks.append([feed.step(k) for k in range(NUM_STEPS)])
        found = []
        for batches in zip(*of_ranks, strict=True):
            for part in ("main", "probe"):
                assert len({len(getattr(of_rank, part)) for of_rank in batches}) == 1  # as many micro-batches
            main, probe = (
                Counter(i for of_rank in batches for batch in getattr(of_rank, part) for i in batch.sequence_ids)
                for part in ("main", "probe")
            )
            found.append((main, probe))
        return found

    alone = steps(1)
    assert all(main.total() == 8 and probe.total() == 4 for main, probe in alone)
    assert len({frozenset(main.items()) for main, _ in alone}) > 1
    assert steps(2) == steps(4) == steps(8) == alone
