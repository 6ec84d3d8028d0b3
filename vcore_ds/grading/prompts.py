"""Prompts, one place for training and evaluation: the paper's (appendices "Dataset Curation for supervised tasks" and
"Evaluation Details") and CHAMP's own, which the quickstart trains with."""

from collections.abc import Sequence

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
