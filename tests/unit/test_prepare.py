"""Raw rows to token stores: sources, sampling, restarts."""

import bz2
import gzip
import itertools
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, load_dataset

from tests.helpers.conversations import decode_texts, make_row, prepare_rows, write_lines
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.named_model import find_named_model
from vcore_ds.common.errors import UserError
from vcore_ds.config.data_section import DataConfig
from vcore_ds.data.cache import find_or_make_store
from vcore_ds.data.messages import UNCLOSED_THINKING
from vcore_ds.data.prepare import pipeline, sources
from vcore_ds.data.prepare.convert import KEPT, PrepareRequest, RowOutcome
from vcore_ds.data.prepare.pipeline import make_sample_key
from vcore_ds.data.prepare.report import PrepareReport
from vcore_ds.data.prepare.sources import BLANK, UnreadableRow, find_files
from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.models.description import read_model

LONG_PROMPT = make_row("q" * 200, "answer")  # more than 100 tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, tokenizer: Path) -> Callable[..., PrepareReport | None]:
    """`prepare_rows` into this folder; what was said is `run.said`."""

    def run(source: Path | list[Path], output: str = "store", **request: Any) -> PrepareReport | None:
        run.said = []
        return prepare_rows(source, tmp_path / output, said=run.said, **{"tokenizer": tokenizer, **request})

    return run


def read_contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Sources


def compress_zstd(contents: bytes) -> bytes:
    return pa.compress(contents, codec="zstd", asbytes=True)


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".zst"])
def test_every_line_is_a_row(tmp_path: Path, suffix: str) -> None:
    lines = ['{"n": 0}', "", '{"n": 2}', "x" * 30, "[]", '{"n": "ü\u2028"}', '{"n": 6}']
    path = tmp_path / f"rows.jsonl{suffix}"
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": compress_zstd, "": bytes}[suffix]
    path.write_bytes(compress(b"\xef\xbb\xbf" + "\n".join(lines).encode()))  # without a last line break
    (file,) = find_files([str(path)], "train")
    read = list(file.rows())
    assert len(read) == 7 and read[1] is BLANK
    assert isinstance(read[3], UnreadableRow) and read[3].reason.startswith("not JSON (Expecting value")
    assert [read[i] for i in (0, 2, 4, 5, 6)] == [{"n": 0}, {"n": 2}, [], {"n": "ü\u2028"}, {"n": 6}]


def read_values(source: object, split: str = "train") -> list[Any]:
    return [row["n"] for file in find_files([str(source)], split) for row in file.rows()]


