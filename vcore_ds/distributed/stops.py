"""When a run stops before its end: a signal, a STOP file, a time limit, agreed on by all ranks."""

import math
import time
from collections import deque
from pathlib import Path

import psutil

from vcore_ds.distributed import layout
from vcore_ds.distributed.signals import stop_signals

STOP_FILE = "STOP"
"""Made by hand in the run's folder, it ends the run like SIGTERM, from any machine that sees the folder."""

REASONS = ("SIGTERM", "SIGINT", "SIGUSR1", "the end of its launcher", "the STOP file", "run.time_limit_minutes")

UNMEASURED_SAVE_SECONDS = 300.0
"""Assumed duration of a save before the first one; a tenth of the time limit where that is less."""


class Stops:
    """Every rank asks after every step. A request may reach one rank only, or two ranks in different steps."""

    def __init__(self, folder: Path, time_limit_minutes: float | None):
        """Args:
        folder: the run's, where the STOP file is looked for.
        time_limit_minutes: wall clock, from the start of this process to the end of its last save; None for no limit.
        """
        self._stop_file = folder / STOP_FILE
        self._ends_at = math.inf
        self._seconds_save = 0.0
        if time_limit_minutes is not None:
            limit_seconds = 60.0 * time_limit_minutes
            self._ends_at = time.monotonic() + limit_seconds - process_age_seconds()
            self._seconds_save = min(UNMEASURED_SAVE_SECONDS, 0.1 * limit_seconds)
        # The longest of the last hundred also covers a validation now and then.
        self._seconds_steps: deque[float] = deque(maxlen=100)
        self._asked_at = time.monotonic()

    def agreed_reason(self) -> str | None:
        """Why the run has to stop after this step, the same on all ranks; None where it continues. A collective, one
        small reduction."""
        now = time.monotonic()
        self._seconds_steps.append(now - self._asked_at)
        self._asked_at = now
        own = self._own_reason()
        num_ranks = layout.sum_over("job", [float(own == reason) for reason in REASONS])
        agreed = next((reason for reason, num in zip(REASONS, num_ranks, strict=True) if num > 0), None)
        if agreed is not None and layout.is_first():
            # Left there, it would also stop the run when it is resumed.
            self._stop_file.unlink(missing_ok=True)
        return agreed

    def record_save(self, seconds: float) -> None:
        """Call it after every checkpoint: the next one is expected to take as long, and saving is no part of a step."""
        self._seconds_save = seconds
        self._asked_at += seconds

    def _own_reason(self) -> str | None:
        """This rank's reason. Rank 0 looks at file and clock for all: file systems and clocks of nodes differ."""
        if stop_signals.received is not None or not layout.is_first():
            return stop_signals.received
        if self._stop_file.exists():
            return "the STOP file"
        # One more step has to fit, and the save. Half again, as neither always takes the same time.
        if time.monotonic() + 1.5 * (max(self._seconds_steps) + self._seconds_save) > self._ends_at:
            return "run.time_limit_minutes"
        return None


def process_age_seconds() -> float:
    """Age of this process, its imports included."""
    return time.time() - psutil.Process().create_time()
