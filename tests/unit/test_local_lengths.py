"""`check` and `plan` read local data: the lengths of its sequences, and the steps of the run."""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.setups import sums, write_conversations, write_model
from vcore_ds.commands.cli import main
from vcore_ds.commands.plan.columns import find_lengths
from vcore_ds.commands.plan.prediction import SIMULATED_MEAN, LengthModel
from vcore_ds.config.data_section import DataConfig
from vcore_ds.data import tokenization
from vcore_ds.data.cache import find_or_make_store
from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lengths")
    write_model(folder / "model")
    write_conversations(folder / "many.jsonl", sums(range(300)))
    write_conversations(folder / "few.jsonl", [("Why?", "word " * n) for n in (10, 20, 30, 40)])
    tokenizer = load_tokenizer(str(folder / "model"))
    settings = make_data("many.jsonl", cache_dir=str(folder / "cache"))
    store = find_or_make_store(str(folder / "many.jsonl"), tokenizer, settings)
    shutil.copytree(store, folder / "store")
    return folder


def make_data(path: object, **settings: object) -> DataConfig:
    return DataConfig.model_validate({"train_path": path, "cutoff_length": 256, **settings})


def test_raw_data_have_the_lengths_of_their_store(folder: Path) -> None:
    lengths = TokenStore(folder / "store").lengths.tolist()
    model = str(folder / "model")
    raw = find_lengths(make_data(str(folder / "many.jsonl")), model)
    store = find_lengths(make_data(str(folder / "store")), model)
    assert raw.sampled == tuple(lengths[:256]) and raw.num_sequences is None  # the first rows are read
    assert store.sampled == tuple(lengths) and store.num_sequences == 300
    assert raw.source.startswith(f"the first 256 sequences of {folder}/many.jsonl, mean ")
    assert store.mean == pytest.approx(sum(lengths) / 300)
    assert find_lengths(make_data(str(folder / "missing.jsonl")), model) == LengthModel()
    batches = store.draw_batches("main", 8, 10**6)
    assert {n for batch in batches for n in batch} <= set(lengths) and len(batches) == 40
    assert {n for batch in store.draw_batches("probe", 4, 20) for n in batch} == {20}


def test_long_sequences_are_dropped_or_cut_as_in_training(folder: Path) -> None:
    model, path = str(folder / "model"), str(folder / "few.jsonl")
    uncut = find_lengths(make_data(path), model)
    assert uncut.num_sequences == 4 and uncut.sampled == tuple(sorted(set(uncut.sampled)))
    cutoff = uncut.sampled[1]
    dropped = find_lengths(make_data(path, cutoff_length=cutoff), model)
    cut = find_lengths(make_data(path, cutoff_length=cutoff, overlong="truncate"), model)
    assert dropped.sampled == uncut.sampled[:2] and dropped.num_sequences == 2
    assert cut.sampled == (uncut.sampled[0], cutoff, cutoff, cutoff)
    assert find_lengths(make_data(path, cutoff_length=4), model) == LengthModel()


def test_files_count_by_their_weights_and_the_probe_has_its_lengths(folder: Path) -> None:
    files = [{"path": str(folder / name), "weight": weight} for name, weight in (("store", 1.0), ("few.jsonl", 3.0))]
    mixed = find_lengths(make_data(files, probe_path=str(folder / "few.jsonl")), str(folder / "model"))
    few = find_lengths(make_data(str(folder / "few.jsonl")), str(folder / "model"))
    assert len(mixed.sampled) == 304 and set(mixed.sampled[76:]) == set(few.sampled)  # three quarters
    assert mixed.sampled_probe == few.sampled and mixed.num_sequences == 304
    assert {n for batch in mixed.draw_batches("probe", 8, 256) for n in batch} == set(few.sampled)


def test_raw_data_without_the_tokenizer_have_no_lengths(folder: Path) -> None:
    assert find_lengths(make_data(str(folder / "few.jsonl")), "Qwen/Qwen3-8B") == LengthModel()
    store = find_lengths(make_data(str(folder / "store")), "Qwen/Qwen3-8B")
    assert store.num_sequences == 300


def test_check_and_plan_use_the_lengths_of_local_data(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(tokenization, "load_tokenizer", lambda path: (loaded.append(path), load_tokenizer(path))[1])
    recipe = Path(__file__).resolve().parents[2] / "launch_scripts" / "recipes" / "quickstart.yaml"
    words = [str(recipe), f"data.train_path={folder / 'few.jsonl'}", f"model.path={folder / 'model'}"]
    words += [f"run.output_dir={folder / 'run'}", "schedule={num_epochs: 2}", "batch.global_size=4"]
    words += ["data.validation_path=null", "data.probe_path=null", "probe.batch_size=2"]
    assert main(["check", *words]) == 0 and loaded == [str(folder / "model")]
    out = capsys.readouterr().out
    assert f"\nData: the 4 sequences of {folder}/few.jsonl, mean " in out and "; the run takes 2 steps\n" in out
    assert "Assumed: lengths" not in out
    for more, mean in (([], LengthModel().mean), (["--mean-tokens", "100"], 100.0)):
        assert main(["plan", *words, "--gpus", "1", "--json", *more]) == 0
        planned = json.loads(capsys.readouterr().out)[0]["mean_tokens"]
        assert (planned == mean) == bool(more) and planned < SIMULATED_MEAN
    assert main(["plan", *words, "--gpus", "1"]) == 0
    out = capsys.readouterr().out
    assert "GPU hours of the run (2 steps)" in out and f"\nLengths: the 4 sequences of {folder}/few.jsonl" in out
