"""Raw rows in the schemas of the real data sets to token stores: rules, sampling, restarts, every kind of bad row."""

import bz2
import gzip
import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, load_dataset

from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.common.errors import UserError
from vcore_ds.data.answers import AnswerChecker, code_prompt, math_prompt
from vcore_ds.data.messages import Dropped, Malformed
from vcore_ds.data.prepare import curation, pipeline, sources
from vcore_ds.data.prepare.convert import KEPT, Result
from vcore_ds.data.prepare.curation import PrepareRequest, find_statement
from vcore_ds.data.prepare.pipeline import Round, make_sample_key, prepare
from vcore_ds.data.prepare.report import PrepareReport
from vcore_ds.data.prepare.sources import BLANK, Broken, find_files
from vcore_ds.data.store import TokenStore

TRACE = "<think>\nHm, {n}.\n</think>\n\nThe answer is \\boxed{{{n}}}."


def make_math_row(n: int = 4, **changes: Any) -> dict[str, Any]:
    """A row of nvidia/OpenMathReasoning, split cot."""
    row = {
        "expected_answer": str(n),
        "problem_type": "has_answer_extracted",
        "problem_source": "aops_c4_high_school_math",
        "generation_model": "DeepSeek-R1",
        "pass_rate_72b_tir": "0.96875",
        "problem": f"What is ${n} + 0$?",
        "generated_solution": TRACE.format(n=n),
        "inference_mode": "cot",
        "used_in_kaggle": False,
    }
    return row | changes


def make_code_row(**changes: Any) -> dict[str, Any]:
    """A row of nvidia/OpenCodeReasoning-2, split cpp."""
    row = {
        "question_id": "q1",
        "id": "1",
        "question": "-",
        "r1_generation": "<think>\nRead, add.\n</think>\n\n```cpp\nint main() {}\n```",
        "solution": "int main() {}",
        "judgement": "right",
        "qwq_critique": "It is right.",
        "pass_rate": "1.0",
        "source": "codeforces",
        "dataset": "taco",
        "split": "train",
        "index": "1",
        "difficulty": "EASY",
        "license": "cc-by-4.0",
    }
    return row | changes


def make_chat_row(n: int = 0) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"answer {n}"}]}


def make_long_row() -> dict[str, Any]:
    """A row whose prompt alone is longer than 100 tokens."""
    row = make_chat_row(1)
    row["messages"][0]["content"] *= 100
    return row


def write_lines(path: Path, rows: list[Any]) -> Path:
    """Write strings as they are and everything else as JSON."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.fixture
def run(tmp_path: Path, tokenizer: str) -> Callable[..., PrepareReport | None]:
    def run(
        kind: str,
        source: Path | list[Path],
        output: str = "store",
        *,
        processes: int = 1,
        max_malformed: float = 1.0,
        again: bool = False,
        **request,
    ) -> PrepareReport | None:
        full_request = PrepareRequest(
            kind=kind,
            sources=tuple(map(str, source if isinstance(source, list) else [source])),
            tokenizer=tokenizer,
            split="cot",
            answer_seconds=1,
            **request,
        )
        said: list[str] = []
        run.said = said
        return prepare(
            full_request,
            tmp_path / output,
            processes=processes,
            max_malformed=max_malformed,
            again=again,
            say=said.append,
        )

    return run


def read_contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decode_texts(folder: Path) -> list[str]:
    tokenizer = make_tokenizer()
    return [tokenizer.decode(sequence.input_ids) for sequence in TokenStore(folder, tokenizer)]


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
    before = measure_child_cpu_seconds()
    assert checker.check(expected, answer) == verdict
    if verdict == "unfinished":  # at its limit of one second, beside its imports
        assert measure_child_cpu_seconds() - before < 20


def measure_child_cpu_seconds() -> float:
    """Processor time of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_a_good_math_row_becomes_the_papers_prompt_and_the_complete_trace(checker: AnswerChecker) -> None:
    user, assistant = curation.convert_math_row(make_math_row(expected_answer="\\frac{8}{2}"), checker.check)
    assert user == {"role": "user", "content": math_prompt("What is $4 + 0$?")}
    assert assistant == {
        "role": "assistant",
        "reasoning_content": "Hm, 4.",
        "content": "The answer is \\boxed{4}.",
    }
    without_opening = make_math_row(generated_solution=TRACE.format(n=4).removeprefix("<think>"))
    assert curation.convert_math_row(without_opening, checker.check)[1] == assistant


