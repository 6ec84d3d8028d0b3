r"""Reward of an answer: 1.0 where its last \boxed{...} is mathematically equal to the expected answer, else 0.0.

This file stands alone: `vcore-ds handoff` copies it beside the data. It needs math-verify where answers are compared
(with verl: pip install "math-verify[antlr4_9_3]", since verl's hydra needs that antlr).

Answers are text that nobody has checked, and sympy can take hours, or all memory, over a short one. They are compared
in a process of its own, with limits that the kernel keeps, and which is replaced whenever it had to be ended.
"""

import json
import logging
import math
import re
import resource
import select
import subprocess
import sys
import threading
import time
from typing import Any

LIMIT_SECONDS = 5
"""CPU time for one pair of answers."""
MAX_MEMORY_BYTES = 4 * 2**30
MAX_ANSWER_CHARACTERS = 2000
"""A longer answer is none."""
_WALL_SECONDS_PER_CPU_SECOND = 30
"""Limit for a process that waits, which takes no CPU time."""

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or an escaped character: `\\{` is text."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """The reward as verl calls it (reward.custom_reward_function)."""
    answer = last_boxed(solution_str)
    if answer is None or not answer.strip() or len(answer) > MAX_ANSWER_CHARACTERS:
        return 0.0
    return float(_judge.is_equal(str(ground_truth), answer))


def boxed_answer_reward(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
    """The reward as TRL calls it: completions as texts or as messages, and the column `ground_truth`."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [compute_score("", text, truth) for text, truth in zip(texts, ground_truth, strict=True)]


def last_boxed(text: str) -> str | None:
    r"""What stands between the braces of the last complete \boxed{...}; None where there is none."""
    boxes = {boxed.end() for boxed in _BOXED.finditer(text)}
    last: tuple[int, int] | None = None
    open_braces: list[int] = []
    for brace in _BRACE.finditer(text) if boxes else ():
        if brace.group() == "{":
            open_braces.append(brace.end())
        elif brace.group() == "}" and open_braces and (begin := open_braces.pop()) in boxes:
            last = max(last, (begin, brace.start())) if last is not None else (begin, brace.start())
    return None if last is None else text[slice(*last)]


class _Judge:
    """The process that compares; one for each process that gives rewards, and one comparison at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def is_equal(self, expected: str, answer: str) -> bool:
        """False also where that could not be found out within the limits."""
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            line = self._ask(self._process, json.dumps([expected, answer]).encode() + b"\n")
            if line:
                return bool(json.loads(line))
            self._process.kill()
            errors = self._process.communicate()[1].decode(errors="replace")
            self._process = None
        if "ModuleNotFoundError" in errors:  # every answer would be wrong, and training would go on
            raise RuntimeError(f"math-verify cannot be imported by {sys.executable}; install it.\n{errors}")
        return False

    def _ask(self, process: "subprocess.Popen[bytes]", question: bytes) -> bytes:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(question)
            process.stdin.flush()
            wait_seconds = LIMIT_SECONDS * _WALL_SECONDS_PER_CPU_SECOND
            return process.stdout.readline() if select.select([process.stdout], [], [], wait_seconds)[0] else b""
        except BrokenPipeError:
            return b""


_judge = _Judge()


def _compare_lines() -> None:
    """The process's work: a line [expected, answer] in, a line true or false out."""
    logging.disable(logging.CRITICAL)  # math-verify warns that its own time limits are switched off
    from math_verify import parse, verify

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    hard_seconds = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for line in sys.stdin:
        pair = json.loads(line)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + LIMIT_SECONDS, hard_seconds))
        try:
            gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in pair)
            result = bool(gold and given) and verify(gold, given, timeout_seconds=None)
        except Exception:  # whatever sympy raises about an expression: it is not shown to be equal
            result = False
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    _compare_lines()
