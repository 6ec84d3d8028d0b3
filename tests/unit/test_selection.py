"""`data.keep`: selections by hand, refusals, and messages of a run."""

import json
import math
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.recipes import smallest_recipe, write_yaml
from tests.helpers.scores import write_scores_folder
from tests.helpers.setups import sums, write_conversations, write_model
from vcore_ds.commands.cli import main
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import compute_file_digest
from vcore_ds.config.data_section import DataConfig, KeepConfig
from vcore_ds.config.load import dump_recipe, load_recipe
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.problems import RecipeError
from vcore_ds.config.schema import Recipe, differing_keys, flat_values
from vcore_ds.data.cache import find_or_make_store
from vcore_ds.data.dataset import ChangedDataset, SubsetDataset
from vcore_ds.data.prepare.convert import PrepareRequest
from vcore_ds.data.prepare.pipeline import prepare
from vcore_ds.data.score_selection import read_matching_selection, read_selection, select_positions
from vcore_ds.data.scores_folder import ScoredCheckpoint, group_by_source, read_scores, write_scores
from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.models.model_identity import compute_model_digest
from vcore_ds.training.feed import DataReader, identify_start

UTILITIES = np.array([3.0, -1.0, 2.0, np.nan, 2.0, 0.0, 5.0, np.inf], np.float32)
SOURCES = np.array(list("aaaabbbb"))


