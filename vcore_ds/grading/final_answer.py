"""The final answer of a model's output, and whether it is the expected one."""

import re
from typing import Literal

from vcore_ds.grading.answers import answer_spans
from vcore_ds.grading.verification import AnswerChecker

Kind = Literal["math", "number", "choice"]
"""How an answer is found and compared. `math`: the last box, equivalent by math-verify. `number`: the same, and the
last number where the box is empty or there is none, as small models seldom box. `choice`: the last box, exactly the
letter."""

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/[1-9]\d*)?")
_TEXT_MACRO = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def final_answer(output: str, kind: Kind) -> str | None:
    """What the output gives as its answer, thinking included; None where it gives none."""
    spans = answer_spans(output)
    boxed = output[slice(*spans[-1])].strip() if spans else ""
    if boxed:
        return _letter(boxed) if kind == "choice" else boxed
    if kind == "number":
        numbers = _NUMBER.findall(output)
        return numbers[-1].replace(",", "") if numbers else None
    return None


def is_right(answer: str | None, expected: str, kind: Kind, checker: AnswerChecker) -> bool:
    """Whether an answer is the expected one; False where comparing took too long.

    Args:
        expected: LaTeX without dollar signs, or a letter.
    """
    if answer is None:
        return False
    if kind == "choice" or answer == expected:
        return answer == expected
    return checker.check(expected, answer) == "equivalent"


def _letter(boxed: str) -> str:
    r"""`(B)`, `\text{B}` and `B.` are the letter B; other answers stay as they are."""
    bare = _TEXT_MACRO.sub(r"\1", boxed).strip().strip("().:").strip()
    return bare if re.fullmatch(r"[A-Z]", bare) else boxed
