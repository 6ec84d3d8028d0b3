"""Mathematical answers compared by math-verify in a child process, because comparing can hang inside C code.

The child is this file, run as a script, so that it imports math-verify only. For each line of JSON, expected answer and
answer, it writes a line, `true` or `false`. The kernel's resource limits end it where a pair takes too much CPU time or
memory.
"""

import json
import logging
import math
import resource
import select
import subprocess
import sys
import time
from functools import lru_cache
from typing import Literal

Verdict = Literal["equivalent", "different", "unfinished"]

MAX_MEMORY_BYTES = 4 * 2**30
_WALL_SECONDS_PER_CPU_SECOND = 30
"""Bounds the wait for a child that hangs without using CPU time."""


class AnswerChecker:
    """Compares answers in a child process, which is replaced when it was killed."""

    def __init__(self, limit_seconds: int) -> None:
        """`limit_seconds`: CPU time for one pair of answers, whole seconds, at least 1."""
        self._limit_seconds = limit_seconds
        self._process: subprocess.Popen[bytes] | None = None
        # Many solutions of one problem give the same answer.
        self.check = lru_cache(maxsize=4096)(self._check)

    def _check(self, expected: str, answer: str) -> Verdict:
        """Compare two answers in LaTeX; `unfinished` where that took too much time or memory."""
        if self._process is None:
            # -P: keep the script's folder out of sys.path.
            command = [sys.executable, "-P", __file__, str(self._limit_seconds)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        line = b""
        try:
            self._process.stdin.write(json.dumps([expected, answer]).encode() + b"\n")
            self._process.stdin.flush()
            if select.select([self._process.stdout], [], [], self._limit_seconds * _WALL_SECONDS_PER_CPU_SECOND)[0]:
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
    """The loop of the child process."""
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


if __name__ == "__main__":
    _compare_lines(int(sys.argv[1]))