def test_parquet_and_lists_are_read_and_a_copy_of_a_hub_data_set_by_its_split(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.Table.from_pylist([{"n": i} for i in range(10)]), data / "cot-0.parquet", row_group_size=3)
    (data / "tir-0.json").write_text(json.dumps([{"n": 20}, {"n": 21}]))
    (data / "tir-1.jsonl").write_text(json.dumps([{"n": 22}], indent=1))
    assert read_values(tmp_path, "cot") == list(range(10))
    assert read_values(f"{tmp_path}/**/*.json*", "cot") == [20, 21, 22]
    assert len(find_files([str(tmp_path)], "train")) == 3  # no file of that name: all of them
    assert len(find_files([f"{tmp_path}/**/**/*-?.*"], "train")) == 3  # each once, for all ways to it
    (data / "tir-0.json").write_bytes(b"\xef\xbb\xbf" + (data / "tir-0.json").read_bytes())
    assert read_values(data / "tir-0.json") == [20, 21]
    table = pa.table({"n": [5, 6]})
    with pa.ipc.new_file(data / "file.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    assert read_values(data / "file.arrow") == [5, 6]


def test_csv_cells_stay_text_and_a_short_row_lacks_its_last_cells(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,completion\n007,"a\nb"\nNA,\n\nq\n')
    (file,) = find_files([str(path)], "train")
    assert list(file.rows()) == [
        {"prompt": "007", "completion": "a\nb"},
        {"prompt": "NA", "completion": ""},
        {"prompt": "q", "completion": None},
    ]
    path.write_text("\ufeffn\n" + "7" * 200_000)  # as spreadsheets write it; a cell beyond the limit of `csv`
    assert read_values(path) == ["7" * 200_000]
    path.write_text('n\n"a"b')
    with pytest.raises(UserError, match="not readable to its end as .csv"):
        read_values(path)


def test_folders_by_save_to_disk_are_read_by_split(tmp_path: Path) -> None:
    parts = {"train": Dataset.from_dict({"n": [1, 2]}), "test": Dataset.from_dict({"n": [3]})}
    DatasetDict(parts).save_to_disk(tmp_path / "both")
    parts["train"].save_to_disk(tmp_path / "one")
    assert read_values(tmp_path / "one") == read_values(tmp_path / "both") == [1, 2]
    assert read_values(tmp_path / "both", "test") == [3]
    with pytest.raises(UserError, match="no split 'cot', only train, test"):
        find_files([str(tmp_path / "both")], "cot")


def write_hub_copy(folder: Path, configurations: list[str]) -> None:
    """Write a data set in the hub's layout."""
    card = [{"config_name": name, "data_files": [{"split": "cot", "path": f"{name}/*"}]} for name in configurations]
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': card})}\n---\n")
    for i, name in enumerate(configurations):
        (folder / name).mkdir()
        for part in range(2):
            pq.write_table(pa.table({"n": [10 * i + part]}), folder / name / f"x-{part}.parquet")


def test_a_configuration_is_named_after_two_colons(tmp_path: Path) -> None:
    write_hub_copy(tmp_path, ["math", "code"])
    by_datasets = load_dataset(str(tmp_path), "code", split="cot", cache_dir=str(tmp_path.parent / "cache"))
    assert read_values(f"{tmp_path}::code", "cot") == [10, 11] == [load["n"] for load in by_datasets]
    for source, split, reason in (
        (str(tmp_path), "cot", "found several configurations, expected .*::NAME with one of math, code"),
        (f"{tmp_path}::all", "cot", "found no configuration 'all', expected .*one of math, code"),
        (f"{tmp_path}::code", "train", "no split 'train', only cot"),
    ):
        with pytest.raises(UserError, match=reason):
            find_files([source], split)
    (tmp_path / "one").mkdir()
    write_hub_copy(tmp_path / "one", ["default"])
    assert read_values(tmp_path / "one", "cot") == [0, 1]


def test_files_of_the_hub_are_downloaded_one_by_one(tmp_path: Path, tokenizer: Path, monkeypatch) -> None:
    """The hub itself is replaced by a folder: its commit, the resolution of its files, and their download."""
    write_hub_copy(tmp_path, ["math", "code"])
    resolve, downloads = sources._resolve, []

    def resolve_here(name: str, configuration: str | None, split: str) -> list[str]:
        assert name == "owner/set"
        files = resolve(str(tmp_path), configuration, split)
        return [f"hf://datasets/owner/set@abc/{Path(file).relative_to(tmp_path)}" for file in files]

    def download(name: str, path: str, *, repo_type: str, revision: str) -> str:
        assert (name, repo_type, revision) == ("owner/set", "dataset", "abc")
        downloads.append(path)
        return str(tmp_path / path)

    monkeypatch.setattr(sources, "_resolve", resolve_here)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    files = find_files(["owner/set::code"], "cot")
    assert not downloads and [file.name for file in files] == [f"owner/set/code/x-{i}.parquet" for i in (0, 1)]
    hub = {"hub": "owner/set", "configuration": "code", "split": "cot", "revision": "abc"}
    assert sources.describe_source(files) == [{"file": f"code/x-{i}.parquet", **hub} for i in (0, 1)]
    assert [row["n"] for file in files for row in file.rows()] == [10, 11]
    assert downloads == ["code/x-0.parquet", "code/x-1.parquet"]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})  # other processes would ask the hub
    settings = DataConfig(train_path="owner/set::code", split="cot", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match="2 of 2 rows are malformed"):  # of files with no time on this machine
        find_or_make_store(settings.train_path, load_tokenizer(str(tokenizer)), settings)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet", "rows.arrow"])
def test_a_file_that_is_cut_is_refused(tmp_path: Path, name: str) -> None:
    path, made = tmp_path / name, [make_row(f"q{n}", f"answer {n}") for n in range(3000)]
    lines, table = "\n".join(map(json.dumps, made)).encode(), pa.Table.from_pylist(made)
    if name.endswith(".parquet"):
        pq.write_table(table, path)
    elif name.endswith(".arrow"):
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    else:
        path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else compress_zstd(lines))
    assert len(list(find_files([str(path)], "train")[0].rows())) == 3000
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(UserError, match=f"{path}: "):
        list(find_files([str(path)], "train")[0].rows())


