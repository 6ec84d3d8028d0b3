"""Early stops of a run, on which all ranks agree: a signal, a STOP file or a time limit."""

import math
import time
from collections import deque
from pathlib import Path

import psutil

from vcore_ds.distributed import layout
from vcore_ds.distributed.signals import stop_signals

STOP_FILE = "STOP"
"""Name of a file in the run's folder that stops the run like SIGTERM, from any machine that shares the folder."""

REASONS = ("SIGTERM", "SIGINT", "SIGUSR1", "the end of its launcher", "the STOP file", "run.time_limit_minutes")

UNMEASURED_SAVE_SECONDS = 300.0  # assumed duration of the first save, at most a tenth of the time limit


class Stops:
    """Stop requests, agreed on by all ranks after every step: a request may reach only one rank, or ranks at different
    steps."""

    def __init__(self, folder: Path, time_limit_minutes: float | None):
        """`time_limit_minutes`: wall-clock limit from the start of this process to the end of its last save."""
        self._stop_file = folder / STOP_FILE
        self._ends_at = math.inf
        self._seconds_save = 0.0
        if time_limit_minutes is not None:
            limit_seconds = 60.0 * time_limit_minutes
            self._ends_at = time.monotonic() + limit_seconds - process_age_seconds()
            self._seconds_save = min(UNMEASURED_SAVE_SECONDS, 0.1 * limit_seconds)
        # The maximum over the last hundred steps includes occasional validations.
        self._seconds_steps: deque[float] = deque(maxlen=100)
        self._step_started_at = time.monotonic()

    def agree_on_reason(self) -> str | None:
        """Why the run must stop after this step, the same on all ranks; None if it continues. A collective (one small
        reduction)."""
        now = time.monotonic()
        self._seconds_steps.append(now - self._step_started_at)
        self._step_started_at = now
        local = self._local_reason()
        num_ranks = layout.sum_over("job", [float(local == reason) for reason in REASONS])
        agreed = next((reason for reason, num in zip(REASONS, num_ranks, strict=True) if num > 0), None)
        if agreed is not None and layout.is_first():
            # Otherwise it would stop the run again when it is resumed.
            self._stop_file.unlink(missing_ok=True)
        return agreed

    def record_save(self, seconds: float, seconds_next: float | None) -> None:
        """Record a checkpoint. `seconds`: for which the steps waited, no part of a step; `seconds_next`: that a save at
        a stop is expected to take, None if not known yet."""
        self._step_started_at += seconds
        if seconds_next is not None:
            self._seconds_save = seconds_next

    def _local_reason(self) -> str | None:
        """This rank's reason. Only rank 0 checks file and clock, because nodes' file systems and clocks differ."""
        if stop_signals.received is not None or not layout.is_first():
            return stop_signals.received
        if self._stop_file.exists():
            return "the STOP file"
        # One more step and the save must fit; the factor 1.5 allows for their variation.
        if time.monotonic() + 1.5 * (max(self._seconds_steps) + self._seconds_save) > self._ends_at:
            return "run.time_limit_minutes"
        return None


def process_age_seconds() -> float:
    """Seconds since the start of this process, imports included."""
    return time.time() - psutil.Process().create_time()