FALLING = np.array([9.0, 8.0, 7.0, 6.0, 1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize(
    ("utilities", "keys", "expected"),
    [
        (UTILITIES, {"top": 0.25}, [0, 6]),
        (UTILITIES, {"top": 0.5}, [0, 2, 4, 6]),
        (UTILITIES, {"top": 0.45}, [0, 2, 4, 6]),  # 3.6 of 8
        (UTILITIES, {"top": 0.375}, [0, 2, 6]),  # of two equal ones the first
        (UTILITIES, {"top": 1.0}, [0, 1, 2, 4, 5, 6]),  # a utility that is not finite is never kept
        (UTILITIES, {"top": 0.25, "within": "source"}, [0, 6]),
        (UTILITIES, {"top": 0.5, "within": "source"}, [0, 2, 4, 6]),
        (UTILITIES, {"top": 0.01}, []),
        (UTILITIES, {"above": 0.0}, [0, 2, 4, 6]),
        (UTILITIES, {"above": -1.0}, [0, 2, 4, 5, 6]),
        (UTILITIES, {"above": 5.0}, []),
        (FALLING, {"top": 0.5}, [0, 1, 2, 3]),
        (FALLING, {"top": 0.5, "within": "source"}, [0, 1, 6, 7]),
    ],
)
def test_the_kept_traces_by_hand(utilities: np.ndarray, keys: dict[str, Any], expected: list[int]) -> None:
    assert select_positions(utilities, SOURCES, KeepConfig(scores="s", **keys)).tolist() == expected


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, twelve conversations as a store, and scores of them along two sets, and along one."""
    folder = tmp_path_factory.mktemp("selection")
    write_model(folder / "model")
    data = write_conversations(folder / "train.jsonl", sums(range(12)))
    tokenizer = load_tokenizer(str(folder / "model"))
    settings = DataConfig(train_path=str(data), cutoff_length=256, cache_dir=str(folder))
    store = find_or_make_store(str(data), tokenizer, settings, say=lambda _: None)
    store.rename(folder / "store")
    opened = TokenStore(folder / "store", tokenizer)
    means = {"right": [float(i % 5) - 2 for i in range(12)], "short": [float(-i) for i in range(12)]}
    sources = ["a.jsonl"] * 8 + ["b.jsonl"] * 4
    write_scores_folder(folder / "both", opened, folder / "model", means, sources)
    write_scores_folder(folder / "one", opened, folder / "model", {"right": means["right"]}, sources)
    return folder


def open_store(setup: Path) -> TokenStore:
    return TokenStore(setup / "store", load_tokenizer(str(setup / "model")))


def test_nodes_with_different_scores_are_refused(setup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of one name; the digests of other nodes are given here."""
    settings = {"train_path": str(setup / "store"), "keep": {"scores": str(setup / "one"), "top": 0.5}}
    start_process_group(timeout_minutes=1)
    model = str(setup / "model")
    reader = DataReader(DataConfig.model_validate(settings), model, load_tokenizer(model))
    assert len(reader.read_training_data(MethodConfig(name="sft"), 0)) == 6
    monkeypatch.setattr(layout, "gather_objects", lambda axis, digest: [digest, digest[::-1]])
    with pytest.raises(UserError, match=f"data.keep.scores: {setup / 'one'}: "):
        reader.read_training_data(MethodConfig(name="sft"), 0)


def test_a_selection_is_read_from_a_folder_of_scores(setup: Path) -> None:
    keep = KeepConfig(scores=str(setup / "one"), top=0.25)
    selection = read_matching_selection(keep, open_store(setup), identify_start(str(setup / "model")))
    assert selection.positions.tolist() == [3, 4, 9]  # utilities 1, 2, 2
    assert selection.counts_by_source == {"a.jsonl": (2, 8), "b.jsonl": (1, 4)}
    text = f"3 of 12 traces kept: the 25% with the highest mean utility for right ({setup / 'one'})"
    assert selection.describe() == text
    origin = json.loads(json.dumps(selection.origin()))
    assert origin["set"] == "right" and origin["kept_of_source"] == {"a.jsonl": [2, 8], "b.jsonl": [1, 4]}
    assert len(origin["digest"]) == 64 and (origin["kept"], origin["traces"]) == (3, 12)
    # Sums favour long traces: of utility 1 and 2, rows 4 and 9 with five repetitions each, then row 8.
    by_sum = read_selection(keep.model_copy(update={"by": "sum"}))
    numbers = np.array(open_store(setup).num_supervised_tokens)
    sums_of_traces = np.array([(i % 5 - 2) * numbers[i] for i in range(12)])
    assert by_sum.positions.tolist() == sorted(np.argsort(-sums_of_traces, kind="stable")[:3].tolist())
    other_set = read_selection(KeepConfig(scores=str(setup / "both"), set="short", above=-2.5))
    assert other_set.positions.tolist() == [0, 1, 2]
    assert "mean utility for short above -2.5" in other_set.describe()


def test_a_kept_data_set_has_the_sequences_under_their_ids(setup: Path) -> None:
    store = open_store(setup)
    kept = SubsetDataset(store, np.array([1, 4, 9]))
    assert [sequence.sequence_id for sequence in kept] == kept.sequence_ids.tolist() == [1, 4, 9]
    assert kept.lengths.tolist() == [len(store[i]) for i in (1, 4, 9)]
    assert kept.digest != store.digest != SubsetDataset(store, np.array([1, 4, 8])).digest != kept.digest
    changed = [ChangedDataset(dataset, lambda _, sequence: sequence, "added").digest for dataset in (store, kept)]
    assert len({*changed, store.digest, kept.digest}) == 4


def test_the_largest_sources_come_first() -> None:
    groups = [(name, *members) for name, members in group_by_source(np.array(["c", "a", "b", "b"]), 2)]
    assert groups == [("all", 1, 1, 1, 1), ("b", 0, 0, 1, 1), ("a", 0, 1, 0, 0)]
    assert [name for name, _ in group_by_source(np.array(["a"]), 2)] == ["a"]


# (folder of scores, other keys of data.keep, what is named)
REFUSED = {
    "no folder": ("none", {"top": 0.5}, "data.keep.scores: .*found no scores.json"),
    "several sets": ("both", {"top": 0.5}, "data.keep.set: found null.*right, short"),
    "unknown set": ("both", {"set": "rigth", "top": 0.5}, 'data.keep.set: found rigth.*did you mean "right"'),
    "nothing above": ("one", {"above": 2.0}, "data.keep.above: found 2, which keeps none of the 12 traces.*-2 to 2;"),
    "nothing in so small a share": ("one", {"top": 0.01}, "data.keep.top: found 0.01, which keeps none of the 12"),
}


@pytest.mark.parametrize(("folder", "keys", "message"), REFUSED.values(), ids=REFUSED)
def test_scores_that_keep_nothing_are_refused(setup: Path, folder: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_selection(KeepConfig(scores=str(setup / folder), **keys))
    assert "\n" not in str(error.value)


# (changes of scores.json, changes of its entry `data`, what is named)
OF_OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "data": ({}, {"digest": "1" * 64}, "data.keep.scores: .*found scores of .* with other tokens .111111111111."),
    "tokenizer": ({}, {"tokenizer_hash": "1", "digest": "2"}, "found scores of .* with another tokenizer "),
    "template": ({}, {"chat_template_hash": "1"}, "found scores of .* with another chat template "),
    "two folders": ({}, {"num_sequences": 13}, "found 12 traces in scores.parquet and 13 in scores.json"),
    "model": (
        {"model": "m", "model_digest": "2:" + "3" * 64},
        {},
        r"other weights \(m; model 2:33.*those of model.path",
    ),
}


@pytest.mark.parametrize(("changes", "data", "message"), OF_OTHERS.values(), ids=OF_OTHERS)
def test_scores_of_others_are_refused(
    setup: Path, tmp_path: Path, changes: dict[str, Any], data: dict[str, Any], message: str
) -> None:
    shutil.copytree(setup / "one", tmp_path / "x")
    scores = read_scores(tmp_path / "x")
    write_scores(tmp_path / "x", replace(scores, data=replace(scores.data, **data), **changes))
    keep = KeepConfig(scores=str(tmp_path / "x"), top=0.5)
    with pytest.raises(UserError, match=message) as error:
        read_matching_selection(keep, open_store(setup), identify_start(str(setup / "model")))
    assert "\n" not in str(error.value)


# (what was scored, with which weights the run begins; with the weights of a checkpoint: has their digest on its card)
STARTS: dict[str, tuple[str, list[str]]] = {
    "base": ("base", ["base"]),
    "base and adapter": ("adapter", ["adapter"]),
    "full run": ("run", ["base", "result", "export of the checkpoint"]),
    "run of adapters": (
        "LoRA run",
        ["base", "result adapter", "adapter of the checkpoint", "export of the checkpoint"],
    ),
    "run of adapters that began with one": (
        "LoRA run from the adapter",
        ["adapter", "adapter of the checkpoint", "export of the checkpoint"],
    ),
}


@pytest.mark.parametrize(("scored", "accepted"), STARTS.values(), ids=STARTS)
def test_a_run_begins_with_the_weights_that_were_scored_or_goes_on_from_them(
    setup: Path, tmp_path: Path, scored: str, accepted: list[str]
) -> None:
    base, starts = str(setup / "model"), dict[str, tuple[str, str | None]]()
    for name in ("base", "result", "export of the checkpoint", "other model"):
        starts[name] = base, None
        if name != "base":
            file = Path(shutil.copytree(base, tmp_path / name)) / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + bytes([len(starts)]))
            starts[name] = str(file.parent), None
    for name in ("adapter", "result adapter", "adapter of the checkpoint", "other adapter"):
        write_yaml(tmp_path / name / "adapter_model.safetensors", f"weights of the {name}")
        starts[name] = base, str(tmp_path / name)
    for name in ("export of the checkpoint", "adapter of the checkpoint"):
        digest = "c" * 64 if "LoRA" in scored or "export" in name else "another one"
        (tmp_path / name / "README.md").write_text(f"---\ncheckpoint: {digest}\n---\n")
    starts["other base"] = starts["other model"][0], starts["adapter of the checkpoint"][1]
    weights = tmp_path / ("result adapter" if scored.startswith("LoRA") else "result") / "adapter_model.safetensors"
    result = compute_file_digest(weights) if weights.exists() else compute_model_digest(str(weights.parent))
    begun_with = tmp_path / "adapter" if "adapter" in scored else None
    changes: dict[str, Any] = {"checkpoints": [ScoredCheckpoint("run", 3, 1.0, "c" * 64)], "result_digest": result}
    if "from" in scored:
        changes["result_digest"] = None
    changes = changes if "run" in scored else {}
    if begun_with is not None:
        changes["adapter"] = str(begun_with)
        changes["adapter_digest"] = compute_file_digest(begun_with / "adapter_model.safetensors")
    shutil.copytree(setup / "one", tmp_path / "x")
    write_scores(tmp_path / "x", replace(read_scores(tmp_path / "x"), **changes))
    keep, refused = KeepConfig(scores=str(tmp_path / "x"), top=0.5), []
    for name, start in starts.items():
        try:
            origin = read_matching_selection(keep, open_store(setup), identify_start(*start)).origin()
        except UserError as error:
            assert "data.keep.scores: " in str(error)
            refused.append(name)
    assert sorted(starts.keys() - set(refused)) == sorted(accepted)
    assert origin["scored_weights"] == (
        "run after step 3" if "run" in scored else f"{begun_with} on {base}" if begun_with else base
    )


def test_scores_that_are_not_finished_are_refused(setup: Path, tmp_path: Path) -> None:
    (tmp_path / "scores.unfinished").mkdir()
    with pytest.raises(UserError, match=r"data.keep.scores: .*has not finished \(scores.unfinished\)"):
        read_selection(KeepConfig(scores=str(tmp_path / "scores"), top=0.5))


# ---- the recipe ----------------------------------------------------------------------------------------------------


def write_recipe(tmp_path: Path, **data: object) -> Path:
    recipe = smallest_recipe()
    recipe["data"] |= data
    recipe["engine"] = {"deepspeed_config": "ds_configs/zero3_bf16.json"}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


KEEP = {"scores": "runs/scores/x", "top": 0.5}


def read_problem(tmp_path: Path, keep: object, *overrides: str) -> str:
    with pytest.raises(RecipeError) as error:
        load_recipe(write_recipe(tmp_path, keep=keep), overrides)
    (problem,) = error.value.problems
    return problem


def test_overrides_and_fragments_change_single_keys(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, keep=KEEP)
    assert load_recipe(path, ["data.keep.top=0.25"]).data.keep == KeepConfig(scores="runs/scores/x", top=0.25)
    assert load_recipe(path, ["data.keep=null"]).data.keep is None
    assert load_recipe(path, ["data.keep=null", "data.keep.scores=~/y", "data.keep.above=-1"]).data.keep == KeepConfig(
        scores="~/y", above=-1.0
    )
    (tmp_path / "more.yaml").write_text("data: {keep: {top: null, above: 0}}")
    recipe = load_recipe(path, [str(tmp_path / "more.yaml")])
    assert recipe.data.keep == KeepConfig(scores="runs/scores/x", above=0.0)
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "dumped.yaml") == recipe


