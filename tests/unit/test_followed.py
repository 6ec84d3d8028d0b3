"""Followed traces: which they are, what a file holds, and files that are damaged."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.recipes import smallest_recipe
from vcore_ds.common.errors import UserError
from vcore_ds.config.schema import Recipe
from vcore_ds.data.batches import pack
from vcore_ds.data.dataset import Dataset
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.training.followed import choose_traces, split_traces
from vcore_ds.training.token_records import (
    MOST_TOKENS,
    FollowedRecord,
    Origin,
    TraceTokens,
    max_tokens_per_trace,
    read_all_followed,
    read_followed,
    write_followed,
)


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
    assert [origin.is_held_out for origin in origins] == [True] * 8 + [False] * 8
    ids = [origin.sequence_id for origin in origins]
    assert len(set(ids)) == 16 and all(i % 3 != 2 for i in ids[8:]) and all((i - 100) % 3 != 2 for i in ids[:8])
    assert origins == choose_origins(make_recipe(), 60, main=60)
    assert origins != choose_origins(make_recipe(run={"seed": 7}), 60, main=60)
    fewer = choose_origins(make_recipe(run={"num_followed_traces": 6}), 60, main=60)
    assert fewer == origins[:3] + origins[8:11]  # of the same order


def test_held_out_sets_take_turns_and_training_data_fills_up() -> None:
    origins = choose_origins(make_recipe(run={"num_followed_traces": 9}), 60, right=60, wrong=60, tiny=1)
    assert [origin.set_name for origin in origins] == ["right", "wrong", "tiny", "right", *[""] * 5]
    assert [origin.source for origin in origins[2:5]] == ["held out, tiny", "held out, right", "training data"]
    few = choose_origins(make_recipe(run={"num_followed_traces": 9}), 60, tiny=1)
    assert [origin.is_held_out for origin in few] == [True] + [False] * 8
    assert [origin.is_held_out for origin in choose_origins(make_recipe(), 60)] == [False] * 16
    assert len(choose_origins(make_recipe(), 3, main=3)) == 4  # all that have supervised tokens
    assert Origin(True, "", 3).source == "held out"


def test_nothing_is_followed_without_traces_or_without_records() -> None:
    assert choose_origins(make_recipe(run={"num_followed_traces": 0}), 60, main=60) == []
    assert choose_origins(make_recipe(run={"num_token_records": 0}), 60, main=60) == []


def test_held_out_traces_have_what_the_weights_of_the_method_need() -> None:
    random = make_recipe(method={"name": "random", "kl_budget": None})
    chosen = choose_traces(random.run, random.data, random.method, make_dataset(60), {"": make_dataset(60)})
    assert all(sequence.kept is not None for origin, sequence in chosen if origin.is_held_out)
    add_reference = make_recipe(
        method={"name": "iw_sft", "kl_budget": None}, data={"reference_log_probabilities": "reference.npz"}
    )
    assert not any(origin.is_held_out for origin in choose_origins(add_reference, 60, main=60))


def make_trace(n: int, *, num_supervised: int | None = None, utilities: bool = True) -> TraceTokens:
    random = np.random.default_rng(n)
    losses, entropies, utility_values, weights = (random.exponential(size=n).astype(np.float32) for _ in range(4))
    ids, places = random.integers(0, 50, n, dtype=np.int32), np.arange(2, 2 + n, dtype=np.int32)
    return TraceTokens(
        num_supervised or n,
        positions=places,
        token_ids=ids,
        losses=losses,
        entropies=entropies,
        utilities=utility_values if utilities else None,
        weights=weights,
    )


ORIGINS = [Origin(True, "correct", 7), Origin(False, "", 3)]


@pytest.mark.parametrize("utilities", [True, False])
def test_written_traces_are_read_back(tmp_path: Path, utilities: bool) -> None:
    traces = [make_trace(5, num_supervised=9, utilities=utilities), make_trace(1, utilities=utilities)]
    path = write_followed(tmp_path, FollowedRecord(12, ORIGINS, traces))
    assert path == tmp_path / "tokens" / "followed_00000012.npz"
    again = read_followed(path)
    assert (again.step, again.origins) == (12, ORIGINS)
    for trace_read, expected in zip(again.traces, traces, strict=True):
        for name in (field.name for field in fields(TraceTokens)):
            np.testing.assert_array_equal(getattr(trace_read, name), getattr(expected, name))
        assert (trace_read.utilities is not None) == utilities
    content = path.read_bytes()
    write_followed(tmp_path, FollowedRecord(12, ORIGINS, traces))
    assert path.read_bytes() == content  # a resumed run writes the same file
    write_followed(tmp_path, FollowedRecord(3, ORIGINS, traces))
    assert [record.step for record in read_all_followed(tmp_path)] == [3, 12]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = write_followed(tmp_path, FollowedRecord(1, ORIGINS, [make_trace(300), make_trace(200)]))
    content = path.read_bytes()
    for damaged in (b"", b"no archive", content[: len(content) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{path}: is damaged: .*; expected followed traces .* Remove it"):
            read_all_followed(tmp_path)
    np.savez(path.open("wb"), format=np.array(2))
    with pytest.raises(UserError, match=r"found format 2; expected 1"):
        read_followed(path)
    path.write_bytes(content)
    with np.load(path) as stored:
        arrays = dict(stored)
    for name, changed in (
        ("entropies", arrays["entropies"][1:]),
        ("num_tokens", arrays["num_tokens"][:1]),
        ("sequence_ids", arrays["sequence_ids"][:1]),
    ):
        np.savez(path.open("wb"), **arrays | {name: changed})
        with pytest.raises(UserError, match="is damaged"):
            read_followed(path)
    for name in ("positions", "token_ids", "losses", "entropies", "weights"):
        np.savez(path.open("wb"), **{key: array for key, array in arrays.items() if key != name})
        with pytest.raises(UserError, match=f"is damaged: '{name}'"):
            read_followed(path)


def test_a_long_trace_is_cut_and_keeps_its_weights() -> None:
    full = make_trace(10)
    cut = full.truncate(4)
    assert len(cut) == 4 and cut.num_supervised_tokens == 10
    for name in ("positions", "token_ids", "losses", "entropies", "utilities", "weights"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(full, name)[:4])
    assert cut.relative_weights.tolist() == pytest.approx((10 * full.weights[:4].astype(float)).tolist())
    assert len(full.truncate(99)) == 10
    assert max_tokens_per_trace(16) * 16 == MOST_TOKENS and max_tokens_per_trace(1) == MOST_TOKENS
    assert cut.probabilities.tolist() == pytest.approx(np.exp(-cut.losses).tolist())
    assert cut.is_finite and not replace(cut, entropies=cut.entropies * np.float32("nan")).is_finite


def test_the_traces_of_a_packed_micro_batch_by_hand() -> None:
    made = [
        TokenizedSequence(4, np.array([1, 2, 3, 4], dtype=np.int32), np.array([False, True, False, True])),
        TokenizedSequence(1, np.array([5, 6], dtype=np.int32), np.array([False, True])),
    ]
    losses, entropies, weights = torch.tensor([[0.1, 0.2, 0.3], [1, 2, 3], [0.5, 0.5, 1]]).unbind()
    traces = split_traces(pack([made], 0), losses, entropies, None, weights)
    assert sorted(traces) == [1, 4] and traces[4].num_supervised_tokens == 2 and traces[1].utilities is None
    assert traces[4].positions.tolist() == [1, 3] and traces[4].token_ids.tolist() == [2, 4]
    assert traces[1].positions.tolist() == [1] and traces[1].token_ids.tolist() == [6]
    assert traces[4].entropies.tolist() == [1, 2] and traces[1].entropies.tolist() == [3]
    assert traces[4].relative_weights.tolist() == [1, 1] and traces[1].losses.tolist() == pytest.approx([0.3])
