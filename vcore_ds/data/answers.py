"""Prompts of problems, extraction of the final answer from a model's output, and its comparison.

math-verify compares answers in a child process, because comparing can hang inside C code. The child is this file, run
as a script, so that it imports math-verify only. For each line of JSON, expected answer and answer, it writes a line,
`true` or `false`. The kernel's resource limits end it if a pair takes too much CPU time or memory.
"""

import json
import logging
import math
import re
import resource
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

Verdict = Literal["equivalent", "different", "unfinished"]

MAX_MEMORY_BYTES = 4 * 2**30
_HANG_SECONDS = 600  # bounds the wait for a child that hangs without using CPU time; a loaded machine is only slow


class AnswerChecker:
    """Compares answers in a child process, which is restarted after a kill."""

    def __init__(self, limit_seconds: int) -> None:
        """`limit_seconds`: CPU time for one pair of answers, whole seconds, at least 1."""
        self._limit_seconds = limit_seconds
        self._process: subprocess.Popen[bytes] | None = None
        # Many solutions of one problem give the same answer.
        self.check = lru_cache(maxsize=4096)(self._check)

    def _check(self, expected: str, answer: str) -> Verdict:
        """Compare two answers in LaTeX; `unfinished` if that takes too much time or memory."""
        if self._process is None:
            # -P: keep the script's folder out of sys.path.
            command, pipe = [sys.executable, "-P", __file__, str(self._limit_seconds)], subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert self._process.stdin is not None and self._process.stdout is not None
        line = b""
        try:
            self._process.stdin.write(json.dumps([expected, answer]).encode() + b"\n")
            self._process.stdin.flush()
            if select.select([self._process.stdout], [], [], _HANG_SECONDS)[0]:
                line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            self.close()
            return "unfinished"
        return "equivalent" if json.loads(line) else "different"

    def close(self) -> None:
        """End the child process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _compare_lines(limit_seconds: int) -> None:
    logging.disable(logging.CRITICAL)  # math-verify warns that its time limits are off; they cannot end C code
    from math_verify import parse, verify

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    hard_seconds = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for line in sys.stdin:
        # CPU time, so that other load does not change the result; in whole seconds, rounded up.
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + limit_seconds, hard_seconds))
        try:
            gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in json.loads(line))
            result = bool(gold and given) and verify(gold, given, timeout_seconds=None)
        except Exception:  # sympy raises exceptions of many classes; equivalence is not shown
            result = False
        print(json.dumps(result), flush=True)


Kind = Literal["math", "number", "choice", "code"]
"""How an answer is extracted and compared. `math`: the last box, by math-verify. `number`: the same, or the last number
without a filled box. `choice`: the last box, exactly the letter. `code`: the last block of code, graded elsewhere."""

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # A brace, or an escaped character such as `\{`
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/[1-9]\d*)?")
_TEXT_MACRO = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def find_answer_spans(text: str) -> list[tuple[int, int]]:
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
    """Extract the final answer of an output, thinking included; None if there is none."""
    if kind == "code":  # between the last two lines of backticks, as LiveCodeBench does
        lines = output.split("\n")
        fences = [i for i, line in enumerate(lines) if line.lstrip().startswith("```")]
        return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) >= 2 else None
    spans = find_answer_spans(output)
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
    if answer is None or kind in ("choice", "code") or answer == expected:
        return answer == expected
    return checker.check(expected, answer) == "equivalent"


# Prompts of training and evaluation: the paper's (appendices "Dataset Curation for supervised tasks" and "Evaluation
# Details") and CHAMP's.
_MATH = """\
You are a helpful and accurate assistant for solving the following math problem:
{problem}

Please reason step by step, and put the correct answer within \\boxed{} at last."""

_CODE = """\
You are an expert competitive programmer. You will be given a problem statement, test case constraints, and \
example test inputs and outputs.
Please reason step by step about the solution (that must respect memory and time limits), then provide a complete \
implementation in c++17.

Your solution must read input from standard input (cin) and write output to standard output (cout).
Do not include any debug prints or additional output.

Put your final solution within a single code block:
```cpp
<your code here>
```

# Problem
{problem}

Now solve the problem and return the code."""

_CHOICE = """\
You are a helpful and accurate assistant for solving the following multiple-choice question:
{problem}
Options are:
{options}

Please reason step by step, and put the correct answer within \\boxed{} at last."""

CHAMP = "Solve the following problem. Make sure to show your work before giving the final answer.\n\n{statement}"
"""CHAMP's prompt, without the hints and examples of most of its conversations."""


def math_prompt(question: str) -> str:
    """Return the user's turn for a mathematical problem."""
    return fill_template(_MATH, question)


def code_prompt(question: str) -> str:
    """Return the user's turn for a competitive programming problem in C++."""
    return fill_template(_CODE, question)


def choice_prompt(question: str, options: Sequence[str]) -> str:
    """Return the user's turn for a multiple-choice question with options from (A)."""
    return fill_template(_CHOICE, question, options)


def fill_template(template: str, question: str, options: Sequence[str] = ()) -> str:
    """Return the user's turn: a template with its `{problem}` and `{options}` replaced. Other braces are text."""
    lines = "\n".join(f"({chr(ord('A') + i)}): {option}" for i, option in enumerate(options))
    return re.sub(r"\{(problem|options)\}", lambda field: question if field[1] == "problem" else lines, template)


if __name__ == "__main__":
    _compare_lines(int(sys.argv[1]))
