"""Followed traces: which they are, and what a file holds."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.recipes import smallest_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.data.batches import pack
from vcore_ds.data.dataset import Dataset
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.training.followed import Origin, choose_traces, split_traces
from vcore_ds.training.token_records import SequenceTokens, TokenRecord, read_records, write_record


def make_recipe(**sections: dict[str, Any]) -> Recipe:
    made = smallest_recipe()
    for section, values in sections.items():
        made[section] = made.get(section, {}) | values
    return Recipe.model_validate(made)


def make_dataset(num_sequences: int, first_id: int = 0) -> Dataset:
    """Every third sequence has no supervised token."""
    sequences = []
    for i in range(num_sequences):
        supervised = np.array([True, False, i % 3 != 2, i % 3 != 2])
        ids = np.full(4, i, dtype=np.int32)
        sequences.append(TokenizedSequence(first_id + i, ids, supervised, in_answer=np.zeros(4, dtype=np.bool_)))
    return sequences  # type: ignore[return-value]  # nothing but positions is asked for


def choose_origins(made: Recipe, num_training: int, **held_out: int) -> list[Origin]:
    sets = {name: make_dataset(size, first_id=100) for name, size in held_out.items()}
    chosen = choose_traces(made.run, made.data, made.method, make_dataset(num_training), sets)
    return [origin for origin, _ in chosen]


def test_half_of_the_traces_are_held_out() -> None:
    origins = choose_origins(make_recipe(), 60, main=60)
    assert [source for source, _ in origins] == ["held out, main"] * 8 + ["training data"] * 8
    ids = [sequence_id for _, sequence_id in origins]
    assert len(set(ids)) == 16 and all(i % 3 != 2 for i in ids[8:]) and all((i - 100) % 3 != 2 for i in ids[:8])
    assert origins == choose_origins(make_recipe(), 60, main=60)
    assert origins != choose_origins(make_recipe(run={"seed": 7}), 60, main=60)
    fewer = choose_origins(make_recipe(run={"num_followed_traces": 6}), 60, main=60)
    assert fewer == origins[:3] + origins[8:11]  # of the same order


def test_held_out_sets_take_turns_and_training_data_fills_up() -> None:
    origins = choose_origins(make_recipe(run={"num_followed_traces": 9}), 60, right=60, wrong=60, tiny=1)
    held_out = [f"held out, {name}" for name in ("right", "wrong", "tiny", "right")]
    assert [source for source, _ in origins] == [*held_out, *["training data"] * 5]
    few = choose_origins(make_recipe(run={"num_followed_traces": 9}), 60, tiny=1)
    assert [source for source, _ in few] == ["held out, tiny", *["training data"] * 8]
    assert [source for source, _ in choose_origins(make_recipe(), 60)] == ["training data"] * 16
    assert len(choose_origins(make_recipe(), 3, main=3)) == 4  # all that have supervised tokens
    assert choose_origins(make_recipe(), 3, **{"": 3})[0][0] == "held out"


def test_nothing_is_followed_without_traces_or_without_records() -> None:
    assert choose_origins(make_recipe(run={"num_followed_traces": 0}), 60, main=60) == []
    assert choose_origins(make_recipe(run={"num_token_records": 0}), 60, main=60) == []


def test_held_out_traces_have_what_the_weights_of_the_method_need() -> None:
    random = make_recipe(method={"name": "random", "kl_budget": None})
    chosen = choose_traces(random.run, random.data, random.method, make_dataset(60), {"": make_dataset(60)})
    held_out = [sequence for (source, _), sequence in chosen if source == "held out"]
    assert len(held_out) == 8 and all(sequence.kept is not None for sequence in held_out)
    add_reference = make_recipe(
        method={"name": "iw_sft", "kl_budget": None}, data={"reference_log_probabilities": "reference.npz"}
    )
    assert {source for source, _ in choose_origins(add_reference, 60, main=60)} == {"training data"}


def make_trace(n: int, *, num_supervised: int | None = None, utilities: bool = True) -> SequenceTokens:
    random = np.random.default_rng(n)
    losses, entropies, utility_values, weights = (random.exponential(size=n).astype(np.float32) for _ in range(4))
    return SequenceTokens(
        n,
        1.0,
        1.0,
        1.0,
        positions=np.arange(2, 2 + n, dtype=np.int32),
        token_ids=random.integers(0, 50, n, dtype=np.int32),
        losses=losses,
        entropies=entropies,
        utilities=utility_values if utilities else None,
        weights=weights,
        source="held out, correct",
        num_supervised_tokens=num_supervised or n,
    )


@pytest.mark.parametrize("utilities", [True, False])
def test_written_traces_are_read_back(tmp_path: Path, utilities: bool) -> None:
    """In the format of other records, whose damaged files `test_token_records.py` reads."""
    traces = [make_trace(5, num_supervised=9, utilities=utilities), make_trace(1, utilities=utilities)]
    path = write_record(tmp_path, TokenRecord(12, None, 2, 10, traces), "followed")
    assert path == tmp_path / "tokens" / "followed_00000012.npz"
    assert read_records(tmp_path) == []
    (again,) = read_records(tmp_path, "followed")
    assert (again.step, again.num_sequences_global, again.num_supervised_tokens_global) == (12, 2, 10)
    for trace_read, expected in zip(again.sequences, traces, strict=True):
        for name in (field.name for field in fields(SequenceTokens)):
            np.testing.assert_array_equal(getattr(trace_read, name), getattr(expected, name))
        assert (trace_read.utilities is not None) == utilities and trace_read.is_held_out


def test_a_long_trace_is_cut_and_keeps_its_weights() -> None:
    full = make_trace(10)
    cut = full.truncate(4)
    assert len(cut) == 4 and cut.num_supervised_tokens == 10
    for name in ("positions", "token_ids", "losses", "entropies", "utilities", "weights"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(full, name)[:4])
    assert cut.relative_weights.tolist() == pytest.approx((10 * full.weights[:4].astype(float)).tolist())
    assert len(full.truncate(99)) == 10
    assert cut.is_finite and not replace(cut, entropies=cut.entropies * np.float32("nan")).is_finite


def test_the_traces_of_a_packed_micro_batch_by_hand() -> None:
    made = [
        TokenizedSequence(4, np.array([1, 2, 3, 4], dtype=np.int32), np.array([False, True, False, True])),
        TokenizedSequence(1, np.array([5, 6], dtype=np.int32), np.array([False, True])),
    ]
    origins = [("training data", 10 * i) for i in range(5)]
    losses, entropies, weights = torch.tensor([[0.1, 0.2, 0.3], [1, 2, 3], [0.5, 0.5, 1]]).unbind()
    traces = split_traces(pack([made], 0), origins, losses, entropies, None, weights)
    assert sorted(traces) == [1, 4] and traces[4].num_supervised_tokens == 2 and traces[1].utilities is None
    assert traces[4].sequence_id == 40 and not traces[4].is_held_out
    assert traces[4].positions.tolist() == [1, 3] and traces[4].token_ids.tolist() == [2, 4]
    assert traces[1].positions.tolist() == [1] and traces[1].token_ids.tolist() == [6]
    assert traces[4].entropies.tolist() == [1, 2] and traces[1].entropies.tolist() == [3]
    assert traces[4].relative_weights.tolist() == [1, 1] and traces[1].losses.tolist() == pytest.approx([0.3])
