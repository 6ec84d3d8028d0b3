"""Prompts of problems, the final answer in a model's output, and whether it is right."""

import re
from collections.abc import Sequence
from typing import Literal

from vcore_ds.data.verification import AnswerChecker

Kind = Literal["math", "number", "choice"]
"""How an answer is extracted and compared. `math`: the last box, by math-verify. `number`: the same, or the last number
without a filled box. `choice`: the last box, exactly the letter."""

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or an escaped character such as `\\{`."""
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/[1-9]\d*)?")
_TEXT_MACRO = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def answer_spans(text: str) -> list[tuple[int, int]]:
    r"""Return the character ranges inside every closed `\boxed{...}`, in linear time also with unclosed ones."""
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
    """Extract the final answer of an output, thinking included; None where there is none."""
    spans = answer_spans(output)
    boxed = output[slice(*spans[-1])].strip() if spans else ""
    if boxed and kind == "choice":
        # Accept `(B)`, `\text{B}` and `B.` as B.
        bare = _TEXT_MACRO.sub(r"\1", boxed).strip().strip("().:").strip()
        return bare if re.fullmatch(r"[A-Z]", bare) else boxed
    if not boxed and kind == "number" and (numbers := _NUMBER.findall(output)):
        return numbers[-1].replace(",", "")
    return boxed or None


def is_right(answer: str | None, expected: str, kind: Kind, checker: AnswerChecker) -> bool:
    """Compare an answer with the expected one, LaTeX without dollar signs or a letter; False on a timeout."""
    if answer is None or kind == "choice" or answer == expected:
        return answer == expected
    return checker.check(expected, answer) == "equivalent"


def last_code_block(text: str) -> str | None:
    """Return the text between the last two lines of backticks, as LiveCodeBench does; None with fewer than two."""
    lines = text.split("\n")
    fences = [i for i, line in enumerate(lines) if line.lstrip().startswith("```")]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) >= 2 else None


# Prompts of training and evaluation: the paper's (appendices "Dataset Curation for supervised tasks" and "Evaluation
# Details") and CHAMP's.
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
"""CHAMP's prompt, without the hints and examples of most of its conversations."""


def math_prompt(question: str) -> str:
    """Return the user's turn for a mathematical problem."""
    return _MATH.format(question=question)


def code_prompt(question: str) -> str:
    """Return the user's turn for a competitive programming problem in C++."""
    return _CODE.format(question=question)


def choice_prompt(question: str, options: Sequence[str]) -> str:
    """Return the user's turn for a multiple-choice question with options from (A)."""
    lines = (f"({chr(ord('A') + i)}): {option}" for i, option in enumerate(options))
    return _CHOICE.format(question=question, options="\n".join(lines))