def test_the_last_box_behind_the_thinking_counts() -> None:
    compared = []

    def check(expected: str, answer: str) -> str:
        compared.append((expected, answer))
        return "equivalent"

    trace = "<think>\\boxed{1}</think>So \\boxed{2}, or rather \\boxed{\\frac{3}{1}}."
    curation.convert_math_row(make_math_row(3, generated_solution=trace), check)
    assert compared == [("3", "\\frac{3}{1}")]


MATH_DROPPED = {
    curation.OTHER_PROBLEM_TYPE: make_math_row(problem_type="no_answer_extracted", expected_answer=None),
    curation.OTHER_MODEL: make_math_row(generation_model="QwQ-32B"),
    curation.NOT_BOXED: make_math_row(generated_solution="<think>\n\\boxed{4}\n</think>\n\nFour."),
    curation.NOT_EQUIVALENT: make_math_row(expected_answer="5"),
    curation.UNFINISHED: make_math_row(expected_answer="9^{9^{9^{9}}}"),
}
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
MATH_MALFORMED = {
    "no object": ([], "found list, expected an object"),
    "no field": (
        {k: v for k, v in make_math_row().items() if k != "problem_type"},
        "no field `problem_type`, found expec",
    ),
    "another set": (make_code_row(), "no field `problem_type`, found question_id"),
    "null": (make_math_row(expected_answer=None), "`expected_answer` is NoneType"),
    "number": (make_math_row(problem=3), "`problem` is int (3), expected a string"),
    "empty": (make_math_row(generated_solution=" "), "`generated_solution` is empty"),
}


@pytest.mark.parametrize(("rule", "row"), MATH_DROPPED.items())
def test_math_rows_are_dropped_by_rule(checker: AnswerChecker, rule: str, row: dict) -> None:
    with pytest.raises(Dropped) as dropped:
        curation.convert_math_row(row, checker.check)
    assert dropped.value.args == (rule,)


@pytest.mark.parametrize("trace", NOT_ONE_THINKING)
def test_a_trace_must_be_one_pair_and_an_answer(checker: AnswerChecker, trace: str) -> None:
    with pytest.raises(Dropped) as dropped:
        curation.convert_math_row(make_math_row(generated_solution=trace), checker.check)
    assert dropped.value.args == (curation.NOT_ONE_THINKING,)


@pytest.mark.parametrize(("row", "reason"), MATH_MALFORMED.values(), ids=MATH_MALFORMED.keys())
def test_malformed_math_rows_name_what_is_wrong(checker: AnswerChecker, row: Any, reason: str) -> None:
    with pytest.raises(Malformed) as malformed:
        curation.convert_math_row(row, checker.check)
    assert reason in malformed.value.args[0]


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
    rows = {"taco": [{"question": "zero"}, {"question": "one"}], "codeforces": [codeforces, {"description": None}]}
    for name, table in rows.items():
        (folder / name / "data").mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(table), folder / name / "data" / "train-00000-of-00001.parquet")
    return str(folder)


def test_code_rows_take_their_statement_from_the_data_set_they_refer_to(statements: str) -> None:
    find = partial(find_statement, statements)
    user, assistant = curation.convert_code_row(make_code_row(), find)
    assert user["content"] == code_prompt("one")
    assert (assistant["reasoning_content"], assistant["content"]) == ("Read, add.", "```cpp\nint main() {}\n```")
    without_reference, _ = curation.convert_code_row(make_code_row(question="Mine.", dataset=None), find)
    assert without_reference["content"] == code_prompt("Mine.")
    user, _ = curation.convert_code_row(make_code_row(dataset="open-r1/codeforces", index="0"), find)
    statement = "Add.\n\nInput\n\nTwo numbers.\n\nExamples\n\nInput\n\n1 2\n\nOutput\n\n3"
    assert user["content"] == code_prompt(statement)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        (make_code_row(judgement="wrong"), curation.NOT_RIGHT),
        (make_code_row(judgement=None), curation.NOT_RIGHT),
        (make_code_row(r1_generation="```cpp\n```"), curation.NOT_ONE_THINKING),
        (make_code_row(index="2"), curation.NO_STATEMENT),
        (make_code_row(dataset="elsewhere"), curation.NO_STATEMENT),
        (make_code_row(dataset="open-r1/codeforces"), curation.NO_STATEMENT),
    ],
)
def test_code_rows_are_dropped_by_rule(statements: str, row: dict, rule: str) -> None:
    with pytest.raises(Dropped) as dropped:
        curation.convert_code_row(row, partial(find_statement, statements))
    assert dropped.value.args == (rule,)


