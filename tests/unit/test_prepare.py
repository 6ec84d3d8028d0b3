"""Raw rows in the schemas of the real data sets to token stores: rules, sampling, restarts."""

import bz2
import gzip
import json
import resource
from collections.abc import Callable, Iterator
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
from vcore_ds.data.answers import AnswerChecker, code_prompt, math_prompt
from vcore_ds.data.messages import Dropped, Malformed
from vcore_ds.data.prepare import pipeline, rows, sources
from vcore_ds.data.prepare.convert import KEPT, PrepareRequest, Result
from vcore_ds.data.prepare.pipeline import make_sample_key
from vcore_ds.data.prepare.report import PrepareReport
from vcore_ds.data.prepare.sources import BLANK, Broken, find_files
from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.models.description import read_model

TRACE = "<think>\nHm, {n}.\n</think>\n\nThe answer is \\boxed{{{n}}}."


def make_math_row(n: int = 4, **changes: Any) -> dict[str, Any]:
    """A row of nvidia/OpenMathReasoning, split cot."""
    row = {
        "expected_answer": str(n),
        "problem_type": "has_answer_extracted",
        "generation_model": "DeepSeek-R1",
        "pass_rate_72b_tir": "0.96875",
        "problem": f"What is ${n} + 0$?",
        "generated_solution": TRACE.format(n=n),
    }
    return row | changes


def make_code_row(**changes: Any) -> dict[str, Any]:
    """A row of nvidia/OpenCodeReasoning-2, split cpp."""
    row = {
        "question_id": "q1",
        "question": "-",
        "r1_generation": "<think>\nRead, add.\n</think>\n\n```cpp\nint main() {}\n```",
        "judgement": "right",
        "dataset": "taco",
        "split": "train",
        "index": "1",
    }
    return row | changes


LONG_PROMPT = make_row("q" * 200, "answer")  # more than 100 tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, tokenizer: Path) -> Callable[..., PrepareReport | None]:
    """`prepare_rows` into this folder; what was said is `run.said`."""

    def run(kind: str, source: Path | list[Path], output: str = "store", **request: Any) -> PrepareReport | None:
        request = {"tokenizer": tokenizer, "split": "cot", **request}
        run.said = []
        return prepare_rows(source, tmp_path / output, kind=kind, said=run.said, **request)

    return run


def read_contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Rules


@pytest.fixture(scope="module")
def checker() -> Iterator[AnswerChecker]:
    checker = AnswerChecker(1)
    yield checker
    checker.close()


@pytest.mark.parametrize(
    ("expected", "answer", "verdict"),
    [
        ("\\frac{1}{2}", "0.5", "equivalent"),
        ("x = 5", "5", "equivalent"),
        ("\\text{Yes}", "\\text{Yes}", "equivalent"),
        ("3", "4", "different"),
        ("3", "\\frac{{", "different"),
        ("9^{9^{9^{9}}}", "3", "unfinished"),  # hangs in C, where no signal handler of Python's runs
        ("2", "\\frac{4}{2}", "equivalent"),  # by the next process
    ],
)
def test_answers_are_compared_and_hanging_ones_given_up(
    checker: AnswerChecker, expected: str, answer: str, verdict: str
) -> None:
    def measure_child_cpu_seconds() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = measure_child_cpu_seconds()
    assert checker.check(expected, answer) == verdict
    if verdict == "unfinished":  # at its limit of one second, beside its imports
        assert measure_child_cpu_seconds() - before < 20


def test_a_good_math_row_becomes_the_papers_prompt_and_the_complete_trace(checker: AnswerChecker) -> None:
    user, assistant = rows.convert_math_row(make_math_row(expected_answer="\\frac{8}{2}"), checker.check).messages
    assert user == {"role": "user", "content": math_prompt("What is $4 + 0$?")}
    assert assistant == {"role": "assistant", "reasoning_content": "Hm, 4.", "content": "The answer is \\boxed{4}."}
    without_opening = make_math_row(generated_solution=TRACE.format(n=4).removeprefix("<think>"))
    assert rows.convert_math_row(without_opening, checker.check).messages[1] == assistant