@pytest.mark.parametrize(
    ("keep", "override", "key"),
    [
        (KEEP, "data.keep.tpo=1", "data.keep.tpo"),
        (KEEP, "data.keep.top=1.5", "data.keep.top"),
        ({"top": 0.5}, "run.seed=1", "data.keep.scores"),
        (3, "run.seed=1", "data.keep"),
        (KEEP | {"by": "median"}, "run.seed=1", "data.keep.by"),
        (KEEP, "data.keep.top=null", "data.keep.top"),
        (KEEP, "data.keep.above=0", "data.keep.top"),
        (KEEP, "data.keep={scores: x, above: 1, within: source}", "data.keep.within"),
    ],
)
def test_wrong_keys_are_named(tmp_path: Path, keep: object, override: str, key: str) -> None:
    assert f": {key}: found " in read_problem(tmp_path, keep, override)


def test_the_nearest_nested_key_is_named(tmp_path: Path) -> None:
    assert read_problem(tmp_path, KEEP, "data.keep.tpo=1").endswith('; did you mean "data.keep.top"?')


def test_which_keys_may_change_when_a_run_is_resumed() -> None:
    there = Recipe.model_validate(smallest_recipe() | {"data": {"train_path": "t", "keep": KEEP}})
    moved = there.model_copy(update={"data": there.data.model_copy(update={"keep": KeepConfig(scores="z", top=0.5)})})
    lower_share = there.model_copy(
        update={"data": there.data.model_copy(update={"keep": KeepConfig(scores="z", top=0.25)})}
    )
    without_keep = there.model_copy(update={"data": there.data.model_copy(update={"keep": None})})
    assert flat_values(there)["data.keep.top"] == 0.5 and "data.keep" not in flat_values(there)
    assert not differing_keys(there, moved)
    assert differing_keys(there, lower_share) == {"data.keep.top": (0.5, 0.25)}
    assert "data.keep.top" in differing_keys(there, without_keep)