def test_statements_that_cannot_be_loaded_are_an_error(statements: str, tmp_path: Path) -> None:
    with pytest.raises(Malformed, match="`index` is 'x'"):
        curation.convert_code_row(make_code_row(index="x"), partial(find_statement, statements))
    with pytest.raises(UserError, match="problem statements of apps .train. cannot be loaded.*--statements"):
        find_statement(str(tmp_path), "apps", "train", 0)


# Sources


def compress_zstd(contents: bytes) -> bytes:
    return pa.compress(contents, codec="zstd", asbytes=True)


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".zst"])
def test_every_line_is_a_row(tmp_path: Path, suffix: str) -> None:
    lines = ['{"n": 0}', "", '{"n": 2}', "x" * 30, "[]", '{"n": "ü"}', '{"n": 6}']
    path = tmp_path / f"rows.jsonl{suffix}"
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": compress_zstd, "": bytes}[suffix]
    path.write_bytes(compress(b"\xef\xbb\xbf" + "\n".join(lines).encode()))  # without a last line break
    (file,) = find_files([str(path)], "train")
    rows = list(file.rows())
    assert len(rows) == 7 and rows[1] is BLANK
    assert isinstance(rows[3], Broken) and rows[3].reason.startswith("not JSON (Expecting value")
    assert [rows[i] for i in (0, 2, 4, 5, 6)] == [{"n": 0}, {"n": 2}, [], {"n": "ü"}, {"n": 6}]


def read_values(source: object, split: str = "train") -> list[Any]:
    return [row["n"] for file in find_files([str(source)], split) for row in file.rows()]


def test_parquet_and_lists_are_read_and_a_copy_of_a_hub_data_set_by_its_split(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.Table.from_pylist([{"n": i} for i in range(10)]), data / "cot-0.parquet", row_group_size=3)
    (data / "tir-0.json").write_text(json.dumps([{"n": 20}, {"n": 21}]))
    assert read_values(tmp_path, "cot") == list(range(10))
    assert read_values(f"{tmp_path}/**/*.json", "cot") == [20, 21]
    assert len(find_files([str(tmp_path)], "train")) == 2  # no file of that name: all of them


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
    assert (
        read_values(f"{tmp_path}::code", "cot")
        == [10, 11]
        == [load["n"] for load in load_by_datasets(tmp_path, "code")]
    )
    with pytest.raises(UserError, match="found several configurations, expected .*::NAME with one of math, code"):
        find_files([str(tmp_path)], "cot")
    with pytest.raises(UserError, match="found no configuration 'all', expected .*one of math, code"):
        find_files([f"{tmp_path}::all"], "cot")
    with pytest.raises(UserError, match="no split 'train', only cot"):
        find_files([f"{tmp_path}::code"], "train")
    (tmp_path / "one").mkdir()
    write_hub_copy(tmp_path / "one", ["default"])
    assert read_values(tmp_path / "one", "cot") == [0, 1]


def load_by_datasets(folder: Path, configuration: str) -> Dataset:
    return load_dataset(str(folder), configuration, split="cot", cache_dir=str(folder.parent / "cache"))


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
    assert not downloads and [file.name for file in files] == [
        "owner/set/code/x-0.parquet",
        "owner/set/code/x-1.parquet",
    ]
    hub = {"hub": "owner/set", "configuration": "code", "split": "cot", "revision": "abc"}
    assert sources.describe_source(files) == [{"file": f"code/x-{i}.parquet", **hub} for i in (0, 1)]
    assert [row["n"] for file in files for row in file.rows()] == [10, 11]
    assert downloads == ["code/x-0.parquet", "code/x-1.parquet"]
    with pytest.raises(UserError, match="found several configurations, expected .* math, code"):
        find_files(["owner/set"], "cot")


FORMS = {
    "list": ("rows.jsonl", "[{1}, {1}]", "one list or object"),
    "list over lines": ("rows.jsonl", "[\n {1},\n {1}\n]", "one list or object"),
    "object of a list": ("rows.json", '{"train": [{1}, {1}]}', "one list or object"),
    "rows over lines": ("rows.jsonl", "{\n2\n}\n{\n2\n}", "JSON over several lines"),
}