def test_files_with_different_columns_are_read_each_by_its_own(run, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["q"], "completion": ["a"], "n": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"messages": [make_row("q", "a")["messages"]], "n": ["x"]}), tmp_path / "b.parquet")
    shapes = run([tmp_path / "a.parquet", tmp_path / "b.parquet"]).shapes
    assert dict(shapes) == {"prompt and completion": 1, "messages": 1}


INVALID = {  # name: (contents, reason)
    "missing.jsonl": (None, "there is no such file"),
    "./some/where": (None, "there is no such file"),
    "runs/quickstart_data/train.jsonl": (
        None,
        "; python launch_scripts/quickstart_data.py runs/quickstart_data makes it",
    ),
    "no*.jsonl": (None, "found no file of this pattern"),
    "empty.jsonl": ("", "the file is empty"),
    "notes.txt": ("x", "found a file ending in '.txt', expected .jsonl, .json, .csv, .parquet, .arrow"),
    "folder": (None, "found no file in this folder that ends in .jsonl, .json, .csv, .parquet, .arrow"),
    "broken.parquet": ("x", "not readable to its end as .parquet"),
    "nobody-at-all/nothing": (None, "no such folder"),
    "over_lines.jsonl": (
        '{\n"a": 1\n}\n{\n"a": 1\n}',
        "found JSON over several lines, expected one row, an object, on",
    ),
    "object.json": ('{\n "train": [{"a": 1}]}', "found JSON over several lines"),
    "brackets.json": ("[" * 100_000, "begins like a list and is not"),
    "digits.json": ('[{"a": ' + "9" * 5000 + "}]", "begins like a list and is not"),
    "cut.json": ('["\\', "begins like a list and is not"),
    "list_and_rows.jsonl": ('[{"a": 1}]\n{"a": 1}', "begins like a list and is not"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_sources_are_refused(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "folder").mkdir()
    contents, reason = INVALID[name]
    if contents is not None:
        (tmp_path / name).write_text(contents)
    with pytest.raises(UserError) as error:
        next(find_files([name], "train")[0].rows())
    assert reason in str(error.value) and name in str(error.value)


# The command


def test_all_rows_are_accounted_for(run, tmp_path: Path) -> None:
    """Each rule, the reason of each malformed row, the kept rows, and the table, which the manifest repeats."""
    malformed = {
        "[]": "found list, expected an object",
        '{"question": "q"}': "found the keys question; expected",
        '{"messages": 3}': "`messages` is a number (3)",
        "{broken": "not JSON",
    }
    dropped = [make_row("q", "<think>t"), make_row("q", "<think>t"), make_row("q", "a" * 600)]
    made = [*(make_row(f"q{n}", f"<think>\nHm.\n</think>\n\n{n}") for n in range(6)), *dropped, "", *malformed]
    source = write_lines(tmp_path / "rows.jsonl", made)
    report = run(source, cutoff_length=500)
    assert report.num_rows == len(made) - 1 == report.num_malformed + sum(report.dropped.values()) + report.num_kept
    assert (report.num_malformed, report.num_kept) == (len(malformed), 6)
    assert report.dropped == {UNCLOSED_THINKING: 2, "longer than 500 tokens": 1}
    faults = (tmp_path / "store.malformed.txt").read_text().splitlines()
    first = 6 + len(dropped) + 2
    for number, (fault, reason) in enumerate(zip(faults, malformed.values(), strict=True), start=first):
        assert fault.startswith(f"{source}:{number}: ") and reason in fault
    table = run.said[-1]
    assert f"{'kept':<10}" in table and "p95" in table
    assert TokenStore(tmp_path / "store").sequence_ids.tolist() == list(range(6))
    assert decode_texts(tmp_path / "store")[2].count("<think>") == 1
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert manifest["counts"]["dropped"] == report.dropped and manifest["longest"] == report.longest > 500
    assert f"The longest has {report.longest:,} tokens; --cutoff-length {report.longest} keeps all whole" in table
    assert not (tmp_path / "store.unfinished").exists()


def test_lengths_are_summarized() -> None:
    for lengths, expected in ((range(1, 101), (50.5, 50, 95, 100)), ([7], (7, 7, 7, 7)), ([1, 2], (1.5, 1, 2, 2))):
        report = PrepareReport(PrepareRequest((), "", ""))
        for length in lengths:
            report.count(RowOutcome(0, KEPT, num_tokens=length), "rows.jsonl")
        assert report.lengths == dict(zip(("mean", "p50", "p95", "max"), expected, strict=True))


def test_a_sample_is_the_rows_with_the_smallest_keys_that_fit(run, tmp_path: Path, monkeypatch) -> None:
    """Once it is complete, rows with larger keys are not looked at; which ones depends on nothing but the rows."""
    monkeypatch.setattr(pipeline, "_ROUND_ROWS", 10)
    made = [make_row(f"q{n}", "answer" * (1 if n % 5 else 100)) for n in range(200)]
    source = write_lines(tmp_path / "rows.jsonl", made)
    report = run(source, sample=30, cutoff_length=200, seed=7)
    keys = [(make_sample_key(7, 1, line), line) for line in range(200)]
    expected = sorted(key for key in keys if key[1] % 5)[:30]
    assert TokenStore(tmp_path / "store").sequence_ids.tolist() == sorted(line for _, line in expected)
    num_drawn = sum(key <= expected[-1] for key in keys)
    assert report.dropped == {"longer than 200 tokens": num_drawn - 30, "not drawn for the sample": 200 - num_drawn}
    assert report.num_rows == 200 and report.num_kept == 30
    run(source, "other", sample=30, cutoff_length=200, seed=8)
    assert TokenStore(tmp_path / "other").sequence_ids.tolist() != sorted(n for _, n in expected)
    assert run(source, "all", sample=300).num_kept == 200
    assert "Fewer than the 300 that were asked for" in run.said[-1]


def count_rows(monkeypatch, stop_after: int | None = None) -> list[tuple[str, int]]:
    """Record file and number of each row that is converted, and raise KeyboardInterrupt after a number of pieces."""
    converted: list[tuple[str, int]] = []
    num_pieces, convert = itertools.count(), pipeline._convert_piece

    def count(request, file, rows, piece) -> None:
        if next(num_pieces) == stop_after:
            raise KeyboardInterrupt
        converted.extend((Path(file.path).name, number) for number in piece.numbers.tolist())
        convert(request, file, rows, piece)

    monkeypatch.setattr(pipeline, "_convert_piece", count)
    return converted


def test_rows_beyond_a_complete_sample_are_not_converted(run, tmp_path: Path, monkeypatch) -> None:
    """Of the files together the rows with the smallest keys: about 100 of the first, 100 of 2000 of the second."""
    monkeypatch.setattr(pipeline, "_BATCH_ROWS", 8)
    files = [
        write_lines(tmp_path / f"{name}.jsonl", [make_row(f"q{n}", "answer") for n in range(2000)]) for name in "ab"
    ]
    converted = count_rows(monkeypatch)
    assert run(files, sample=100).num_kept == 100
    assert sum(name == "a.jsonl" for name, _ in converted) == 108
    assert sum(name == "b.jsonl" for name, _ in converted) < 150
    keys = sorted((make_sample_key(42, source, n), 2000 * (source - 1) + n) for source in (1, 2) for n in range(2000))
    assert TokenStore(tmp_path / "store").sequence_ids.tolist() == sorted(place for _, place in keys[:100])


def test_neither_processes_nor_interruptions_change_a_byte(run, tmp_path: Path, monkeypatch) -> None:
    """What was finished is not done again."""
    monkeypatch.setattr(pipeline, "_ROUND_ROWS", 40)
    monkeypatch.setattr(pipeline, "_PIECE_ROWS", 10)
    files = [write_lines(tmp_path / f"{k}.jsonl", [make_row(f"q{n}", "answer") for n in range(150)]) for k in range(2)]
    run(files, "straight", sample=100)
    run(files, "parallel", sample=100, processes=2)
    assert read_contents(tmp_path / "parallel") == read_contents(tmp_path / "straight")
    done: list[tuple[str, int]] = []
    for number in (2, 1, None):
        with monkeypatch.context() as patched:
            converted = count_rows(patched, stop_after=number)
            with pytest.raises(KeyboardInterrupt) if number else nullcontext():
                run(files, "store", sample=100)
        assert (f"{len(done):,} rows were converted before" in run.said) == bool(done)
        done += converted
    assert len(done) == len(set(done)) and 100 < len(done) < 300
    assert read_contents(tmp_path / "store") == read_contents(tmp_path / "straight")


def test_a_finished_store_is_left_alone(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_row("q", f"answer {n}") for n in range(5)])
    assert run(source) is not None
    assert "formats: messages 5" in run.said[-1].splitlines()
    before = read_contents(tmp_path / "store")
    assert run(source) is None and "is there already" in run.said[-1]
    with pytest.raises(UserError, match=r"name another --output[\s\S]*filters.cutoff_length: 16384 there, 7 here"):
        run(source, cutoff_length=7)
    write_lines(source, [make_row("q", f"answer {n}") for n in range(6)])
    with pytest.raises(UserError, match="source.0.fingerprint: "):
        run(source)
    assert read_contents(tmp_path / "store") == before
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is there already and is no token store"):
        run(source, "folder")


def test_a_source_named_twice_keeps_its_row_numbers(run, tmp_path: Path) -> None:
    """Naming a source twice upsamples it: it starts over each time it is named."""
    a = write_lines(tmp_path / "a.jsonl", [make_row("q", f"answer {n}") for n in range(3)])
    b = write_lines(tmp_path / "b.jsonl", [make_row("q", "7"), "", "broken", make_row("q", "8")])
    for order in ("abb", "aba", "ab"):
        run([{"a": a, "b": b}[name] for name in order], order)
        store = TokenStore(tmp_path / order)
        files, numbers = store.origins()
        expected = [(f"{name}.jsonl", row) for name in order for row in {"a": [0, 1, 2], "b": [0, 3]}[name]]
        assert [(Path(file).name, row) for file, row in zip(files, numbers.tolist(), strict=True)] == expected
        assert len(set(store.sequence_ids.tolist())) == len(expected)
        faults = (tmp_path / f"{order}.malformed.txt").read_text()
        assert faults.startswith(f"{b}:3: not JSON") and faults.count("\n") == 1
        duplicates = {"abb": "exact duplicates: 2", "aba": "exact duplicates: 3", "ab": ""}[order]
        assert duplicates in run.said[-1] and ("duplicates" in run.said[-1]) == bool(duplicates)
    with pytest.raises(UserError, match="source.2.file: .* there, nothing here"):
        run([a, b], "abb")


def test_unfinished_work_of_another_request_is_deleted_on_demand_only(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_row("q", "a"), "x"])
    with pytest.raises(UserError):
        run(source, max_malformed=0.1)
    before = {path: path.read_bytes() for path in (tmp_path / "store.unfinished").rglob("*.*")}
    with pytest.raises(UserError, match="found unfinished work of another request:\n  seed: 42 there, 1 here\n"):
        run(source, seed=1)
    assert {path: path.read_bytes() for path in (tmp_path / "store.unfinished").rglob("*.*")} == before
    assert run(source, seed=1, again=True).num_kept == 1
    assert "beginning again" in "".join(run.said) and not (tmp_path / "store.unfinished").exists()


