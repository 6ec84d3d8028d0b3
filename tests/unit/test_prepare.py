"""Raw rows in the schemas of the real data sets to token stores: rules, sampling, restarts, every kind of bad row."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.common.errors import UserError
from vcore_ds.data.answers import AnswerChecker, code_prompt, math_prompt
from vcore_ds.data.messages import Dropped, Malformed
from vcore_ds.data.prepare import curation, pipeline, shards, sources
from vcore_ds.data.prepare.curation import PrepareRequest, find_statement
from vcore_ds.data.prepare.pipeline import prepare
from vcore_ds.data.prepare.selection import LengthSummary, PrepareReport
from vcore_ds.data.prepare.sources import BLANK, Broken, Shard, find_shards
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
        max_malformed_share: float = 1.0,
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
            max_malformed_share=max_malformed_share,
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


@pytest.mark.parametrize("shard_bytes", [1, 7, 8, 64, 10_000])
def test_every_line_is_in_exactly_one_shard(tmp_path: Path, monkeypatch, shard_bytes: int) -> None:
    monkeypatch.setattr(sources, "_JSONL_SHARD_BYTES", shard_bytes)
    lines = ['{"n": 0}', "", '{"n": 2}', "x" * 30, "[]", '{"n": "ü"}', '{"n": 6}']
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())  # without a last line break
    rows, first = {}, 0
    for shard in find_shards([str(path)], "train"):
        numbers = list(shard.rows())
        rows |= {first + number: row for number, row in numbers}
        first += len(numbers)
    assert list(rows) == list(range(7)) and rows[1] is BLANK
    assert rows[3] == Broken("not JSON (Expecting value at column 1)")
    assert [rows[i] for i in (0, 2, 4, 5, 6)] == [{"n": 0}, {"n": 2}, [], {"n": "ü"}, {"n": 6}]


def test_parquet_and_lists_are_read_and_a_copy_of_a_hub_data_set_by_its_split(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "_PARQUET_SHARD_ROWS", 4)
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.Table.from_pylist([{"n": i} for i in range(10)]), data / "cot-0.parquet", row_group_size=3)
    (data / "tir-0.json").write_text(json.dumps([{"n": 20}, {"n": 21}]))
    cot = find_shards([str(tmp_path)], "cot")
    assert [[row["n"] for _, row in shard.rows()] for shard in cot] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    (tir,) = find_shards([f"{tmp_path}/**/*.json"], "cot")
    assert list(tir.rows()) == [(0, {"n": 20}), (1, {"n": 21})]
    assert len(find_shards([str(tmp_path)], "train")) == 3  # no file of that name: all of them


def test_hub_data_are_streamed_by_data_file(tmp_path: Path) -> None:
    """`datasets` streams from a folder in the hub's layout."""
    (tmp_path / "data").mkdir()
    for number in range(3):
        table = pa.Table.from_pylist([{"n": 10 * number + i} for i in range(2)])
        pq.write_table(table, tmp_path / "data" / f"cot-0000{number}-of-00003.parquet")
        pq.write_table(table, tmp_path / "data" / f"tir-0000{number}-of-00003.parquet")
    streamed = sources.load_hub(str(tmp_path), "cot", None)
    assert streamed.num_shards == 3
    hub_shards = [Shard("hub", str(tmp_path), i, 3, "cot") for i in range(3)]
    assert [[row["n"] for _, row in shard.rows()] for shard in hub_shards] == [[0, 1], [10, 11], [20, 21]]
    with pytest.raises(UserError, match="the split 'cpp' cannot be loaded"):
        sources.load_hub(str(tmp_path), "cpp", None)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("missing.jsonl", "there is no such file"),
        ("./some/where", "there is no such file"),
        ("no*.jsonl", "found no file of this pattern"),
        ("empty.jsonl", "the file is empty"),
        ("notes.txt", "found a file ending in '.txt', expected .jsonl, .json or .parquet"),
        ("folder", "found no .jsonl, .json or .parquet file in this folder"),
        ("broken.parquet", "not a readable parquet file"),
        ("nobody-at-all/nothing", "no data set of that name can be reached on the hub"),
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
        find_shards([source], "train")
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
    assert LengthSummary.summarize(list(range(1, 101))) == LengthSummary(mean=50.5, p50=50, p95=95, max=100)
    assert LengthSummary.summarize([7]) == LengthSummary(mean=7, p50=7, p95=7, max=7)


