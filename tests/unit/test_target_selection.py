"""The traces of the experiments on scores are right, each by another way to its answer."""

import datetime
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from tests.experiments import champ_scores, target_selection


def compute_answer(task: str, question: str) -> str:
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    if task == "addition":
        return str(sum(numbers))
    if task == "subtraction":
        return str(numbers[0] - numbers[1])
    if task == "weekday":
        monday = datetime.date(2024, 1, 1)
        start = next(d for d in (monday + datetime.timedelta(i) for i in range(7)) if f"{d:%A}" in question)
        return f"{start + datetime.timedelta(numbers[0]):%A}"
    words = re.findall(r"[a-z]+", question.split(":")[-1])
    if task == "sorting":
        return " ".join(sorted(words))
    if task == "spelling":
        return "".join(reversed(question.split()[1]))
    return str(words.count(question.split()[3]))


@pytest.mark.parametrize("task", target_selection.TASKS)
def test_answers_and_their_steps_are_right(task: str) -> None:
    draw = random.Random(0)
    for _ in range(200):
        question, answer = target_selection.TASKS[task](draw)
        assert answer.split("Answer: ")[1] == compute_answer(task, question)
        for left, sign, right, result in re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", answer):
            assert int(left) + int(f"{sign}{right}") == int(result)


def test_no_question_is_in_two_files(tmp_path: Path) -> None:
    target_selection.make_data(1, tmp_path)
    files = [tmp_path / f"{name}.jsonl" for name in ("mixture", "pool", "held_out")]
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    questions = [row["messages"][0]["content"] for row in rows]
    assert len({*questions}) == len(questions) == 6 * 40 + 8 + 24
    assert {row["task"] for row in rows[6 * 40 :]} == {"weekday"}


def test_auc_can_count_pairs_of_the_same_problem_only() -> None:
    values = np.array([3.0, 1.0, 2.0, 2.0])
    is_right = np.array([True, False, True, False])
    problems = np.array(["a", "a", "b", "b"])
    assert champ_scores.auc(values, is_right, problems, within=False) == 0.875  # 3 of 4 pairs, and a tie
    assert champ_scores.auc(values, is_right, problems, within=True) == 0.75
    assert np.isnan(champ_scores.auc(values[:1], is_right[:1], problems[:1], within=True))