@pytest.mark.parametrize(("name", "text", "form"), FORMS.values(), ids=FORMS.keys())
def test_other_forms_of_json_are_named(tmp_path: Path, name: str, text: str, form: str) -> None:
    row = json.dumps(make_chat_row(0))
    path = tmp_path / name
    path.write_text(text.replace("{1}", row).replace("2", row.strip("{}")))
    with pytest.raises(UserError, match=f"{path}: found {form}.*, expected a row, a JSON object, on each line"):
        next(find_files([str(path)], "train")[0].rows())


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet", "rows.arrow"])
def test_a_file_that_is_cut_is_refused(tmp_path: Path, name: str) -> None:
    path, rows = tmp_path / name, [make_chat_row(n) for n in range(3000)]
    lines, table = "\n".join(map(json.dumps, rows)).encode(), pa.Table.from_pylist(rows)
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
    pq.write_table(pa.table({"messages": [make_chat_row(0)["messages"]], "n": ["x"]}), tmp_path / "b.parquet")
    assert dict(run("chat", [tmp_path / "a.parquet", tmp_path / "b.parquet"]).shapes) == {
        "prompt and completion": 1,
        "messages": 1,
    }


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("missing.jsonl", "there is no such file"),
        ("./some/where", "there is no such file"),
        ("no*.jsonl", "found no file of this pattern"),
        ("empty.jsonl", "the file is empty"),
        ("notes.txt", "found a file ending in '.txt', expected .jsonl, .json, .csv, .parquet, .arrow"),
        ("folder", "found no file in this folder that ends in .jsonl, .json, .csv, .parquet, .arrow"),
        ("broken.parquet", "not readable to its end as .parquet"),
        ("nobody-at-all/nothing", "no data set that can be loaded"),
    ],
)
def test_invalid_sources_are_refused(tmp_path: Path, monkeypatch, source: str, reason: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.parquet").write_text("x")
    with pytest.raises(UserError) as error:
        next(find_files([source], "train")[0].rows())
    assert reason in str(error.value)


# The command


def test_all_rows_are_accounted_for(run, tmp_path: Path) -> None:
    rows = [
        *(make_math_row(n) for n in range(6)),
        *MATH_DROPPED.values(),
        *(make_math_row(generated_solution=trace) for trace in NOT_ONE_THINKING),
        *(row for row, _ in MATH_MALFORMED.values()),
        make_math_row(9, generated_solution=TRACE.format(n=9).replace("Hm", "Hm " * 400)),
        "",
        "{broken",
        '{"problem": "\\ud800"}'.replace('"problem"', '"problem_type"'),
    ]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    report = run("math", source, cutoff_length=500)
    assert report.num_rows == len(rows) - 1 == report.num_malformed + sum(report.dropped.values()) + report.num_kept
    assert (report.num_malformed, report.num_kept) == (len(MATH_MALFORMED) + 1, 6)
    expected = dict.fromkeys(MATH_DROPPED, 1) | {curation.NOT_ONE_THINKING: len(NOT_ONE_THINKING)}
    expected |= {"longer than 500 tokens": 1}
    expected[curation.OTHER_PROBLEM_TYPE] += 1  # half of a surrogate pair is another type
    assert report.dropped == expected
    faults = (tmp_path / "store.malformed.txt").read_text().splitlines()
    assert len(faults) == report.num_malformed
    assert faults[0].startswith(f"{source}:{6 + len(MATH_DROPPED) + len(NOT_ONE_THINKING) + 1}: found list")
    assert faults[-1].startswith(f"{source}:{len(rows) - 1}: not JSON")
    table = run.said[-1]
    assert "3,155.01" in table and f"{'kept':<10}" in table and "p95" in table
    assert [sequence.sequence_id for sequence in TokenStore(tmp_path / "store")] == list(range(6))
    assert decode_texts(tmp_path / "store")[2].count("<think>") == 1
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert manifest["counts"]["dropped"] == report.dropped
    assert manifest["longest"] == report.longest > 500
    assert f"The longest has {report.longest:,} tokens; --cutoff-length {report.longest} keeps all whole" in table
    assert manifest["filters"]["prompt"] == math_prompt("{ORIGINAL QUESTION}")
    assert not (tmp_path / "store.unfinished").exists()


def test_code_rows_are_prepared_the_same_way(run, tmp_path: Path, statements: str) -> None:
    rows = [
        make_code_row(),
        make_code_row(judgement="wrong"),
        make_code_row(index="9"),
        make_code_row(index="x"),
        make_code_row(index="0"),
    ]
    source = tmp_path / "cpp-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist(rows), source)
    report = run("code", source, statements=statements)
    assert report.dropped == {curation.NOT_RIGHT: 1, curation.NO_STATEMENT: 1}
    assert (report.num_malformed, report.num_kept) == (1, 2)
    assert f"{source}:4: `index` is 'x'" in (tmp_path / "store.malformed.txt").read_text()
    prompt = f"<|im_start|>user\n{code_prompt('one')}<|im_end|>\n<|im_start|>assistant\n<think>\nRead, add."
    assert decode_texts(tmp_path / "store")[0].startswith(prompt)
    assert "2,861.25" in run.said[-1]


def test_lengths_are_summarized() -> None:
    for lengths, expected in ((range(1, 101), (50.5, 50, 95, 100)), ([7], (7, 7, 7, 7)), ([1, 2], (1.5, 1, 2, 2))):
        report = PrepareReport()
        for length in lengths:
            report.count(Result(0, KEPT, num_tokens=length), "rows.jsonl")
        assert report.lengths == dict(zip(("mean", "p50", "p95", "max"), expected, strict=True))


def test_a_sample_is_the_rows_with_the_smallest_keys_that_fit(run, tmp_path: Path, monkeypatch) -> None:
    """Once it is complete, rows with larger keys are not looked at; which ones depends on nothing but the rows."""
    monkeypatch.setattr(pipeline, "_ROUND_ROWS", 10)
    rows = [make_chat_row(n) for n in range(200)]
    for n in range(0, 200, 5):
        rows[n]["messages"][1]["content"] *= 100
    source = write_lines(tmp_path / "rows.jsonl", rows)
    report = run("chat", source, sample=30, cutoff_length=200, seed=7)
    keys = [(make_sample_key(7, 1, line), line) for line in range(200)]
    expected = sorted(key for key in keys if key[1] % 5)[:30]
    assert [sequence.sequence_id for sequence in TokenStore(tmp_path / "store")] == sorted(line for _, line in expected)
    num_drawn = sum(key <= expected[-1] for key in keys)
    assert report.dropped == {"longer than 200 tokens": num_drawn - 30, "not drawn for the sample": 200 - num_drawn}
    assert report.num_rows == 200 and report.num_kept == 30
    run("chat", source, "other", sample=30, cutoff_length=200, seed=8)
    assert [sequence.sequence_id for sequence in TokenStore(tmp_path / "other")] != sorted(n for _, n in expected)


def count_rounds(monkeypatch, stop_after: int | None = None) -> list[tuple[str, list[int]]]:
    """Record file and rows of each round, and raise KeyboardInterrupt after a number of them."""
    rounds: list[tuple[str, list[int]]] = []
    convert = Round.convert

    def count(part: Round) -> None:
        if len(rounds) == stop_after:
            raise KeyboardInterrupt
        rounds.append((Path(part.file.path).name, part.numbers.tolist()))
        convert(part)

    monkeypatch.setattr(Round, "convert", count)
    return rounds


def test_rows_beyond_a_complete_sample_are_not_converted(run, tmp_path: Path, monkeypatch) -> None:
    """Of the files together the rows with the smallest keys: about 100 of the first, 100 of 2000 of the second."""
    monkeypatch.setattr(pipeline, "_BATCH_ROWS", 8)
    for name in ("a", "b"):
        write_lines(tmp_path / f"{name}.jsonl", [make_chat_row(n) for n in range(2000)])
    rounds = count_rounds(monkeypatch)
    assert run("chat", [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], sample=100).num_kept == 100
    assert sum(len(positions) for name, positions in rounds if name == "a.jsonl") == 108
    assert sum(len(positions) for name, positions in rounds if name == "b.jsonl") < 150
    keys = sorted((make_sample_key(42, source, n), 2000 * (source - 1) + n) for source in (1, 2) for n in range(2000))
    assert TokenStore(tmp_path / "store").sequence_ids.tolist() == sorted(place for _, place in keys[:100])


def test_neither_processes_nor_interruptions_change_a_byte(run, tmp_path: Path, monkeypatch) -> None:
    """What was finished is not done again."""
    monkeypatch.setattr(pipeline, "_ROUND_ROWS", 40)
    monkeypatch.setattr(pipeline, "_MIN_ROWS", 10)
    files = [write_lines(tmp_path / f"{k}.jsonl", [make_chat_row(n) for n in range(150)]) for k in range(2)]
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
    source = write_lines(tmp_path / "rows.jsonl", [make_chat_row(n) for n in range(5)])
    assert run("chat", source) is not None
    assert "formats: messages 5" in run.said[-1].splitlines()
    before = read_contents(tmp_path / "store")
    assert run("chat", source) is None and "is there already" in run.said[-1]
    with pytest.raises(UserError, match=r"name another --output[\s\S]*filters.cutoff_length: 16384 there, 7 here"):
        run("chat", source, cutoff_length=7)
    write_lines(source, [make_chat_row(n) for n in range(6)])
    with pytest.raises(UserError, match="source.0.fingerprint: "):
        run("chat", source)
    assert read_contents(tmp_path / "store") == before
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is there already and is no token store"):
        run("chat", source, "folder")


def test_a_source_named_twice_keeps_its_row_numbers(run, tmp_path: Path) -> None:
    """Naming a source twice upsamples it: it starts over each time it is named."""
    a = write_lines(tmp_path / "a.jsonl", [make_chat_row(n) for n in range(3)])
    b = write_lines(tmp_path / "b.jsonl", [make_chat_row(7), "", "broken", make_chat_row(8)])
    for order in ("abb", "aba", "ab"):
        run("chat", [{"a": a, "b": b}[name] for name in order], order)
        store = TokenStore(tmp_path / order)
        files, rows = store.origins()
        expected = [(f"{name}.jsonl", row) for name in order for row in {"a": [0, 1, 2], "b": [0, 3]}[name]]
        assert [(Path(file).name, row) for file, row in zip(files, rows.tolist(), strict=True)] == expected
        assert len(set(store.sequence_ids.tolist())) == len(expected)
        assert (tmp_path / f"{order}.malformed.txt").read_text().startswith(f"{b}:3: not JSON")
        assert (tmp_path / f"{order}.malformed.txt").read_text().count("\n") == 1
        assert (f"{b}: named 2 times, so each of its rows counts 2 times" in run.said) == (order == "abb")
    with pytest.raises(UserError, match="source.2.file: .* there, nothing here"):
        run("chat", [a, b], "abb")
    long = write_lines(tmp_path / "long.jsonl", [make_chat_row(0), make_long_row()])
    with pytest.raises(UserError):
        run("chat", [long, long], "long", cutoff_length=100, overlong="truncate", max_malformed=0.1)
    assert (tmp_path / "long.unfinished" / "malformed.txt").read_text().count(f"{long}:2: the prompt alone has") == 1


def test_unfinished_work_of_another_request_is_deleted_on_demand_only(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_chat_row(0), "x"])
    with pytest.raises(UserError):
        run("chat", source, max_malformed=0.1)
    before = {path: path.read_bytes() for path in (tmp_path / "store.unfinished").rglob("*.*")}
    with pytest.raises(UserError) as error:
        run("chat", source, seed=1)
    expected = "found unfinished work of another request:\n  seed: 42 there, 1 here\nexpected the same values"
    assert expected in str(error.value)
    assert {path: path.read_bytes() for path in (tmp_path / "store.unfinished").rglob("*.*")} == before
    assert run("chat", source, seed=1, again=True).num_kept == 1
    assert "beginning again" in "".join(run.said) and not (tmp_path / "store.unfinished").exists()