def test_the_last_box_behind_the_thinking_counts() -> None:
    compared = []

    def check(expected: str, answer: str) -> str:
        compared.append((expected, answer))
        return "equivalent"

    trace = "<think>\\boxed{1}</think>So \\boxed{2}, or rather \\boxed{\\frac{3}{1}}."
    rows.convert_math_row(make_math_row(3, generated_solution=trace), check)
    assert compared == [("3", "\\frac{3}{1}")]


NOT_ONE_THINKING = [
    "The answer is \\boxed{4}.",
    "<think>never closed \\boxed{4}",
    "<think>a</think>b<think>c</think>\\boxed{4}",
    "<think>a<think>b</think>\\boxed{4}",
    "<think>a</think>b</think>\\boxed{4}",
    "first \\boxed{4} <think>a</think>\\boxed{4}",
    "<think> </think>\\boxed{4}",
    "<think>\\boxed{4}</think>",
]
MATH_DROPPED = [
    (rows.OTHER_PROBLEM_TYPE, make_math_row(problem_type="no_answer_extracted", expected_answer=None)),
    (rows.OTHER_MODEL, make_math_row(generation_model="QwQ-32B")),
    (rows.NOT_BOXED, make_math_row(generated_solution="<think>\n\\boxed{4}\n</think>\n\nFour.")),
    (rows.NOT_EQUIVALENT, make_math_row(expected_answer="5")),
    (rows.UNFINISHED, make_math_row(expected_answer="9^{9^{9^{9}}}")),
    *((rows.NOT_ONE_THINKING, make_math_row(generated_solution=trace)) for trace in NOT_ONE_THINKING),
]
MATH_MALFORMED = [
    ([], "found list, expected an object"),
    ({k: v for k, v in make_math_row().items() if k != "problem_type"}, "no field `problem_type`, found expec"),
    (make_code_row(), "no field `problem_type`, found question_id"),  # of another data set
    (make_math_row(expected_answer=None), "`expected_answer` is NoneType"),
    (make_math_row(problem=3), "`problem` is int (3), expected a string"),
    (make_math_row(generated_solution=" "), "`generated_solution` is empty"),
]


@pytest.fixture(scope="module")
def statements(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Local copies of two of the data sets, in the hub's layout and their schemas, loaded by `datasets`."""
    folder = tmp_path_factory.mktemp("statements")
    codeforces = {
        "description": "Add.",
        "input_format": "Two numbers.",
        "output_format": None,
        "examples": [{"input": "1 2", "output": "3"}],
        "note": "",
    }
    tables = {"taco": [{"question": "zero"}, {"question": "one"}], "codeforces": [codeforces, {"description": None}]}
    for name, table in tables.items():
        (folder / name / "data").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(table), folder / name / "data" / "train-00000-of-00001.parquet")
    return str(folder)


def test_code_rows_take_their_statement_from_the_data_set_they_refer_to(statements: str) -> None:
    user, assistant = rows.convert_code_row(make_code_row(), statements).messages
    assert user["content"] == code_prompt("one")
    assert (assistant["reasoning_content"], assistant["content"]) == ("Read, add.", "```cpp\nint main() {}\n```")
    statement = "Add.\n\nInput\n\nTwo numbers.\n\nExamples\n\nInput\n\n1 2\n\nOutput\n\n3"
    for row, expected in (
        (make_code_row(question="Mine.", dataset=None), "Mine."),
        (make_code_row(dataset="open-r1/codeforces", index="0"), statement),
    ):
        assert rows.convert_code_row(row, statements).messages[0]["content"] == code_prompt(expected)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        (make_code_row(judgement="wrong"), rows.NOT_RIGHT),
        (make_code_row(judgement=None), rows.NOT_RIGHT),
        (make_code_row(r1_generation="```cpp\n```"), rows.NOT_ONE_THINKING),
        (make_code_row(index="2"), rows.NO_STATEMENT),
        (make_code_row(dataset="elsewhere"), rows.NO_STATEMENT),
        (make_code_row(dataset="open-r1/codeforces"), rows.NO_STATEMENT),
    ],
)
def test_code_rows_are_dropped_by_rule(statements: str, row: dict, rule: str) -> None:
    with pytest.raises(Dropped) as dropped:
        rows.convert_code_row(row, statements)
    assert dropped.value.args == (rule,)


