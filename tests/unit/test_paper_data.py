"""`launch_scripts/paper_data.py`: rows in the schemas of the paper's data sets to conversations, by its rules."""

import json
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch_scripts import paper_data
from vcore_ds.common.errors import UserError
from vcore_ds.data.answers import AnswerChecker, code_prompt, math_prompt
from vcore_ds.data.messages import Dropped
from vcore_ds.data.prepare.rows import read_chat_row

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
    user, assistant = paper_data.convert_math_row(make_math_row(expected_answer="\\frac{8}{2}"), checker.check)
    assert user == {"role": "user", "content": math_prompt("What is $4 + 0$?")}
    assert assistant == {"role": "assistant", "reasoning_content": "Hm, 4.", "content": "The answer is \\boxed{4}."}
    without_opening = make_math_row(generated_solution=TRACE.format(n=4).removeprefix("<think>"))
    assert paper_data.convert_math_row(without_opening, checker.check)[1] == assistant


def test_the_last_box_behind_the_thinking_counts() -> None:
    compared = []

    def check(expected: str, answer: str) -> str:
        compared.append((expected, answer))
        return "equivalent"

    trace = "<think>\\boxed{1}</think>So \\boxed{2}, or rather \\boxed{\\frac{3}{1}}."
    paper_data.convert_math_row(make_math_row(3, generated_solution=trace), check)
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
    (paper_data.OTHER_PROBLEM_TYPE, make_math_row(problem_type="no_answer_extracted", expected_answer=None)),
    (paper_data.OTHER_MODEL, make_math_row(generation_model="QwQ-32B")),
    (paper_data.NOT_BOXED, make_math_row(generated_solution="<think>\n\\boxed{4}\n</think>\n\nFour.")),
    (paper_data.NOT_EQUIVALENT, make_math_row(expected_answer="5")),
    (paper_data.UNFINISHED, make_math_row(expected_answer="9^{9^{9^{9}}}")),
    *((paper_data.NOT_ONE_THINKING, make_math_row(generated_solution=trace)) for trace in NOT_ONE_THINKING),
    (paper_data.MISSING, make_math_row(expected_answer=None)),
    (paper_data.MISSING, make_math_row(generated_solution=" ")),
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
    user, assistant = paper_data.convert_code_row(make_code_row(), statements)
    assert user["content"] == code_prompt("one")
    assert (assistant["reasoning_content"], assistant["content"]) == ("Read, add.", "```cpp\nint main() {}\n```")
    statement = "Add.\n\nInput\n\nTwo numbers.\n\nExamples\n\nInput\n\n1 2\n\nOutput\n\n3"
    for row, expected in (
        (make_code_row(question="Mine.", dataset=None), "Mine."),
        (make_code_row(dataset="open-r1/codeforces", index="0"), statement),
    ):
        assert paper_data.convert_code_row(row, statements)[0]["content"] == code_prompt(expected)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        (make_code_row(judgement="wrong"), paper_data.NOT_RIGHT),
        (make_code_row(judgement=None), paper_data.NOT_RIGHT),
        (make_code_row(r1_generation="```cpp\n```"), paper_data.NOT_ONE_THINKING),
        (make_code_row(index="2"), paper_data.NO_STATEMENT),
        (make_code_row(dataset="elsewhere"), paper_data.NO_STATEMENT),
        (make_code_row(dataset="open-r1/codeforces"), paper_data.NO_STATEMENT),
        (make_code_row(index="x"), paper_data.NO_STATEMENT),
        (make_code_row(index="9" * 5000), paper_data.NO_STATEMENT),  # int() raises for thousands of digits
    ],
)
def test_code_rows_are_dropped_by_rule(statements: str, row: dict, rule: str) -> None:
    with pytest.raises(Dropped) as dropped:
        paper_data.convert_code_row(row, statements)
    assert dropped.value.args == (rule,)


def run_script(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["paper_data.py", *map(str, words)])
    paper_data.main()


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a data set in the hub's layout."""
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")
    return folder


def test_all_math_rows_are_accounted_for(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rule, and the rows that pass as conversations that `prepare` reads, also where only some are wanted."""
    good = [make_math_row(n) for n in range(6)]
    source, output = write_rows(tmp_path / "rows", [*good, *(row for _, row in MATH_DROPPED)]), tmp_path / "math.jsonl"
    words = ["math", output, "--source", source, "--split", "train", "--answer-seconds", 1]
    run_script(monkeypatch, *words)
    printed = (line.strip().split("  ") for line in capsys.readouterr().out.splitlines())
    assert {rule: int(number) for number, rule in printed} == Counter({"kept": 6}) + Counter(r for r, _ in MATH_DROPPED)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    expected = {math_prompt(row["problem"]) for row in good}
    assert {read_chat_row(row).messages[0]["content"] for row in rows} == expected and len(rows) == 6
    with pytest.raises(UserError, match=r"math\.jsonl: is there already"):
        run_script(monkeypatch, *words)
    words[1] = tmp_path / "two.jsonl"
    run_script(monkeypatch, *words, "--number", 2)
    assert words[1].read_text().splitlines() == output.read_text().splitlines()[:2]


def test_unusable_sources_are_refused(tmp_path: Path, monkeypatch, statements: str) -> None:
    output, source = tmp_path / "code.jsonl", write_rows(tmp_path / "rows", [make_code_row(), make_code_row(index="0")])
    words = ["code", output, "--split", "train", "--statements", statements, "--source"]
    with pytest.raises(UserError, match="found no column expected_answer, generated_solution, generation_model, prob"):
        run_script(monkeypatch, "math", *words[1:], source)
    with pytest.raises(UserError, match="nowhere: split train cannot be loaded"):
        run_script(monkeypatch, *words, tmp_path / "nowhere")
    with pytest.raises(UserError, match="apps: split train cannot be loaded"):
        paper_data.find_statement(str(tmp_path), "apps", "train", "0")
    run_script(monkeypatch, *words, source)
    assert len(output.read_text().splitlines()) == 2
