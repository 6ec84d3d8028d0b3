"""Utilities of all tokens to a Parquet file, weights made of them, and their way into a batch."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.helpers.tokenizer import make_tokenizer
from tests.unit.test_score import DESCRIPTION
from tests.unit.test_store import make_sequences
from vcore_ds.commands.cli import main
from vcore_ds.commands.score.output import ScoredSequence, ScoringPass, write_results
from vcore_ds.common.errors import UserError
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.data import scores_folder
from vcore_ds.data.batches import IGNORED_LABEL, pack
from vcore_ds.data.dataset import ChangedDataset
from vcore_ds.data.scores_folder import ScoredCheckpoint, TokenWeights
from vcore_ds.data.store import TokenStore, write_store
from vcore_ds.training.weighting import token_weights

NUM_SEQUENCES = 50
BUDGET = 0.02


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    write_store(tmp_path / "store", make_sequences(NUM_SEQUENCES, 256), make_tokenizer())
    make_tokenizer().save_pretrained(tmp_path / "model")  # which the page reads tokens with
    return TokenStore(tmp_path / "store")


@pytest.fixture
def utilities(store: TokenStore) -> list[np.ndarray]:
    """fp64, of each sequence, summed over two checkpoints."""
    random = np.random.default_rng(0)
    return [random.normal(size=(2, int(n))).astype(np.float32) * 10 for n in store.num_supervised_tokens]


@pytest.fixture
def scores(tmp_path: Path, store: TokenStore, utilities: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scores of two checkpoints with weights 0.25 and 2, in parts that are not in the store's order."""
    monkeypatch.setattr(scores_folder, "ROW_GROUP_TOKENS", 200)
    work, passes = tmp_path / "scores.unfinished", []
    work.mkdir()
    for number, weight in enumerate((0.25, 2.0)):
        passes.append(ScoringPass(work / str(number), "good", ScoredCheckpoint("run", number, weight)))
        passes[-1].write_set(1.0, 1.0)
        sequences = [ScoredSequence(i, np.ones(len(u[number]), np.float32), u[number]) for i, u in enumerate(utilities)]
        for part in (sequences[30:], sequences[:30]):
            passes[-1].add(part)
    manifest = store.manifest["tokenizer"]
    data = replace(
        DESCRIPTION.data,
        digest=store.digest,
        num_sequences=NUM_SEQUENCES,
        tokenizer_hash=manifest["hash"],
        chat_template_hash=manifest["chat_template_hash"],
    )
    description = replace(DESCRIPTION, data=data, model=str(tmp_path / "model"))
    sets = {"good": ("good.jsonl", store)}
    write_results(work, tmp_path / "scores", store, sets, passes, description, all_tokens=True)
    return tmp_path / "scores"


def keep(scores: Path, output: Path, *words: str) -> int:
    return main(["keep", str(scores), "--output", str(output), *words])


@pytest.fixture
def weights(scores: Path, tmp_path: Path) -> Path:
    assert keep(scores, tmp_path / "weights.parquet", "--weights", f"kl_budget={BUDGET}") == 0
    return tmp_path / "weights.parquet"


def test_every_token_has_its_utility(scores: Path, store: TokenStore, utilities: list[np.ndarray]) -> None:
    table = pq.read_table(scores / "utilities.parquet").to_pylist()
    assert pq.ParquetFile(scores / "utilities.parquet").num_row_groups > 3
    assert [row["sequence"] for row in table] == list(range(NUM_SEQUENCES))
    for row, sequence, (first, second) in zip(table, store, utilities, strict=True):
        assert row["input_ids"] == sequence.input_ids.tolist() and row["supervised"] == sequence.supervised.tolist()
        exact = 0.25 * first.astype(np.float64) + 2.0 * second
        assert row["utilities.good"] == pytest.approx(exact, rel=2**-12)


def test_row_groups_end_where_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores_folder, "ROW_GROUP_TOKENS", 10)
    parts = [list(rows) for rows in scores_folder.split_rows(np.array([4, 6, 9, 1, 30, 2]))]
    assert parts == [[0, 1], [2, 3], [4], [5]]