def test_statements_that_cannot_be_loaded_are_an_error(tmp_path: Path) -> None:
    for index in ("x", "9" * 5000):
        with pytest.raises(Malformed, match=f"`index` is '{index[0]}") as malformed:
            rows.convert_code_row(make_code_row(index=index), None)
        assert len(str(malformed.value)) < 300
    with pytest.raises(UserError, match="problem statements of apps .train. cannot be loaded.*--statements"):
        rows.find_statement(str(tmp_path), "apps", "train", 0)


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
    assert isinstance(read[3], Broken) and read[3].reason.startswith("not JSON (Expecting value")
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


def test_csv_cells_stay_text_and_a_short_row_lacks_its_last_cells(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,completion\n007,"a\nb"\nNA,\n\nq\n')
    (file,) = find_files([str(path)], "train")
    assert list(file.rows()) == [
        {"prompt": "007", "completion": "a\nb"},
        {"prompt": "NA", "completion": ""},
        {"prompt": "q", "completion": None},
    ]


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


def test_files_of_the_hub_are_downloaded_one_by_one(tmp_path: Path, monkeypatch) -> None:
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
    with pytest.raises(UserError, match=f"{path}: not readable to its end .*; is the download complete?"):
        list(find_files([str(path)], "train")[0].rows())


def test_files_with_different_columns_are_read_each_by_its_own(run, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["q"], "completion": ["a"], "n": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"messages": [make_row("q", "a")["messages"]], "n": ["x"]}), tmp_path / "b.parquet")
    shapes = run("chat", [tmp_path / "a.parquet", tmp_path / "b.parquet"]).shapes
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
    made = [
        *(make_math_row(n) for n in range(6)),
        *(row for _, row in MATH_DROPPED),
        *(row for row, _ in MATH_MALFORMED),
        make_math_row(9, generated_solution=TRACE.format(n=9).replace("Hm", "Hm " * 400)),
        "",
        "{broken",
        '{"problem_type": "\\ud800"}',  # half of a surrogate pair is another type
    ]
    source = write_lines(tmp_path / "rows.jsonl", made)
    report = run("math", source, cutoff_length=500)
    assert report.num_rows == len(made) - 1 == report.num_malformed + sum(report.dropped.values()) + report.num_kept
    assert (report.num_malformed, report.num_kept) == (len(MATH_MALFORMED) + 1, 6)
    expected = dict.fromkeys((rule for rule, _ in MATH_DROPPED), 1) | {"longer than 500 tokens": 1}
    expected |= {rows.NOT_ONE_THINKING: len(NOT_ONE_THINKING), rows.OTHER_PROBLEM_TYPE: 2}
    assert report.dropped == expected
    faults = (tmp_path / "store.malformed.txt").read_text().splitlines()
    first = 6 + len(MATH_DROPPED) + 1
    reasons = [*(reason for _, reason in MATH_MALFORMED), "not JSON"]
    for fault, number, reason in zip(faults, [*range(first, first + 6), len(made) - 1], reasons, strict=True):
        assert fault.startswith(f"{source}:{number}: ") and reason in fault
    table = run.said[-1]
    assert "3,155.01" in table and f"{'kept':<10}" in table and "p95" in table
    assert TokenStore(tmp_path / "store").sequence_ids.tolist() == list(range(6))
    assert decode_texts(tmp_path / "store")[2].count("<think>") == 1
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert manifest["counts"]["dropped"] == report.dropped and manifest["longest"] == report.longest > 500
    assert f"The longest has {report.longest:,} tokens; --cutoff-length {report.longest} keeps all whole" in table
    assert manifest["filters"]["prompt"] == math_prompt("{ORIGINAL QUESTION}")
    assert not (tmp_path / "store.unfinished").exists()