def test_a_second_command_on_an_output_leaves_the_first_alone(run, tmp_path: Path, monkeypatch) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_row("q", f"answer {n}") for n in range(5)])
    report_outcomes, refusals = pipeline.Conversion.report, []

    def report_while_another_begins(*arguments):
        with pytest.raises(UserError) as refused:
            run(source, seed=2, again=True)  # which would delete what is there
        refusals.append(str(refused.value))
        if len(refusals) == 1:
            raise KeyboardInterrupt
        return report_outcomes(*arguments)

    monkeypatch.setattr(pipeline.Conversion, "report", report_while_another_begins)
    with pytest.raises(KeyboardInterrupt):
        run(source)
    report = run(source, seed=1, again=True)  # begins again, and is alone all the same
    assert report is not None and report.num_kept == 5 and not (tmp_path / "store.unfinished").exists()
    assert len(refusals) == 2 and all("store.unfinished: found another process writing" in text for text in refusals)


def test_too_many_malformed_rows_are_refused_and_a_higher_limit_goes_on(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [*(make_row("q", str(n)) for n in range(8)), {"a": 1}, "x", {"a": 2}])
    with pytest.raises(UserError) as error:
        run(source, max_malformed=0.26)
    assert "3 of 11 rows are malformed (27.27%), expected at most 26.00%" in str(error.value)
    # Each kind once, the most frequent first; the share that would do is rounded up.
    assert f"2 rows, first {source}:9: found the keys a; expected" in str(error.value)
    assert f"1 row, first {source}:10: not JSON" in str(error.value) and f"{source}:11" not in str(error.value)
    assert "data.max_malformed=0.28 in a recipe, --max-malformed 0.28 of prepare" in str(error.value)
    listed = tmp_path / "store.malformed.txt"
    assert str(listed) in str(error.value) and f"{source}:11: found the keys a; expected" in listed.read_text()
    assert run(source, max_malformed=0.28).num_kept == 8
    assert "11 rows were converted before" in run.said and listed.read_text().count("\n") == 3


