"""Which of CHAMP's recorded solutions end in the right answer, where that can be told without doubt.

CHAMP has the answer to each problem, and a summary in one sentence of each recorded solution. A solution is judged
where the answer is a number: wrong where the summary has other numbers only, right where it has no numbers but the
answer and those of the problem's statement. The rest is left out. CHAMP's authors marked the first wrong step in 170
solutions to such problems: all of the 87 that are called wrong here have one, and 17 of the 43 that are called right (a
right answer in spite of a wrong step).
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from vcore_ds.grading.prompts import CHAMP

_NUMBER = re.compile(r"-?\d+(?:/[1-9]\d*|\.\d+)?")
_SEPARATOR = re.compile(r"(?<=\d),(?=\d{3})")
_FRACTION = re.compile(r"\\frac\{(\d+)\}\{([1-9]\d*)\}")


def judged_traces(problems: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The solutions that can be judged, each once, as lines of the quickstart's files with `is_right`.

    Left out: those that continue a given part of a solution, or were given a misleading hint.
    """
    for problem_id, problem in problems.items():
        answer = _NUMBER.fullmatch(problem["_answer"])
        if answer is None:
            continue
        statement = problem["_text"].strip()
        seen = set()
        for source, conversation in problem["conversations"].items():
            solution, _, summary = conversation["messages"][-3:]
            is_whole = "Soln" not in source and "Misleading" not in source
            if not is_whole or solution["error"] is not None or summary["error"] is not None:
                continue
            is_right = judge(summary["text"], Fraction(answer.group()), statement)
            text = solution["text"].strip()
            if is_right is None or text in seen:
                continue
            seen.add(text)
            messages = [
                {"role": "user", "content": CHAMP.format(statement=statement)},
                {"role": "assistant", "content": text},
            ]
            yield {"messages": messages, "problem": problem_id, "source": source, "is_right": is_right}


def judge(summary: str, answer: Fraction, statement: str) -> bool | None:
    """Whether a summary gives the answer to the problem; None where that cannot be told."""
    given = _numbers(summary)
    if answer in given:
        return True if given - _numbers(statement) == {answer} else None
    return False if given else None


def _numbers(text: str) -> set[Fraction]:
    text = _FRACTION.sub(r"\1/\2", _SEPARATOR.sub("", text))
    return {Fraction(number) for number in _NUMBER.findall(text)}