def test_code_rows_are_prepared_the_same_way(run, tmp_path: Path, statements: str) -> None:
    changes = ({}, {"judgement": "wrong"}, {"index": "9"}, {"index": "x"}, {"index": "0"})
    source = tmp_path / "cpp-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist([make_code_row(**change) for change in changes]), source)
    report = run("code", source, statements=statements)
    assert report.dropped == {rows.NOT_RIGHT: 1, rows.NO_STATEMENT: 1}
    assert (report.num_malformed, report.num_kept) == (1, 2)
    assert f"{source}:4: `index` is 'x'" in (tmp_path / "store.malformed.txt").read_text()
    prompt = f"<|im_start|>user\n{code_prompt('one')}<|im_end|>\n<|im_start|>assistant\n<think>\nRead, add."
    assert decode_texts(tmp_path / "store")[0].startswith(prompt)
    assert "2,861.25" in run.said[-1]


def test_lengths_are_summarized() -> None:
    for lengths, expected in ((range(1, 101), (50.5, 50, 95, 100)), ([7], (7, 7, 7, 7)), ([1, 2], (1.5, 1, 2, 2))):
        report = PrepareReport(PrepareRequest("chat", (), "", ""))
        for length in lengths:
            report.count(Result(0, KEPT, num_tokens=length), "rows.jsonl")
        assert report.lengths == dict(zip(("mean", "p50", "p95", "max"), expected, strict=True))


def test_a_sample_is_the_rows_with_the_smallest_keys_that_fit(run, tmp_path: Path, monkeypatch) -> None:
    """Once it is complete, rows with larger keys are not looked at; which ones depends on nothing but the rows."""
    monkeypatch.setattr(pipeline, "_ROUND_ROWS", 10)
    made = [make_row(f"q{n}", "answer" * (1 if n % 5 else 100)) for n in range(200)]
    source = write_lines(tmp_path / "rows.jsonl", made)
    report = run("chat", source, sample=30, cutoff_length=200, seed=7)
    keys = [(make_sample_key(7, 1, line), line) for line in range(200)]
    expected = sorted(key for key in keys if key[1] % 5)[:30]
    assert TokenStore(tmp_path / "store").sequence_ids.tolist() == sorted(line for _, line in expected)
    num_drawn = sum(key <= expected[-1] for key in keys)
    assert report.dropped == {"longer than 200 tokens": num_drawn - 30, "not drawn for the sample": 200 - num_drawn}
    assert report.num_rows == 200 and report.num_kept == 30
    run("chat", source, "other", sample=30, cutoff_length=200, seed=8)
    assert TokenStore(tmp_path / "other").sequence_ids.tolist() != sorted(n for _, n in expected)
    assert run("chat", source, "all", sample=300).num_kept == 200
    assert "Fewer than the 300 that were asked for" in run.said[-1]


def count_rounds(monkeypatch, stop_after: int | None = None) -> list[tuple[str, list[int]]]:
    """Record file and rows of each round, and raise KeyboardInterrupt after a number of them."""
    rounds: list[tuple[str, list[int]]] = []
    convert = pipeline.convert_rows

    def count(request, file, rows, largest, processes, numbers, results) -> None:
        if len(rounds) == stop_after:
            raise KeyboardInterrupt
        rounds.append((Path(file.path).name, numbers.tolist()))
        convert(request, file, rows, largest, processes, numbers, results)

    monkeypatch.setattr(pipeline, "convert_rows", count)
    return rounds