def test_check_and_plan_count_the_kept_traces(setup: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        str(write_recipe(setup, keep={"scores": str(setup / "one"), "top": 0.5})),
        f"model.path={setup / 'model'}",
        f"data.train_path={setup / 'store'}",
        f"run.output_dir={setup / 'run'}",
        "batch.global_size=4",
        "schedule={num_epochs: 4}",
        "probe.batch_size=2",
    ]
    assert main(["check", *words]) == 0
    out = capsys.readouterr().out
    assert "Training data: 6 of 12 traces kept: the 50% with the highest mean utility for right" in out
    assert "; the run takes 6 steps\n" in out  # 4 epochs of 6 traces in batches of 4
    assert main(["plan", *words, "--gpus", "1", "--json"]) == 0
    assert main(["plan", *words, "--gpus", "1"]) == 0
    assert "GPU hours of the run (6 steps)" in capsys.readouterr().out
    words[0] = str(write_recipe(setup, keep={"scores": str(setup / "missing"), "top": 0.5}))
    assert main(["check", *words]) == 0
    assert f"Not on this machine, but needed where the recipe runs: data.keep.scores {setup}" in capsys.readouterr().out


# ---- rows for other trainers ---------------------------------------------------------------------------------------


@pytest.fixture
def two_files(tmp_path: Path, setup: Path) -> Path:
    """Scores of a store of two files, with a blank line and a row that the store dropped between them."""
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"é{i}"}], "id": i}
            for i in range(6)]  # fmt: skip
    dropped = {"messages": [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "y"}]}
    (tmp_path / "data").mkdir()
    lines = [json.dumps(row) for row in (rows[0], rows[1], dropped, rows[2])]
    (tmp_path / "data" / "a.jsonl").write_text(f"{lines[0]}\n\n" + "\n".join(lines[1:]) + "\n")
    (tmp_path / "data" / "b.json").write_text(json.dumps(rows[3:]))
    folder = find_or_make_store(
        str(tmp_path / "data"),
        load_tokenizer(str(setup / "model")),
        DataConfig(train_path="data", cutoff_length=200, cache_dir=str(tmp_path)),
        say=lambda _: None,
    )
    store = TokenStore(folder)
    sources, numbers = store.origins()
    write_scores_folder(
        tmp_path / "scores", store, setup / "model", {"right": [0.5, -1, 2, -3, 4, -0.0]}, sources, numbers.tolist()
    )
    return tmp_path


