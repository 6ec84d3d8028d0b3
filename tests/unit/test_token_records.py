"""Records of tokens: at which steps, what a file holds, which sequences and followed traces, and damaged files."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.recipes import smallest_recipe
from tests.unit.test_feed import Sequences
from vcore_ds.common.errors import UserError
from vcore_ds.common.random_streams import Stream, generator
from vcore_ds.config.schema import Recipe
from vcore_ds.data.batches import Batch, collate, idle_batch, pack
from vcore_ds.data.dataset import Dataset
from vcore_ds.data.tokenization import TokenizedSequence
from vcore_ds.method.weights import GibbsWeights, Tokens
from vcore_ds.training.followed import Origin, choose_traces, split_traces
from vcore_ds.training.step_metrics import MicroBatchResult, choose_sequences, split_into_sequences
from vcore_ds.training.token_records import (
    Kind,
    SequenceTokens,
    TokenRecord,
    read_record,
    read_records,
    record_steps,
    write_record,
)


def test_records_are_spread_evenly_on_a_log_scale() -> None:
    assert record_steps(1000, 4) == [1, 10, 100, 1000]
    assert record_steps(100, 12) == [1, 2, 3, 4, 5, 8, 12, 19, 28, 43, 66, 100]
    assert record_steps(5, 12) == [1, 2, 3, 4, 5]
    assert record_steps(7, 1) == [7] and record_steps(7, 0) == []


def test_the_requested_number_of_steps_is_recorded_with_the_first_and_the_last() -> None:
    for num_steps in range(1, 200):
        for num_records in range(2, 30):
            steps = record_steps(num_steps, num_records)
            assert len(set(steps)) == len(steps) == min(num_steps, num_records)
            assert steps == sorted(steps) and steps[-1] == num_steps and (steps[0] == 1)


def make_sequence(i: int, n: int, *, utilities: bool = True, **changes: Any) -> SequenceTokens:
    random = np.random.default_rng(i)
    losses, measured, weights, entropies = (random.exponential(size=n).astype(np.float32) for _ in range(4))
    tokens = SequenceTokens(
        i,
        0.5,
        0.25,
        0.9,
        positions=np.arange(2, 2 + n, dtype=np.int32),
        token_ids=random.integers(0, 50, n, dtype=np.int32),
        losses=losses,
        utilities=measured if utilities else None,
        weights=weights,
        prompt_ids=np.arange(i, dtype=np.int32),
    )
    return replace(tokens, **{"entropies": entropies} | changes if changes else {})


def make_trace(i: int, n: int, *, utilities: bool = True, num_supervised: int | None = None) -> SequenceTokens:
    changes = {"source": "held out, correct", "num_supervised_tokens": num_supervised or n}
    return make_sequence(i, n, utilities=utilities, share=1.0, uniform_share=1.0, alpha=1.0, **changes)


@pytest.mark.parametrize("kind", ["step", "followed"])
@pytest.mark.parametrize("utilities", [True, False])
@pytest.mark.parametrize("first_trusted_id", [None, 0, 4])
def test_written_records_are_read_back(
    tmp_path: Path, kind: Kind, utilities: bool, first_trusted_id: int | None
) -> None:
    sequences = [make_sequence(i, n, utilities=utilities) for i, n in ((3, 5), (4, 1))]
    if kind == "followed":
        sequences = [make_trace(3, 5, num_supervised=9, utilities=utilities), make_trace(4, 1, utilities=utilities)]
    record = TokenRecord(12, first_trusted_id, 40, 4000, sequences)
    path = write_record(tmp_path, record, kind)
    assert path == tmp_path / "tokens" / f"{kind}_00000012.npz"
    assert read_records(tmp_path, "step" if kind == "followed" else "followed") == []
    (again,) = read_records(tmp_path, kind)
    assert (again.step, again.first_trusted_id, again.num_sequences_global) == (12, first_trusted_id, 40)
    assert again.num_supervised_tokens_global == 4000 and again.num_tokens == 6
    for sequence_read, expected in zip(again.sequences, sequences, strict=True):
        for name in (field.name for field in fields(SequenceTokens)):
            np.testing.assert_array_equal(getattr(sequence_read, name), getattr(expected, name))
        assert (sequence_read.utilities is not None) == utilities and sequence_read.is_held_out == (kind == "followed")
    trusted = [again.is_trusted(item) for item in again.sequences]
    assert trusted == {None: [False, False], 0: [True, True], 4: [False, True]}[first_trusted_id]
    content = path.read_bytes()
    write_record(tmp_path, record, kind)
    assert path.read_bytes() == content  # a resumed run writes the same file
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_records_are_read_in_the_order_of_their_steps(tmp_path: Path) -> None:
    assert read_records(tmp_path) == []
    for step in (100, 9, 10):
        write_record(tmp_path, TokenRecord(step, None, 1, 3, [make_sequence(0, 3)]))
    (tmp_path / "tokens" / "step_00000011.npz.unfinished").write_bytes(b"half")  # of a run that was killed
    assert [record.step for record in read_records(tmp_path)] == [9, 10, 100]


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    path = write_record(tmp_path, TokenRecord(1, None, 1, 400, [make_sequence(0, 400)]))
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 0xFF
    for damaged in (b"", b"no archive", content[: len(content) // 2], bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{path}: "):
            read_records(tmp_path)
    np.savez(path.open("wb"), format=np.array(1), step=np.array(1))
    with pytest.raises(UserError, match="is damaged: .first_trusted_id"):
        read_record(path)
    path.write_bytes(content)
    with np.load(path) as stored:
        arrays = dict(stored)
    for name in ("positions", "token_ids", "losses", "weights", "prompt_ids"):
        np.savez(path.open("wb"), **{key: array for key, array in arrays.items() if key != name})
        with pytest.raises(UserError, match=f"is damaged: '{name}'"):
            read_record(path)
    np.savez(path.open("wb"), format=np.array(2))
    with pytest.raises(UserError, match=r"found format 2; expected 1"):
        read_record(path)
    np.save(path.open("wb"), np.zeros(3))
    with pytest.raises(UserError, match="is damaged"):
        read_record(path)
    np.savez(path.open("wb"), format=np.array([{}], dtype=object))  # would have to be unpickled
    with pytest.raises(UserError, match="is damaged"):
        read_record(path)


def test_a_relative_weight_is_1_where_the_weight_is_uniform() -> None:
    tokens = dict.fromkeys(("positions", "token_ids", "losses", "utilities"), np.zeros(4))
    weights = np.array([0.25, 0.5, 0.0, 0.25], np.float32)
    uniform_sequence = SequenceTokens(0, 0.25, 0.25, 0.3, **tokens, weights=weights)
    assert uniform_sequence.relative_weights.tolist() == [1.0, 2.0, 0.0, 1.0]
    batch_tokens = SequenceTokens(0, 0.375, 0.25, 0.3, **tokens, weights=weights)
    assert batch_tokens.relative_weights.tolist() == [1.5, 3.0, 0.0, 1.5]


def test_a_record_holds_complete_sequences_up_to_its_size() -> None:
    lengths = [10, 20, 30, 40, 50, 60]

    def choose_positions(most_tokens: int, step: int = 1) -> list[int]:
        return choose_sequences(lengths, generator(Stream.TOKEN_RECORDS, 42, step), most_tokens)

    assert sorted(choose_positions(210)) == [0, 1, 2, 3, 4, 5]
    assert len(choose_positions(1)) == 1  # longer than a record, but complete
    some = choose_positions(100)
    order = choose_positions(210)
    assert some == order[: len(some)] and sum(lengths[i] for i in some) <= 100
    assert sum(lengths[i] for i in order[: len(some) + 1]) > 100
    assert choose_positions(100) == some and any(choose_positions(100, step) != some for step in range(2, 6))
    assert choose_sequences([], generator(Stream.TOKEN_RECORDS, 42, 1), 100) == []


def make_result(batch: Batch, tokens: Tokens, weights: torch.Tensor, shares: torch.Tensor) -> MicroBatchResult:
    nothing = torch.zeros(tokens.num_sequences)
    q = GibbsWeights(weights, temperature=nothing, kl=nothing, saturated=nothing.bool())
    return MicroBatchResult(batch, tokens, q, shares, 1.0, nothing.sum(), nothing.sum())


@pytest.mark.parametrize("alpha", [0.5, torch.tensor(0.5), torch.tensor([0.5, 0.5])])
@pytest.mark.parametrize("packed", [False, True])
def test_the_tokens_of_a_micro_batch_by_hand(packed: bool, alpha: float | torch.Tensor) -> None:
    def make_tokenized(i: int, *ids: int, supervised: list[bool]) -> TokenizedSequence:
        return TokenizedSequence(i, np.array(ids, dtype=np.int32), np.array(supervised))

    made = [
        make_tokenized(7, 1, 2, 3, 4, supervised=[False, True, False, True]),
        make_tokenized(9, 5, 6, supervised=[False, True]),
    ]
    batch = pack([made], 0) if packed else collate(made, 0)
    tokens = batch.tokens(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 2.0, 3.0]))
    result = make_result(batch, tokens, torch.tensor([0.9, 0.1, 1.0]), torch.tensor([0.5, 0.25]))
    first, second = split_into_sequences(result, torch.tensor([0.75, 0.25]), alpha)
    assert (first.sequence_id, first.share, first.uniform_share, first.alpha) == (7, 0.5, 0.75, 0.5)
    assert (second.sequence_id, second.share, second.uniform_share, second.alpha) == (9, 0.25, 0.25, 0.5)
    assert first.positions.tolist() == [1, 3] and second.positions.tolist() == [1]
    assert first.token_ids.tolist() == [2, 4] and second.token_ids.tolist() == [6]
    assert first.losses.tolist() == pytest.approx([0.1, 0.2]) and second.losses.tolist() == pytest.approx([0.3])
    assert first.utilities.tolist() == [1.0, 2.0] and second.utilities.tolist() == [3.0]
    assert first.weights.tolist() == pytest.approx([0.9, 0.1]) and second.weights.tolist() == [1.0]
    assert first.prompt_ids.tolist() == [1] and second.prompt_ids.tolist() == [5]


def test_an_idle_batch_has_no_tokens_to_record() -> None:
    batch, nothing, shares = idle_batch(0), torch.zeros(0), torch.zeros(1)
    assert not list(split_into_sequences(make_result(batch, batch.tokens(nothing), nothing, shares), shares, 1.0))


def test_a_long_trace_is_cut_and_keeps_its_weights() -> None:
    full = make_trace(2, 10)
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


# Which traces are followed.


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
    return Sequences(sequences)  # type: ignore[return-value]  # nothing else is asked for


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