def test_overlong_sequences_are_dropped_or_truncated(run, tmp_path: Path) -> None:
    """Of one whose prompt alone is too long, nothing could be learned."""
    source = write_lines(tmp_path / "rows.jsonl", [make_row("q", "a"), make_row("q", "a" * 100), LONG_PROMPT])
    run(source, "uncut")
    report = run(source, "dropped", cutoff_length=100, max_malformed=0.0)
    assert report.dropped == {"longer than 100 tokens": 1, "prompt alone longer than the cutoff": 1}
    assert (report.num_malformed, report.num_kept) == (0, 1)
    with pytest.raises(UserError, match=f"{source}:3: the prompt alone has 219 tokens, .*than the cutoff, 100"):
        run(source, cutoff_length=100, overlong="truncate", max_malformed=0.1)
    report = run(source, cutoff_length=100, overlong="truncate")
    assert (report.num_malformed, report.num_kept, report.dropped) == (1, 2, {})
    uncut, cut = TokenStore(tmp_path / "uncut"), TokenStore(tmp_path / "store")
    assert cut.lengths.tolist() == [uncut.lengths[0], 100] and report.lengths["max"] == 100
    assert (cut[1].input_ids == uncut[1].input_ids[:100]).all() and (
        cut[1].supervised == uncut[1].supervised[:100]
    ).all()
    assert cut.manifest["num_supervised_tokens"] == sum(sequence.supervised.sum() for sequence in cut)
    assert "2 of 3 rows kept" in cut.describe() and "1 truncated at the cutoff" in cut.describe()


