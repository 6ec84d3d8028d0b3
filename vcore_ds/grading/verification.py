"""Mathematical answers compared in a process that can be killed."""

import json
import select
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Literal

Verdict = Literal["equivalent", "different", "unfinished"]

_WALL_SECONDS_PER_CPU_SECOND = 30
"""Limit for a process that waits, which takes no CPU time."""


class AnswerChecker:
    """Compares answers with `math-verify` in a process of its own, which is replaced whenever it has to be killed."""

    def __init__(self, limit_seconds: int) -> None:
        """`limit_seconds`: CPU time for one pair of answers, whole seconds, at least 1."""
        self._limit_seconds = limit_seconds
        self._process: subprocess.Popen[bytes] | None = None
        # Many solutions of one problem give the same answer.
        self.check = lru_cache(maxsize=4096)(self._check)

    def _check(self, expected: str, answer: str) -> Verdict:
        """Whether `answer` is equivalent to `expected`, both in LaTeX; `unfinished` where that took too long, or too
        much memory."""
        if self._process is None:
            script = Path(__file__).with_name("check_answers.py")
            # -P: the script's own folder is no place to import from.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(script), str(self._limit_seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        line = b""
        try:
            self._process.stdin.write(json.dumps([expected, answer]).encode() + b"\n")
            self._process.stdin.flush()
            patience = self._limit_seconds * _WALL_SECONDS_PER_CPU_SECOND
            if select.select([self._process.stdout], [], [], patience)[0]:
                line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            self.close()
            return "unfinished"
        return "equivalent" if json.loads(line) else "different"

    def close(self) -> None:
        """Ends the process that compares, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
