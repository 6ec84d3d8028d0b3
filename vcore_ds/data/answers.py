"""The final answer in a model's output, and whether it is the expected one."""

import re
from collections.abc import Sequence
from typing import Literal

from vcore_ds.data.verification import AnswerChecker

Kind = Literal["math", "number", "choice"]
"""How an answer is found and compared. `math`: the last box, equivalent by math-verify. `number`: the same, and the
last number where the box is empty or there is none, as small models seldom box. `choice`: the last box, exactly the
letter."""

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or an escaped character: `\\{` is text."""
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/[1-9]\d*)?")
_TEXT_MACRO = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def answer_spans(text: str) -> list[tuple[int, int]]:
    r"""Ranges of characters between the braces of every `\boxed{...}`, nested braces included; unclosed ones are left
    out. One pass, however many boxes are never closed."""
    boxes = {boxed.end() for boxed in _BOXED.finditer(text)}
    if not boxes:
        return []
    spans, open_braces = [], []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            open_braces.append(brace.end())
        elif brace.group() == "}" and open_braces and (begin := open_braces.pop()) in boxes:
            spans.append((begin, brace.start()))
    return sorted(spans)


def final_answer(output: str, kind: Kind) -> str | None:
    """What the output gives as its answer, thinking included; None where it gives none."""
    spans = answer_spans(output)
    boxed = output[slice(*spans[-1])].strip() if spans else ""
    if boxed and kind == "choice":
        # `(B)`, `\text{B}` and `B.` are the letter B.
        bare = _TEXT_MACRO.sub(r"\1", boxed).strip().strip("().:").strip()
        return bare if re.fullmatch(r"[A-Z]", bare) else boxed
    if not boxed and kind == "number" and (numbers := _NUMBER.findall(output)):
        return numbers[-1].replace(",", "")
    return boxed or None


def is_right(answer: str | None, expected: str, kind: Kind, checker: AnswerChecker) -> bool:
    """Whether an answer is the expected one (LaTeX without dollar signs, or a letter); False where comparing took too
    long."""
    if answer is None or kind == "choice" or answer == expected:
        return answer == expected
    return checker.check(expected, answer) == "equivalent"


def last_code_block(text: str) -> str | None:
    """What stands between the last two lines that begin with three backticks, as LiveCodeBench takes it; None where
    there are not two."""
    lines = text.split("\n")
    fences = [i for i, line in enumerate(lines) if line.lstrip().startswith("```")]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) >= 2 else None


# Prompts, one place for training and evaluation: the paper's (appendices "Dataset Curation for supervised tasks" and
# "Evaluation Details") and CHAMP's own, which the quickstart trains with.


_MATH = (
    "You are a helpful and accurate assistant for solving the following math problem:\n"
    "{question}\n"
    "\n"
    "Please reason step by step, and put the correct answer within \\boxed{{}} at last."
)

_CODE = (
    "You are an expert competitive programmer. You will be given a problem statement, test case constraints, and "
    "example test inputs and outputs.\n"
    "Please reason step by step about the solution (that must respect memory and time limits), then provide a complete "
    "implementation in c++17.\n"
    "\n"
    "Your solution must read input from standard input (cin) and write output to standard output (cout).\n"
    "Do not include any debug prints or additional output.\n"
    "\n"
    "Put your final solution within a single code block:\n"
    "```cpp\n"
    "<your code here>\n"
    "```\n"
    "\n"
    "# Problem\n"
    "{question}\n"
    "\n"
    "Now solve the problem and return the code."
)

_CHOICE = (
    "You are a helpful and accurate assistant for solving the following multiple-choice question:\n"
    "{question}\n"
    "Options are:\n"
    "{options}\n"
    "\n"
    "Please reason step by step, and put the correct answer within \\boxed{{}} at last."
)

CHAMP = "Solve the following problem. Make sure to show your work before giving the final answer.\n\n{statement}"
"""CHAMP's own, without the hints and examples that it gave in most conversations."""


def math_prompt(question: str) -> str:
    """The user's turn for a mathematical problem."""
    return _MATH.format(question=question)


def code_prompt(question: str) -> str:
    """The user's turn for a problem of competitive programming in C++."""
    return _CODE.format(question=question)


def choice_prompt(question: str, options: Sequence[str]) -> str:
    """The user's turn for a multiple-choice question; options are lettered from A."""
    lines = (f"({chr(ord('A') + i)}): {option}" for i, option in enumerate(options))
    return _CHOICE.format(question=question, options="\n".join(lines))