def test_a_sample_is_the_rows_with_the_smallest_keys_that_fit(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "_JSONL_SHARD_BYTES", 2_000)
    rows = [make_chat_row(n) for n in range(200)]
    for n in range(0, 200, 5):
        rows[n]["messages"][1]["content"] *= 100
    source = write_lines(tmp_path / "rows.jsonl", rows)
    run("chat", source, sample=30, cutoff_length=200, seed=7)
    fits = []
    line = 0
    for number, shard in enumerate(find_shards([str(source)], "train")):
        for index, _ in shard.rows():
            if line % 5:
                fits.append((shards.make_sample_key(7, number, index), line))
            line += 1
    expected = sorted(line for _, line in sorted(fits)[:30])
    assert [sequence.sequence_id for sequence in TokenStore(tmp_path / "store")] == expected
    run("chat", source, "other", sample=30, cutoff_length=200, seed=8)
    assert [sequence.sequence_id for sequence in TokenStore(tmp_path / "other")] != expected


def test_neither_processes_nor_interruptions_change_a_byte(run, tmp_path: Path, monkeypatch) -> None:
    """Interrupted in both rounds; what was finished is not done again."""
    monkeypatch.setattr(sources, "_JSONL_SHARD_BYTES", 4_000)
    monkeypatch.setattr("vcore_ds.data.prepare.pipeline._BLOCK", 16)
    source = write_lines(tmp_path / "rows.jsonl", [make_chat_row(n) for n in range(300)])
    run("chat", source, "straight", sample=100)
    run("chat", source, "parallel", sample=100, processes=2)
    assert read_contents(tmp_path / "parallel") == read_contents(tmp_path / "straight")

    done: list[str] = []

    def interrupt(name: str, after: int) -> None:
        function = getattr(shards, name)

        def interrupted(task, *rest):
            if len(done) == after:
                raise KeyboardInterrupt
            done.append(name)
            return function(task, *rest)

        monkeypatch.setattr(shards, name, interrupted)

    num_shards, num_blocks = len(find_shards([str(source)], "train")), -(-100 // 16)
    assert num_shards > 4
    with monkeypatch.context() as monkeypatch:
        interrupt("curate_shard", 3)
        with pytest.raises(KeyboardInterrupt):
            run("chat", source, "store", sample=100)
    with monkeypatch.context() as monkeypatch:
        interrupt("curate_shard", -1)
        interrupt("tokenize_block", num_shards + 2)
        with pytest.raises(KeyboardInterrupt):
            run("chat", source, "store", sample=100)
    assert done == ["curate_shard"] * num_shards + ["tokenize_block"] * 2
    with monkeypatch.context() as monkeypatch:
        interrupt("tokenize_block", -1)
        run("chat", source, "store", sample=100)
    assert done.count("tokenize_block") == num_blocks
    assert read_contents(tmp_path / "store") == read_contents(tmp_path / "straight")


def test_a_finished_store_is_left_alone(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_chat_row(n) for n in range(5)])
    assert run("chat", source) is not None
    assert run.said[0] == f"{source}: format messages, by the keys of its rows (messages)"
    before = read_contents(tmp_path / "store")
    assert run("chat", source) is None and "is there already" in run.said[-1]
    with pytest.raises(UserError, match="found a store made with another filters: .*name another --output"):
        run("chat", source, cutoff_length=7)
    write_lines(source, [make_chat_row(n) for n in range(6)])
    with pytest.raises(UserError, match="made with another source"):
        run("chat", source)
    assert read_contents(tmp_path / "store") == before
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is there already and is no token store"):
        run("chat", source, "folder")


def test_a_source_named_twice_keeps_its_row_numbers(run, tmp_path: Path, monkeypatch) -> None:
    """Naming a source twice upsamples it: it starts over each time it is named, also where it has several shards."""
    monkeypatch.setattr(sources, "_JSONL_SHARD_BYTES", 100)
    a = write_lines(tmp_path / "a.jsonl", [make_chat_row(n) for n in range(3)])
    b = write_lines(tmp_path / "b.jsonl", [make_chat_row(7), "", "broken", make_chat_row(8)])
    assert len(find_shards([str(b)], "cot")) > 1
    for order in ("abb", "aba", "ab"):
        run("chat", [{"a": a, "b": b}[name] for name in order], order)
        store = TokenStore(tmp_path / order)
        files, rows = store.origins()
        expected = [(f"{name}.jsonl", row) for name in order for row in {"a": [0, 1, 2], "b": [0, 3]}[name]]
        assert [(Path(file).name, row) for file, row in zip(files, rows.tolist(), strict=True)] == expected
        assert len(set(store.sequence_ids.tolist())) == len(expected)
        assert (tmp_path / f"{order}.malformed.txt").read_text().startswith(f"{b}:3: not JSON")
        assert (tmp_path / f"{order}.malformed.txt").read_text().count("\n") == 1
    with pytest.raises(UserError, match="found a store made with another source"):
        run("chat", [a, b], "abb")
    long = write_lines(tmp_path / "long.jsonl", [make_chat_row(0), make_long_row()])
    with pytest.raises(UserError):
        run("chat", [long, long], "long", cutoff_length=100, overlong="truncate", max_malformed_share=0.1)
    assert (tmp_path / "long.unfinished" / "malformed.txt").read_text().count(f"{long}:2: the prompt alone has") == 1