def test_rows_beyond_a_complete_sample_are_not_converted(run, tmp_path: Path, monkeypatch) -> None:
    """Of the files together the rows with the smallest keys: about 100 of the first, 100 of 2000 of the second."""
    monkeypatch.setattr(pipeline, "_BATCH_ROWS", 8)
    files = [
        write_lines(tmp_path / f"{name}.jsonl", [make_row(f"q{n}", "answer") for n in range(2000)]) for name in "ab"
    ]
    rounds = count_rounds(monkeypatch)
    assert run("chat", files, sample=100).num_kept == 100
    assert sum(len(positions) for name, positions in rounds if name == "a.jsonl") == 108
    assert sum(len(positions) for name, positions in rounds if name == "b.jsonl") < 150
    keys = sorted((make_sample_key(42, source, n), 2000 * (source - 1) + n) for source in (1, 2) for n in range(2000))
    assert TokenStore(tmp_path / "store").sequence_ids.tolist() == sorted(place for _, place in keys[:100])


def test_neither_processes_nor_interruptions_change_a_byte(run, tmp_path: Path, monkeypatch) -> None:
    """What was finished is not done again."""
    monkeypatch.setattr(pipeline, "_ROUND_ROWS", 40)
    monkeypatch.setattr(pipeline, "_MIN_ROWS", 10)
    files = [write_lines(tmp_path / f"{k}.jsonl", [make_row(f"q{n}", "answer") for n in range(150)]) for k in range(2)]
    run("chat", files, "straight", sample=100)
    run("chat", files, "parallel", sample=100, processes=2)
    assert read_contents(tmp_path / "parallel") == read_contents(tmp_path / "straight")
    done: list[tuple[str, int]] = []
    for number in (2, 1, None):
        with monkeypatch.context() as patched:
            rounds = count_rounds(patched, stop_after=number)
            with pytest.raises(KeyboardInterrupt) if number else nullcontext():
                run("chat", files, "store", sample=100)
        assert (f"{len(done):,} rows were converted before" in run.said) == bool(done)
        done += [(name, position) for name, positions in rounds for position in positions]
    assert len(done) == len(set(done)) and 100 < len(done) < 300
    assert read_contents(tmp_path / "store") == read_contents(tmp_path / "straight")


def test_a_finished_store_is_left_alone(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_row("q", f"answer {n}") for n in range(5)])
    assert run("chat", source) is not None
    assert "formats: messages 5" in run.said[-1].splitlines()
    before = read_contents(tmp_path / "store")
    assert run("chat", source) is None and "is there already" in run.said[-1]
    with pytest.raises(UserError, match=r"name another --output[\s\S]*filters.cutoff_length: 16384 there, 7 here"):
        run("chat", source, cutoff_length=7)
    write_lines(source, [make_row("q", f"answer {n}") for n in range(6)])
    with pytest.raises(UserError, match="source.0.fingerprint: "):
        run("chat", source)
    assert read_contents(tmp_path / "store") == before
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is there already and is no token store"):
        run("chat", source, "folder")


def test_a_source_named_twice_keeps_its_row_numbers(run, tmp_path: Path) -> None:
    """Naming a source twice upsamples it: it starts over each time it is named."""
    a = write_lines(tmp_path / "a.jsonl", [make_row("q", f"answer {n}") for n in range(3)])
    b = write_lines(tmp_path / "b.jsonl", [make_row("q", "7"), "", "broken", make_row("q", "8")])
    for order in ("abb", "aba", "ab"):
        run("chat", [{"a": a, "b": b}[name] for name in order], order)
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
        run("chat", [a, b], "abb")


def test_unfinished_work_of_another_request_is_deleted_on_demand_only(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_row("q", "a"), "x"])
    with pytest.raises(UserError):
        run("chat", source, max_malformed=0.1)
    before = {path: path.read_bytes() for path in (tmp_path / "store.unfinished").rglob("*.*")}
    with pytest.raises(UserError, match="found unfinished work of another request:\n  seed: 42 there, 1 here\n"):
        run("chat", source, seed=1)
    assert {path: path.read_bytes() for path in (tmp_path / "store.unfinished").rglob("*.*")} == before
    assert run("chat", source, seed=1, again=True).num_kept == 1
    assert "beginning again" in "".join(run.said) and not (tmp_path / "store.unfinished").exists()