def test_a_second_command_on_an_output_leaves_the_first_alone(run, tmp_path: Path, monkeypatch) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_chat_row(n) for n in range(5)])
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
    source = write_lines(tmp_path / "rows.jsonl", [*(make_chat_row(n) for n in range(8)), "x", {"a": 1}])
    with pytest.raises(UserError) as error:
        run("chat", source, max_malformed=0.19)
    assert "2 of 10 rows are malformed (20.00%), expected at most 19.00%" in str(error.value)
    assert f"The first: {source}:9: not JSON" in str(error.value)
    listed = (tmp_path / "store.unfinished" / "malformed.txt").read_text()
    assert f"{source}:10: found the keys a; expected" in listed
    assert run("chat", source, max_malformed=0.2).num_kept == 8
    assert "10 rows were converted before" in run.said
    assert (tmp_path / "store.malformed.txt").read_text() == listed


def test_a_prompt_longer_than_the_cutoff_is_named(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_chat_row(0), make_long_row()])
    with pytest.raises(UserError) as error:
        run("chat", source, cutoff_length=100, overlong="truncate", max_malformed=0.1)
    assert f"{source}:2: the prompt alone has 2" in str(error.value)
    assert "expected fewer than the cutoff, 100" in str(error.value)
    for overlong in ("truncate", "drop"):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        report = run("chat", source, cutoff_length=100, overlong=overlong)
        assert (report.num_malformed, report.num_kept) == ((1, 1) if overlong == "truncate" else (0, 1))
        assert report.dropped == ({} if overlong == "truncate" else {"prompt alone longer than the cutoff": 1})
    # Where long sequences are dropped, it is one of them.
    shutil.rmtree(tmp_path / "store")
    assert run("chat", source, cutoff_length=100, max_malformed=0.0).num_kept == 1