def test_unfinished_work_of_another_request_is_deleted_on_demand_only(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_chat_row(0), "x"])
    with pytest.raises(UserError):
        run("chat", source, max_malformed_share=0.1)
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
    select, refusals = pipeline.selection.select, []

    def select_while_another_begins(*arguments):
        with pytest.raises(UserError) as refused:
            run("chat", source, seed=2, again=True)  # which would delete what is there
        refusals.append(str(refused.value))
        if len(refusals) == 1:
            raise KeyboardInterrupt
        return select(*arguments)

    monkeypatch.setattr(pipeline.selection, "select", select_while_another_begins)
    with pytest.raises(KeyboardInterrupt):
        run("chat", source)
    report = run("chat", source, seed=1, again=True)  # begins again, and is alone all the same
    assert report is not None and report.num_kept == 5 and not (tmp_path / "store.unfinished").exists()
    assert len(refusals) == 2 and all("store.unfinished: found another process writing" in text for text in refusals)


def test_too_many_malformed_rows_are_refused_and_a_higher_limit_goes_on(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [*(make_chat_row(n) for n in range(8)), "x", {"a": 1}])
    with pytest.raises(UserError) as error:
        run("chat", source, max_malformed_share=0.19)
    assert "2 of 10 rows are malformed (20.00%), expected at most 19.00%" in str(error.value)
    assert f"The first: {source}:9: not JSON" in str(error.value)
    listed = (tmp_path / "store.unfinished" / "malformed.txt").read_text()
    assert f"{source}:10: found the keys a; expected" in listed
    assert run("chat", source, max_malformed_share=0.2).num_kept == 8
    assert "1 of 1 shards were finished before" in run.said
    assert (tmp_path / "store.malformed.txt").read_text() == listed


def test_a_prompt_longer_than_the_cutoff_is_named(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_chat_row(0), make_long_row()])
    with pytest.raises(UserError) as error:
        run("chat", source, cutoff_length=100, overlong="truncate", max_malformed_share=0.1)
    assert f"{source}:2: the prompt alone has 2" in str(error.value)
    assert "expected fewer than the cutoff, 100" in str(error.value)
    for overlong in ("truncate", "drop"):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        report = run("chat", source, cutoff_length=100, overlong=overlong)
        assert report.dropped == {"prompt alone longer than the cutoff": 1}
    # Where long sequences are dropped, it is one of them.
    shutil.rmtree(tmp_path / "store")
    assert run("chat", source, cutoff_length=100, max_malformed_share=0.0).num_kept == 1


def test_truncation_keeps_the_beginning(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_chat_row(0)])
    run("chat", source, "uncut")
    report = run("chat", source, cutoff_length=25, overlong="truncate")
    assert report.lengths.max == 25
    assert decode_texts(tmp_path / "uncut")[0].startswith(decode_texts(tmp_path / "store")[0])


def test_nothing_left_is_an_error_with_the_table(run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "rows.jsonl", [make_math_row(generation_model="QwQ-32B")])
    with pytest.raises(UserError) as error:
        run("math", source)
    assert "no row is left" in str(error.value) and curation.OTHER_MODEL in str(error.value)
    source = write_lines(tmp_path / "short.jsonl", [make_chat_row(0)])
    with pytest.raises(UserError) as error:
        run("chat", source, cutoff_length=25)
    assert "no sequence is left" in str(error.value) and "longer than 25 tokens" in str(error.value)
    assert not (tmp_path / "store").exists()


def test_a_sample_that_does_not_fit_is_an_error_and_a_small_set_is_not(run, tmp_path: Path) -> None:
    rows = [make_chat_row(n) for n in range(50)]
    for row in rows[:40]:
        row["messages"][1]["content"] *= 20
    source = write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=r"only \d of 20 rows drawn at random fit --cutoff-length 100, expected 10"):
        run("chat", source, sample=10, cutoff_length=100)
    assert run("chat", source, sample=80).num_kept == 50
    assert "Fewer than the 80 that were asked for" in run.said[-1]


def test_a_template_that_refuses_a_row_is_a_fault_of_the_row(run, tmp_path: Path, tokenizer: str) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    made = make_tokenizer()
    made.chat_template = template + made.chat_template
    made.save_pretrained(tokenizer)
    with_system = {"messages": [{"role": "system", "content": "s"}, *make_chat_row(1)["messages"]]}
    source = write_lines(tmp_path / "rows.jsonl", [make_chat_row(0), with_system])
    assert run("chat", source).dropped == {"refused by the chat template": 1}
    assert f"{source}:2: the chat template" in (tmp_path / "store.malformed.txt").read_text()


def test_a_json_list_in_a_jsonl_file_is_refused_with_the_remedy(run, tmp_path: Path, tokenizer: str) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps([make_chat_row(0), make_chat_row(1)], indent=1))
    with pytest.raises(UserError, match="every line is a row by itself: name a file that is one list .json"):
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
