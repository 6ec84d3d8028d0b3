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
import unicodedata
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
        """Compare two answers (`clean_answer`); `unfinished` if that takes too much time or memory."""
        if self._process is None:
            # -P: keep the script's folder out of sys.path.
            command, pipe = [sys.executable, "-P", __file__, str(self._limit_seconds)], subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert self._process.stdin is not None and self._process.stdout is not None
        line, pair = b"", [clean_answer(expected), clean_answer(answer)]
        try:
            self._process.stdin.write(json.dumps(pair).encode() + b"\n")
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
"""How an answer is extracted and compared. `math`: the last filled box, by math-verify. `number`: the same, or the last
number without a filled box. `choice`: the letter in the last filled box. `code`: the last complete block with a
program, graded elsewhere. Thinking that is cut off has no answer."""

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # A brace, or an escaped character such as `\{`


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


# One notation of answers. The rules are applied to the expected answer and to the given one alike.

_SYMBOLS = {
    **dict.fromkeys("−﹣－", "-"),
    **dict.fromkeys("\u00a0\u2009\u202f", r"\ "),  # spaces that keep the digits of a number together
    "⁄": "/",
    "×": r"\times ",
    "·": r"\cdot ",
    "÷": r"\div ",
    "°": r"^\circ ",
    "±": r"\pm ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "∅": r"\emptyset ",
    r"\varnothing": r"\emptyset ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
}
_SYMBOL = re.compile("|".join(map(re.escape, _SYMBOLS)))
_DASH = re.compile(r"(^|[\s(\[{,=])[\u2010-\u2013]\s*(?=[\d.])")  # a hyphen or en dash as a minus sign
_FRACTION = re.compile("[¼½¾⅐-⅞]")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_ROOT = re.compile(r"√\s?(\d+|[A-Za-z]|\([^()]*\))")
_CURRENCY = re.compile(r"\\?\$|[€£¥₹]|\s?\b(?:dollars?|cents?|euros?|USD|EUR|GBP)\b")
_GROUPS = r"\d{1,3}(?:(?:\\[,;:! ]|,\\!|\{,\}|~)\s*\d{3})+(?!\d)"
_GROUPED = re.compile(rf"(?<![\d.,]){_GROUPS}")  # 1\,234
_COMMAS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")  # 1,234; inside brackets these are two numbers
_POWER = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]\+?(-?\d+)(?![\w.])")  # 1.5e-3
_MIXED = re.compile(r"(?<![\w./])(\d+)(?:\s|\\[ ,;])\s*(\d+)/(\d+)(?![\w/]|\.\d)")  # 3 1/2
_TEXT_MACRO = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_LEAD = re.compile(r"^\\text\s*\{[^{}]*(?:\bis|[:=])\s*\}\s*(?=\S)")  # \text{The answer is }5
_NUMBER = re.compile(
    rf"(?:(?<![\w)\]}}])-)?(?:\\[dt]?frac\{{\d+\}}\{{[1-9]\d*\}}|(?:{_GROUPS}|\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)"
    r"(?:\.\d+)?(?:[eE][+-]?\d+\b|(?:\s\d+)?/[1-9]\d*)?|\.\d+)(?:\s?\\?%)?"
)
_LETTER = re.compile(
    r"(?i:(?:the )?(?:correct )?(?:option|choice|answer)(?: is)?:? )?\(?([A-Z])(?:[).:]+|\s[-–—]\s|$)(.*)", re.DOTALL
)
_FURTHER_LETTER = re.compile(r"\s*(?:[,;/&+]|and\b|or\b)\W*[A-Z](?:\W|$)")


def clean_answer(text: str) -> str:
    r"""Write an answer in one notation: LaTeX for the symbols, fractions, roots and powers of Unicode; numbers without
    thousands separators, `1e5` as a power of ten, `3 1/2` as a mixed number; without currency, dollar signs around a
    formula, a box, or a full stop."""
    if boxes := _list_boxes(text):
        text = boxes[-1]
    text = _LEAD.sub("", _CURRENCY.sub("", _replace_symbols(text)).strip())
    text = _GROUPED.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    if not re.search(r"[(\[{]", text):
        text = _COMMAS.sub(lambda number: number[0].replace(",", ""), text)
    text = _POWER.sub(r"\1\\times 10^{\2}", text)
    text = _MIXED.sub(lambda m: rf"{m[1]}\frac{{{m[2]}}}{{{m[3]}}}" if int(m[2]) < int(m[3]) else m[0], text)
    return text.strip().rstrip(".").strip()


def _list_boxes(text: str) -> list[str]:
    """List the contents of the boxes that are not empty."""
    return [box for span in find_answer_spans(text) if (box := text[slice(*span)].strip())]


def _replace_symbols(text: str) -> str:
    """Replace characters by LaTeX's names."""
    text = _FRACTION.sub(lambda one: f" {unicodedata.normalize('NFKC', one[0])}", text)
    text = _SUPERSCRIPT.sub(lambda some: f"^{{{unicodedata.normalize('NFKC', some[0])}}}", text)
    text = _DASH.sub(r"\1-", _ROOT.sub(r"\\sqrt{\1}", text))
    return _SYMBOL.sub(lambda one: _SYMBOLS[one[0]], text)


def read_letter(text: str) -> str:
    r"""Read the letter of a choice, alone or with text beside it: `B`, `(B)`, `\text{B. Paris}`, `option B`. Returns
    the text where it does not begin with one letter, or goes on with another: `A circle`, `A and B`."""
    bare = _TEXT_MACRO.sub(r"\1", text).replace("$", "").strip()
    letter = _LETTER.fullmatch(bare)
    return text if letter is None or _FURTHER_LETTER.match(letter[2]) else letter[1]


def final_answer(output: str, kind: Kind) -> str | None:
    """Extract the final answer of an output, complete thinking included; None if there is none."""
    if "<think>" in output.rpartition("</think>")[2]:
        return None
    if kind == "code":
        return _find_program(output)
    if boxes := _list_boxes(output):
        return read_letter(boxes[-1]) if kind == "choice" else boxes[-1]
    if kind == "number" and (numbers := _NUMBER.findall(_replace_symbols(output))):
        return clean_answer(numbers[-1])
    return None


_NO_PROGRAM = frozenset({"text", "txt", "plaintext", "output", "input", "console", "json", "markdown"})


def _find_program(output: str) -> str | None:
    """Return the last complete block of code that is a program: its label names a language, or, where no label does, a
    parenthesis stands in it, which samples of input and output seldom have."""
    blocks: list[tuple[str, str]] = []
    opened: tuple[str, int] | None = None  # label and first line
    lines = output.split("\n")
    for i, line in enumerate(lines):
        if not (fence := re.match(r"\s*```+\s*([^`]*)$", line)):
            continue
        label = fence[1].strip().lower()
        if opened is None or label:  # a label after a block that was not closed begins another one
            opened = label, i + 1
        else:
            blocks.append((opened[0], "\n".join(lines[opened[1] : i])))
            opened = None
    programs = [code for label, code in blocks if label and label.split()[0] not in _NO_PROGRAM]
    programs = programs or [code for label, code in blocks if not label and "(" in code]
    programs = programs or [code for _, code in blocks]
    return programs[-1] if programs else None


def is_right(answer: str | None, expected: str, kind: Kind, checker: AnswerChecker) -> bool:
    """Compare an answer with the expected one, LaTeX or a letter; False on a timeout."""
    if answer is None or kind in ("choice", "code"):
        return answer == expected
    return clean_answer(answer) == clean_answer(expected) or checker.check(expected, answer) == "equivalent"


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
