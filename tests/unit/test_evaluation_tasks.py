"""An evaluation's tasks: what is read from each data set's rows, what is asked, what counts as right."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.benchmark_rows import ROWS, write_rows
from tests.helpers.late_imports import LateModule
from vcore_ds.commands.evaluate.champ import HELD_OUT
from vcore_ds.common.errors import UserError
from vcore_ds.data.answers import AnswerChecker, choice_prompt, final_answer, is_right, math_prompt

if TYPE_CHECKING:
    from inspect_ai.dataset import Sample

tasks = LateModule("vcore_ds.commands.evaluate.tasks")


@pytest.fixture(scope="module")
def checker():
    checker = AnswerChecker(5)
    yield checker
    checker.close()


def read(*words: str) -> "list[Sample]":
    (task,) = tasks.choose_tasks(words)
    return task.problems


@pytest.mark.parametrize(
    ("task", "ids", "expected", "right", "wrong"),
    [
        ("aime", ["60"], "024", r"so \boxed{24}", r"\boxed{24}, no: \boxed{25}"),
        ("olympiad", ["1606", "1610"], r"\frac{x}{2}", r"\boxed{x/2}", r"\boxed{x/3}"),
        ("math500", ["test/algebra/1.json"], r"\frac{1}{2}", r"\boxed{0.5}", "0.5"),
        ("gsm8k", ["00001"], "1002", r"\boxed{1{,}002}", r"\boxed{1000}"),
        ("rbench", ["r1"], "F", r"\boxed{\text{(F)}}", r"\boxed{E or F}"),
        ("supergpqa", ["u0", "u1", "u2", "u3"], "B", r"\boxed{B}", r"\boxed{b}"),
    ],
)
def test_a_benchmark_is_read_and_graded(
    task: str, ids: list[str], expected: str, right: str, wrong: str, tmp_path: Path, checker: AnswerChecker
) -> None:
    problems = read(write_rows(tmp_path, task))
    assert [problem.id for problem in problems] == ids and problems[0].target == expected
    kind = tasks.BENCHMARKS[task].kind
    assert kind is not None
    assert is_right(final_answer(right, kind), expected, kind, checker)
    assert not is_right(final_answer(wrong, kind), expected, kind, checker)


def test_prompts_are_those_of_training(tmp_path: Path) -> None:
    assert read(write_rows(tmp_path, "aime"))[0].input == math_prompt("What is 20 + 4?")
    asked = str(read(write_rows(tmp_path, "supergpqa"))[0].input)
    assert asked == choice_prompt("Which one?", ["one", "two", "three"])
    assert "question:\nWhich one?\nOptions are:\n(A): one\n(B): two\n(C): three\n\nPlease reason" in asked
    assert str(read(write_rows(tmp_path, "livecodebench"))[0].input).count("c++17") == 1
    assert [problem.input for problem in read(write_rows(tmp_path, "ojbench"))] == ["In cpp:"]


def test_several_answers_are_right_in_any_order(tmp_path: Path, checker: AnswerChecker) -> None:
    expected = str(read(write_rows(tmp_path, "olympiad"))[1].target)
    assert expected == "2,-2"
    assert is_right("-2, 2", expected, "math", checker) and not is_right("2", expected, "math", checker)


@pytest.mark.parametrize(
    ("output", "kind", "answer"),
    [
        ("it is 7, or 1,234", "number", "1234"),
        ("-3/4 and 2.50.", "number", "2.50"),
        (r"1 then \boxed{ 8 } then 9", "number", "8"),
        ("1,2,3", "number", "3"),
        (r"7, put into \boxed{}", "number", "7"),
        ("no number", "number", None),
        ("it is 7", "math", None),
        (r"\boxed{}", "math", None),
        (r"\boxed{(C)}", "choice", "C"),
        (r"\boxed{\mathrm{C}.}", "choice", "C"),
        (r"\boxed{C and D}", "choice", "C and D"),
        ("```cpp\nold\n```\nbetter:\n```cpp\nint main() {}\n```\nDone.", "code", "int main() {}"),
        ("```cpp\ncut off", "code", None),
    ],
)
def test_final_answers_are_extracted(output: str, kind, answer: str | None) -> None:
    assert final_answer(output, kind) == answer


def test_the_problems_of_supergpqa_are_fixed_and_keep_the_disciplines(tmp_path: Path) -> None:
    sizes = {"Science": 1_500, "Law": 600, "Art": 1}
    rows = [
        {**ROWS["supergpqa"][0], "uuid": f"{name}{number}", "discipline": name}
        for name, size in sizes.items()
        for number in range(size)
    ]
    first, second = (read(write_rows(tmp_path, "supergpqa", order)) for order in (rows, rows[::-1]))
    assert len(first) == 1_000 and [one.id for one in first] == [one.id for one in second]
    counts = {name: sum(str(one.id).startswith(name) for one in first) for name in sizes}
    assert all(abs(counts[name] - size / 2_101 * 1_000) < 1 for name, size in sizes.items())


def test_arithmetic_has_right_answers() -> None:
    problems = read("arithmetic")
    assert len(problems) == 200
    for problem in problems:
        (expression,) = re.findall(r"(?:problem|multiplication): ([-+* \d]+)", str(problem.input))
        assert eval(expression) == int(str(problem.target)), problem


def test_champ_problems_have_numbers_as_answers() -> None:
    problems = read("champ")
    assert [problem.id for problem in problems] == list(HELD_OUT) and len(problems) == 30
    for problem in problems:
        assert final_answer(str(problem.target), "number") == problem.target


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("aime", [{"problem": "1 + 1?"}], r"row 1: found no `answer` or `Answer` or `final_answer` \(its columns: pr"),
        ("gsm8k", [{"question": "?", "answer": "so 5"}], "found no number behind ####"),
        ("rbench", [{**ROWS["rbench"][0], "answer": "G"}], "found 6 options and the answer 'G'"),
        ("supergpqa", [{**ROWS["supergpqa"][0], "options": None}], "found 0 options"),
        ("own", [{"problem": "1 + 1?"}], "own: .*own.jsonl: row 1: found no `answer`"),
        ("math500", [[1]], "row 1: found int"),
        ("aime", [ROWS["aime"][0]] * 2, "found the problem 60 twice"),
        ("gsm8k", [{"question": "half \ud83d pair", "answer": "#### 1"}], "row 1: found .*half of a surrogate pair"),
    ],
)
def test_rows_that_cannot_be_graded_are_refused(task: str, rows: list, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(write_rows(tmp_path, task, rows))


def test_own_problems_are_read_by_their_columns(tmp_path: Path, checker: AnswerChecker) -> None:
    question = r"Is {options} $\{2\}$ or 2?"
    write_rows(tmp_path, "sets", [{"question": question, "answer": "$2$"}])
    write_rows(tmp_path, "quiz", [{"id": "q", "problem": "Which?", "options": ["one", 2], "answer": "B"}])
    # The first column that has text or a number: neither is a truth value, nor white space.
    write_rows(tmp_path, "first", [{"problem": True, "question": " ", "Problem": " Why?\n", "answer": 7}])
    (first,) = tasks.choose_tasks([f"first={tmp_path}/first.jsonl"], prompt="{problem}")[0].problems
    assert (first.input, first.target) == ("Why?", "7")
    words = [f"my-sets.v2={tmp_path}/sets.jsonl", f"quiz={tmp_path}/quiz.jsonl"]
    sets, quiz = tasks.choose_tasks(words)
    assert [sets.name, sets.kind, quiz.kind] == ["my-sets.v2", "math", "choice"]
    assert [(one.id, one.input, one.target) for one in sets.problems] == [("00001", math_prompt(question), "2")]
    assert quiz.problems[0].input == choice_prompt("Which?", ["one", "2"])
    (template := tmp_path / "my template.txt").write_text("Put one of\n{options}\ninto \\boxed{}: {problem}\n")
    (asked,) = tasks.choose_tasks(words[1:], prompt=str(template))
    assert asked.problems[0].input == "Put one of\n(A): one\n(B): 2\ninto \\boxed{}: Which?"
    # A comparison refuses other grading of the same problems.
    (number,), (also,) = (tasks.choose_tasks(words[:1], answer=one, prompt="{problem} x=") for one in ("number", None))
    assert number.describe()[1:] == also.describe()[1:] and number.describe() != also.describe()
    assert number.problems[0].input == f"{question} x="
    assert is_right(final_answer("it is 2", number.kind), str(number.problems[0].target), number.kind, checker)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("own", {"answer": "choice"}, "found 0 options and the answer '2'"),
        ("own", {"prompt": "Answer {question}"}, "a --prompt with {problem}"),
        ("own", {"answer": "choice", "prompt": "{problem}"}, "--prompt: .* without {options}"),
        ("aime", {"prompt": "{problem}"}, "--prompt: found benchmarks alone"),
    ],
)
def test_unfit_prompts_and_answers_are_refused(task: str, options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        tasks.choose_tasks([write_rows(tmp_path, task, [{"problem": "1 + 1?", "answer": "2"}])], **options)


def test_a_row_is_named_by_its_line(tmp_path: Path) -> None:
    """Blank lines count."""
    lines = [*(json.dumps({"id": n, "problem": "1 + 1?", "answer": "2"}) for n in range(30)), "", "{"]
    (tmp_path / "aime.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match="aime.jsonl: row 32: not JSON"):
        read(f"aime={tmp_path}/aime.jsonl")


def test_wrong_names_of_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"found 'amie' \(did you mean \"aime\"\?\)"):
        read("amie")
    with pytest.raises(UserError, match=r"found 'a/b'"):
        read(f"a/b={tmp_path}/none.jsonl")
    with pytest.raises(UserError, match="found champ twice"):
        read("champ", "champ")
    with pytest.raises(UserError, match="a task that makes its own problems"):
        read(f"champ={tmp_path}")
    with pytest.raises(UserError, match="no such file"):
        read(f"gsm8k={tmp_path}/none.jsonl")
    with pytest.raises(UserError, match="expected ojbench=FILE"):
        read("ojbench")