def test_a_value_keeps_twelve_significant_bits() -> None:
    values = np.random.default_rng(1).normal(size=10_000).astype(np.float32) * np.float32(10) ** np.arange(
        -8, 8, 0.0016
    )
    rounded = scores_folder.round_to_12_bits(values)
    assert np.abs(rounded / values - 1).max() <= 2**-12
    assert not (rounded.view(np.uint32) & 0xFFF).any()
    assert np.array_equal(scores_folder.round_to_12_bits(np.array([0.0, 1.0, -2.5], np.float32)), [0.0, 1.0, -2.5])


def test_a_token_takes_few_bytes(tmp_path: Path) -> None:
    """100,000 tokens of 200 traces, three quarters supervised; utilities over many orders of magnitude."""
    random, num_tokens = np.random.default_rng(2), 500
    offsets = np.arange(201) * num_tokens
    values = (random.normal(size=200 * num_tokens) * np.exp(3 * random.normal(size=200 * num_tokens))).astype(
        np.float32
    )
    sizes = {}
    for name, array in (
        ("utilities", scores_folder.round_to_12_bits(values)),
        ("weights", np.exp(0.1 * random.normal(size=len(values))).astype(np.float16)),
    ):
        rows = scores_folder.TokenRows(np.arange(200), {name: offsets}, {name: array})
        scores_folder.write_token_table(tmp_path / name, [rows], {})
        sizes[name] = (tmp_path / name).stat().st_size / len(values)
        (back,) = scores_folder.read_token_rows(tmp_path / name, [name], "")
        assert np.array_equal(back.values[name], array) and np.array_equal(back.offsets[name], offsets)
    print(f"bytes of a token: {sizes}")
    assert sizes["utilities"] < 2.6 and sizes["weights"] < 2.1


def test_weights_are_those_of_the_budget(weights: Path, store: TokenStore, utilities: list[np.ndarray]) -> None:
    schema = pq.read_schema(weights)
    types = {"sequence": pa.int64(), "input_ids": pa.int32(), "labels": pa.int32(), "loss_weights": pa.float16()}
    assert schema.names == list(types) and all(
        (field.type if name == "sequence" else field.type.value_type) == types[name]
        for name, field in zip(schema.names, schema, strict=True)
    )
    for row, sequence, (first, second) in zip(pq.read_table(weights).to_pylist(), store, utilities, strict=True):
        labels = np.where(sequence.supervised, sequence.input_ids, -100)
        assert row["input_ids"] == sequence.input_ids.tolist() and row["labels"] == labels.tolist()
        relative, s = np.array(row["loss_weights"], np.float64), 0.25 * first.astype(np.float64) + 2.0 * second
        assert (relative[labels == -100] == 0).all()
        q = relative[labels != -100] / len(s)
        assert q.sum() == pytest.approx(1, abs=1e-3)
        if len(s) > 1:
            assert (q * np.log(q * len(s))).sum() == pytest.approx(BUDGET, abs=1e-3)
            tilt = np.polyfit(s, np.log(q), 1)  # a Gibbs distribution: log q is linear in the utility
            assert np.log(q) == pytest.approx(np.polyval(tilt, s), abs=2e-3) and tilt[0] > 0


def test_weights_reach_a_batch_and_the_step(weights: Path, store: TokenStore) -> None:
    stored = TokenWeights(weights, store)
    stored.check_has(np.arange(NUM_SEQUENCES))
    dataset = ChangedDataset(store, stored.add_to, stored.digest)
    assert dataset.digest != store.digest
    rows = pq.read_table(weights).to_pylist()
    batch = pack([[dataset[3], dataset[45]], [dataset[1]]], 0)  # of several row groups
    tokens = batch.tokens(torch.zeros(int((batch.labels != IGNORED_LABEL).sum())))
    expected = [[w for w, label in zip(rows[i]["loss_weights"], rows[i]["labels"], strict=True) if label != -100]
                for i in (3, 45, 1)]  # fmt: skip
    step_weights = token_weights(MethodConfig(name="stored"), tokens).weights
    assert step_weights.tolist() == pytest.approx([w / len(part) for part in expected for w in part], rel=1e-6)