def test_a_second_command_on_an_output_leaves_the_first_alone(run, tmp_path: Path, monkeypatch) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_row("q", f"answer {n}") for n in range(5)])
    report_outcomes, refusals = pipeline.Conversion.report, []

    def report_while_another_begins(*arguments):
        with pytest.raises(UserError) as refused:
            run("chat", source, seed=2, again=True)  # which would delete what is there
        refusals.append(str(refused.value))
        if len(refusals) == 1:
            raise KeyboardInterrupt
        return report_outcomes(*arguments)

    monkeypatch.setattr(pipeline.Conversion, "report", report_while_another_begins)
    with pytest.raises(KeyboardInterrupt):
        run("chat", source)
    report = run("chat", source, seed=1, again=True)  # begins again, and is alone all the same
    assert report is not None and report.num_kept == 5 and not (tmp_path / "store.unfinished").exists()
    assert len(refusals) == 2 and all("store.unfinished: found another process writing" in text for text in refusals)


def test_too_many_malformed_rows_are_refused_and_a_higher_limit_goes_on(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [*(make_row("q", str(n)) for n in range(8)), "x", {"a": 1}])
    with pytest.raises(UserError) as error:
        run("chat", source, max_malformed=0.19)
    assert "2 of 10 rows are malformed (20.00%), expected at most 19.00%" in str(error.value)
    assert f"The first: {source}:9: not JSON" in str(error.value)
    listed = (tmp_path / "store.unfinished" / "malformed.txt").read_text()
    assert f"{source}:10: found the keys a; expected" in listed
    assert run("chat", source, max_malformed=0.2).num_kept == 8
    assert "10 rows were converted before" in run.said
    assert (tmp_path / "store.malformed.txt").read_text() == listed


def test_overlong_sequences_are_dropped_or_truncated(run, tmp_path: Path) -> None:
    """Of one whose prompt alone is too long, nothing could be learned."""
    source = write_lines(tmp_path / "rows.jsonl", [make_row("q", "a"), make_row("q", "a" * 100), LONG_PROMPT])
    run("chat", source, "uncut")
    report = run("chat", source, "dropped", cutoff_length=100, max_malformed=0.0)
    assert report.dropped == {"longer than 100 tokens": 1, "prompt alone longer than the cutoff": 1}
    assert (report.num_malformed, report.num_kept) == (0, 1)
    with pytest.raises(UserError, match=f"{source}:3: the prompt alone has 219 tokens, .*than the cutoff, 100"):
        run("chat", source, cutoff_length=100, overlong="truncate", max_malformed=0.1)
    report = run("chat", source, cutoff_length=100, overlong="truncate")
    assert (report.num_malformed, report.num_kept, report.dropped) == (1, 2, {})
    uncut, cut = TokenStore(tmp_path / "uncut"), TokenStore(tmp_path / "store")
    assert cut.lengths.tolist() == [uncut.lengths[0], 100] and report.lengths["max"] == 100
    assert (cut[1].input_ids == uncut[1].input_ids[:100]).all() and (
        cut[1].supervised == uncut[1].supervised[:100]
    ).all()
    assert cut.manifest["num_supervised_tokens"] == sum(sequence.supervised.sum() for sequence in cut)
    assert "2 of 3 rows kept" in cut.describe() and "1 truncated at the cutoff" in cut.describe()


@pytest.mark.parametrize(
    ("kind", "row", "rule"),
    [
        ("math", make_math_row(generation_model="QwQ-32B"), rows.OTHER_MODEL),
        ("chat", make_row("q", "answer"), "longer than 25 tokens"),
        ("chat", LONG_PROMPT, "prompt alone longer than the cutoff"),
    ],
)
def test_nothing_left_is_an_error_with_the_table(run, tmp_path: Path, kind: str, row: dict, rule: str) -> None:
    with pytest.raises(UserError) as error:
        run(kind, write_lines(tmp_path / "rows.jsonl", [row]), cutoff_length=25)
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
            run("chat", source, tokenizer=tmp_path / name)


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