def test_the_kept_rows_are_those_of_the_files(two_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = two_files / "kept.jsonl"
    words = ["keep", str(two_files / "scores"), "--above", "0", "--output", str(output)]
    assert main(words) == 0
    assert "3 of 6 traces kept: mean utility for right above 0" in capsys.readouterr().out
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in kept] == [0, 2, 4] and kept[1]["messages"][1]["content"] == "é2"
    assert set(kept[0]) == {"messages", "id"}
    origin = json.loads((two_files / "kept.jsonl.origin.json").read_text())
    assert origin["scored"] == "2026-11-23T00:00:00Z" and (origin["kept"], origin["traces"]) == (3, 6)
    assert origin["above"] == 0 and origin["set"] == "right"
    assert list(origin["kept_of_source"].values()) == [[2, 3], [1, 3]]
    assert main(words) == 2 and "is there already" in capsys.readouterr().err

    output.unlink()
    assert main(words) == 2 and "kept.jsonl.origin.json: is there already" in capsys.readouterr().err
    assert json.loads((two_files / "kept.jsonl.origin.json").read_text()) == origin and not output.exists()


def test_rows_that_changed_since_they_were_scored_are_refused(
    two_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["keep", str(two_files / "scores"), "--top", "1", "--output", str(two_files / "kept.jsonl")]
    file = two_files / "data" / "a.jsonl"
    file.write_text("\n" + file.read_text())
    assert main(words) == 2 and f"{file}: has changed since it was scored" in capsys.readouterr().err
    file.unlink()
    assert main(words) == 2 and "which is not a file here" in capsys.readouterr().err
    assert not (two_files / "kept.jsonl").exists()
    assert main([*words[:2], "--above", "1", "--within", "source", *words[4:]]) == 2
    assert "--within: found source together with --above" in capsys.readouterr().err
    assert main([*words[:2], "--set", "wrong", *words[2:]]) == 2
    assert "--set: found wrong, for which there are no scores; expected one of right" in capsys.readouterr().err


def write_scored(folder: Path, setup: Path, sources: list[Path]) -> Path:
    """Scores of a store of these sources, as often as they are named, whose utilities are 0, 1, 2 ..."""
    request = PrepareRequest(tuple(map(str, sources)), str(setup / "model"), "train", cutoff_length=200)
    prepare(request, folder / "store", say=lambda _: None)
    store = TokenStore(folder / "store")
    sources_read, rows = store.origins()
    utilities = [float(i) for i in range(len(store))]
    return write_scores_folder(
        folder / "scores", store, setup / "model", {"right": utilities}, sources_read, rows.tolist()
    )


def make_chat_row(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": f"é{number}"}]
    return {"messages": messages, "id": number}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_kept_rows(scores: Path, *words: str) -> list[dict[str, Any]]:
    output = scores.parent / "kept.jsonl"
    assert main(["keep", str(scores), *words, "--output", str(output)]) == 0
    return [json.loads(line, parse_constant=pytest.fail) for line in output.read_text().splitlines()]


@pytest.mark.parametrize(
    ("order", "top", "expected"),
    [("aba", 1.0, [0, 0, 1, 1, 2, 2, 10, 11]), ("abb", 0.6, [10, 10, 11, 11]), ("bba", 0.3, [1, 2])],
)
def test_rows_of_a_source_that_was_named_twice_are_kept_each_time(
    setup: Path, tmp_path: Path, order: str, top: float, expected: list[int]
) -> None:
    files = {
        "a": write_rows(tmp_path / "a.jsonl", [make_chat_row(n) for n in range(3)]),
        "b": write_rows(tmp_path / "b.parquet", [make_chat_row(n) for n in (10, 11)]),
    }
    scores = write_scored(tmp_path, setup, [files[name] for name in order])
    assert [row["id"] for row in read_kept_rows(scores, "--top", str(top))] == expected


def test_values_without_a_json_type_are_converted(setup: Path, tmp_path: Path) -> None:
    moment = datetime(2026, 1, 2, 3, tzinfo=UTC)
    rows = [make_chat_row(n) | {"moment": moment, "day": [moment.date()], "clock": moment.time()} for n in range(2)]
    (tmp_path / "table").mkdir()
    scores = write_scored(tmp_path / "table", setup, [write_rows(tmp_path / "a.parquet", rows)])
    times = {"moment": "2026-01-02T03:00:00+00:00", "day": ["2026-01-02"], "clock": "03:00:00"}
    assert read_kept_rows(scores, "--top", "1") == [make_chat_row(n) | times for n in range(2)]
    halves = [make_chat_row(0) | {"half": "\ud800"}, make_chat_row(1)]
    assert (
        read_kept_rows(write_scored(tmp_path, setup, [write_rows(tmp_path / "b.jsonl", halves)]), "--top", "1")
        == halves
    )
    assert "é1" in (tmp_path / "kept.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("a.parquet", [{"bytes": b"a"}], "found b'a'"),
        ("a.parquet", Decimal("1.5"), "found Decimal('1.5')"),
        ("a.jsonl", -math.inf, "Out of range float values are not JSON compliant"),
    ],
)
def test_a_value_that_json_does_not_have_is_named(
    setup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: object, shown: str
) -> None:
    file = write_rows(tmp_path / name, [make_chat_row(0) | {"key": None}, make_chat_row(1) | {"key": value}])
    scores = write_scored(tmp_path, setup, [file])
    assert main(["keep", str(scores), "--top", "1", "--output", str(tmp_path / "kept.jsonl")]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"vcore-ds: {file}:2: {shown}") and "which JSON cannot represent; " in message
    assert message.count("\n") == 1 and not list(tmp_path.glob("kept*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--above", "nan"], "--above: found NaN; expected a number or null"),
        (["--above", "0", "--set", "a b"], '--set: found "a b"; expected a name of letters'),
        (["--above", "9"], "--above: found 9, which keeps none of the 12 traces"),
        (None, 'SCORES: found ""; expected text, not empty'),
    ],
)
def test_invalid_arguments_are_refused(
    setup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str] | None, message: str
) -> None:
    scores, words = ("", ["--top", "1"]) if words is None else (str(setup / "one"), words)
    assert main(["keep", scores, *words, "--output", str(tmp_path / "kept.jsonl")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"vcore-ds: {message}") and error.count("\n") == 1 and not list(tmp_path.iterdir())