def test_weights_of_a_selection_cover_only_its_traces(
    scores: Path, tmp_path: Path, store: TokenStore, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "top.parquet"
    assert keep(scores, output, "--weights", "temperature=0.1", "--top", "0.2") == 0
    positions = np.array(pq.read_table(output).column("sequence"))
    assert len(positions) == 10 and "10 of 50 traces kept" in capsys.readouterr().out
    stored = TokenWeights(output, store)
    stored.check_has(positions)
    with pytest.raises(UserError, match=r"found no weights for 40 of 50 training traces, first for .* position"):
        stored.check_has(np.arange(NUM_SEQUENCES))


Change = Callable[[pa.Table], pa.Table]


def replace_weight(value: float | None) -> Change:
    def change(table: pa.Table) -> pa.Table:
        lists = table.column("loss_weights").to_pylist()
        lists[4][-1] = value
        return table.set_column(3, "loss_weights", pa.array(lists, pa.list_(pa.float16())))

    return change


def drop_all_weights_of_a_trace(table: pa.Table) -> pa.Table:
    lists = table.column("loss_weights").to_pylist()
    return table.set_column(3, "loss_weights", pa.array([None, *lists[1:]], pa.list_(pa.float16())))


def move_a_row(table: pa.Table) -> pa.Table:
    return table.set_column(0, "sequence", pa.array([*range(NUM_SEQUENCES - 1), 10**6]))


def drop_a_weight(table: pa.Table) -> pa.Table:
    lists = table.column("loss_weights").to_pylist()
    return table.set_column(3, "loss_weights", pa.array([lists[0][1:], *lists[1:]], pa.list_(pa.float16())))


def change_manifest_hash(key: str) -> Change:
    def change(table: pa.Table) -> pa.Table:
        entry = table.schema.metadata[b"vcore_ds"].decode()
        start = entry.index(f'"{key}": "') + len(key) + 5
        return table.replace_schema_metadata({b"vcore_ds": entry[:start] + "0000" + entry[start + 4 :]})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_weight(math.nan), "negative, inf or NaN for the trace at position 4"),
        (replace_weight(math.inf), "negative, inf or NaN for the trace at position 4"),
        (replace_weight(-0.5), "negative, inf or NaN for the trace at position 4"),
        (replace_weight(None), "found missing values in column loss_weights"),
        (drop_all_weights_of_a_trace, "found missing values in column loss_weights"),
        (move_a_row, "found another number of tokens for the trace at position 1000000"),
        (drop_a_weight, "found another number of tokens for the trace at position 0"),
        (change_manifest_hash("tokenizer"), "found weights for another tokenizer"),
        (change_manifest_hash("chat_template"), "found weights for another chat template"),
        (change_manifest_hash("digest"), "found weights for other tokens"),
        (lambda table: table.drop_columns("loss_weights"), "found no column loss_weights"),
        (lambda table: table.set_column(3, "loss_weights", table["sequence"]), "found int64 in column loss_weights"),
        (lambda table: table.replace_schema_metadata(None), "without our metadata"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(
    weights: Path, store: TokenStore, change: Change, message: str, tmp_path: Path
) -> None:
    pq.write_table(change(pq.read_table(weights)), tmp_path / "changed.parquet")
    with pytest.raises(UserError, match=message):
        TokenWeights(tmp_path / "changed.parquet", store)


def test_missing_and_damaged_files_are_refused(store: TokenStore, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.token_weights: .*none.parquet: "):
        TokenWeights(tmp_path / "none.parquet", store)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"bad.parquet: "):
        TokenWeights(tmp_path / "bad.parquet", store)


def test_invalid_arguments_of_keep_are_refused(
    scores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "refused.parquet"

    def message(*words: str, output: Path = output) -> str:
        assert keep(scores, output, *words) == 2 and not output.exists()
        return capsys.readouterr().err

    assert "--weights: found kl_budget=-1; expected kl_budget=NUMBER" in message("--weights", "kl_budget=-1")
    assert "--weights: found 0.005; expected kl_budget=NUMBER" in message("--weights", "0.005")
    assert "--top: found none of --top, --above and --weights" in message()
    assert "expected a .parquet file" in message("--weights", "kl_budget=0.1", output=tmp_path / "refused.jsonl")
    (scores / "utilities.parquet").unlink()
    assert "found no utilities.parquet; expected" in message("--weights", "kl_budget=0.1")