def test_truncation_keeps_the_beginning(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_chat_row(0)])
    run("chat", source, "uncut")
    report = run("chat", source, cutoff_length=25, overlong="truncate")
    assert report.lengths["max"] == 25
    assert decode_texts(tmp_path / "uncut")[0].startswith(decode_texts(tmp_path / "store")[0])


def test_nothing_left_is_an_error_with_the_table(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_math_row(generation_model="QwQ-32B")])
    with pytest.raises(UserError) as error:
        run("math", source)
    assert "no row is left" in str(error.value) and curation.OTHER_MODEL in str(error.value)
    source = write_lines(tmp_path / "short.jsonl", [make_chat_row(0)])
    with pytest.raises(UserError) as error:
        run("chat", source, cutoff_length=25)
    assert "no row is left" in str(error.value) and "longer than 25 tokens" in str(error.value)
    assert not (tmp_path / "store").exists()


def test_a_sample_of_more_than_all_is_all(run, tmp_path: Path) -> None:
    rows = [make_chat_row(n) for n in range(50)]
    for row in rows[:40]:
        row["messages"][1]["content"] *= 20
    source = write_lines(tmp_path / "rows.jsonl", rows)
    assert run("chat", source, sample=10, cutoff_length=100).num_kept == 10
    assert run("chat", source, "all", sample=80).num_kept == 50
    assert "Fewer than the 80 that were asked for" in run.said[-1]