@pytest.mark.parametrize(
    ("row", "rule"),
    [(make_row("q", "answer"), "longer than 25 tokens"), (LONG_PROMPT, "prompt alone longer than the cutoff")],
)
def test_nothing_left_is_an_error_with_the_table(run, tmp_path: Path, row: dict, rule: str) -> None:
    with pytest.raises(UserError) as error:
        run(write_lines(tmp_path / "rows.jsonl", [row]), cutoff_length=25)
    assert "no row is left" in str(error.value) and rule in str(error.value)
    assert not (tmp_path / "store").exists()


def test_a_tokenizer_that_cannot_serve_is_refused(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_row("q", "a")])
    make_tokenizer(None).save_pretrained(tmp_path / "bare")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text('{"model_type": "qwen3"}')
    for name, reason in {
        "bare": "has no chat template",
        "nowhere": "--tokenizer: .*no such folder",
        "weights": "found no tokenizer.json in this folder; copy tokenizer.json",
    }.items():
        with pytest.raises(UserError, match=reason):
            run(source, tokenizer=tmp_path / name)


def test_a_mistyped_folder_is_named_at_once_without_a_connection(tmp_path: Path, monkeypatch) -> None:
    """Libraries retried each request, 97 s in all. A name without a slash, or offline, is not looked up."""
    lookups: list[str] = []

    def fail(_: object, name: str, **__: object) -> None:
        lookups.append(name)
        raise ConnectionError("Name or service not known")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", fail)
    for is_offline, reason in ((False, "the hub cannot be reached: Name or service"), (True, "HF_HUB_OFFLINE")):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
        for look in (load_tokenizer, read_model, find_named_model, lambda name: find_files([name], "train")):
            with pytest.raises(UserError, match=f"runs/mistyped: no such folder .*{reason}"):
                look("runs/mistyped")
            with pytest.raises(UserError, match=r"mistyped.*no.* (folder|file).* hub id \(owner/name\)"):
                look("mistyped")
    assert lookups == 4 * ["runs/mistyped"]