def test_a_template_that_refuses_a_row_is_a_fault_of_the_row(run, tmp_path: Path, tokenizer: str) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    made = make_tokenizer()
    made.chat_template = template + made.chat_template
    made.save_pretrained(tokenizer)
    with_system = {"messages": [{"role": "system", "content": "s"}, *make_chat_row(1)["messages"]]}
    source = write_lines(tmp_path / "rows.jsonl", [make_chat_row(0), with_system])
    report = run("chat", source)
    assert (report.num_malformed, report.num_kept, report.dropped) == (1, 1, {})
    assert f"{source}:2: the chat template" in (tmp_path / "store.malformed.txt").read_text()


def test_a_json_list_in_a_jsonl_file_is_refused_with_the_remedy(run, tmp_path: Path, tokenizer: str) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps([make_chat_row(0), make_chat_row(1)], indent=1))
    with pytest.raises(
        UserError,
        match="found one list or object of rows, expected a row",
    ):
        prepare(PrepareRequest("chat", (str(source),), tokenizer, "train"), tmp_path / "other")
    assert run("chat", source.rename(tmp_path / "rows.json")).num_kept == 2


def test_a_tokenizer_that_cannot_serve_is_refused(run, tmp_path: Path, tokenizer: str) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_chat_row(0)])
    made = make_tokenizer()
    made.chat_template = None
    made.save_pretrained(tmp_path / "bare")
    request = PrepareRequest("chat", (str(source),), str(tmp_path / "bare"), "train")
    with pytest.raises(UserError, match="has no chat template"):
        prepare(request, tmp_path / "store")
    request = PrepareRequest("chat", (str(source),), str(tmp_path / "nowhere"), "train")
    with pytest.raises(UserError, match="--tokenizer: .*no tokenizer can be loaded .* not found either"):
        prepare(request, tmp_path / "store")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text('{"model_type": "qwen3"}')
    request = PrepareRequest("chat", (str(source),), str(tmp_path / "weights"), "train")
    with pytest.raises(UserError, match="found no tokenizer.json in this folder; copy tokenizer.json"):
        prepare(request, tmp_path / "store")
