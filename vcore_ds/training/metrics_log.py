"""The metrics log of a run, metrics.jsonl, and the sinks (trackers) that receive the same lines."""

import atexit
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, Protocol

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.paths import writing
from vcore_ds.common.text import count
from vcore_ds.training import console
from vcore_ds.training.run_folder import LOST_METRICS, METRICS

MOST_WAITING = 1000  # lines that may wait for a sink; further ones are dropped

CLOSE_SECONDS = 20.0  # time to send the remaining lines at the end of a run

DRAIN_SECONDS = 5.0  # the same if a run ends early: another attempt may be waiting


class Sink(Protocol):
    """A tracker, whose methods may raise anything and take any time."""

    def write(self, values: Mapping[str, float | int]) -> None:
        """Send a step's numbers, including `step`."""

    def close(self) -> None:
        """Send the remaining lines at the regular end of the run."""


class BackgroundSink:
    """Runs a sink in a thread, so that it can neither fail nor slow the run; its errors become one warning, printed by
    the caller's thread with the next line or at the end."""

    def __init__(self, name: str, open_sink: Callable[[], Sink], *, close_seconds: float = CLOSE_SECONDS):
        self._name, self._open, self._close_seconds = name, open_sink, close_seconds
        self._lines: Queue[Mapping[str, float | int] | None] = Queue()
        self._problem: str | None = None
        self._has_warned = False
        self._thread = Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()
        atexit.register(self._drain, DRAIN_SECONDS)

    def write(self, values: Mapping[str, float | int]) -> None:
        """Queue a step's numbers; returns at once."""
        if self._lines.qsize() < MOST_WAITING:
            self._lines.put(values)
        elif self._problem is None:
            self._problem = f"{MOST_WAITING:,} lines wait to be sent; further ones are dropped"
        self._warn()

    def close(self) -> None:
        """Wait until everything is sent, `close_seconds` at most."""
        atexit.unregister(self._drain)
        self._lines.put(None)
        self._thread.join(self._close_seconds)
        if self._thread.is_alive() and self._problem is None:
            self._problem = f"has not taken everything within {self._close_seconds:g} s after the end of the run"
        self._warn()

    def _work(self) -> None:
        """The thread. A tracker may raise anything, SystemExit too."""
        try:
            sink = self._open()
        except (Exception, SystemExit) as error:
            self._note(error)
            while self._lines.get() is not None:  # nothing will send these lines
                self._lines.task_done()
            self._lines.task_done()
            return
        while (values := self._lines.get()) is not None:
            try:
                sink.write(values)
            except (Exception, SystemExit) as error:
                self._note(error)
            self._lines.task_done()
        try:
            sink.close()
        except (Exception, SystemExit) as error:
            self._note(error)
        self._lines.task_done()

    def _note(self, error: BaseException) -> None:
        if self._problem is None:
            self._problem = f"{type(error).__name__}: {first_line(error)}".rstrip(".")

    def _warn(self) -> None:
        if self._problem is not None and not self._has_warned:
            self._has_warned = True
            console.warn(f"{self._name}: {self._problem}. The run continues; metrics.jsonl has everything")

    def _drain(self, seconds: float) -> None:
        """Wait until the queued lines are sent, without closing the sink."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: self._lines.unfinished_tasks == 0, seconds)


class MetricsLog:
    """The metrics log, on rank 0. A full disk must not end rank 0 alone while the others wait for it, so lines that
    cannot be written wait in memory until `flush`, whose failure the caller shares with all ranks. The file never holds
    part of a line."""

    def __init__(self, folder: Path, sinks: Sequence[BackgroundSink] = ()):
        self._path, self._sinks = folder / METRICS, sinks
        # Unbuffered: the file has all lines of a killed run.
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._waiting = b""

    def write(self, values: dict[str, Any]) -> None:
        """Write one line, with null for numbers that are not finite; warn if it cannot be written."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        is_first_to_wait = not self._waiting
        self._waiting += json.dumps(clean).encode() + b"\n"
        try:
            self._write_waiting()
        except OSError as error:
            if is_first_to_wait:
                console.warn(
                    f"{self._path} cannot be written ({error.strerror}): its lines are kept in memory, and the run "
                    "ends at the next checkpoint unless they can be written by then"
                )
        numbers = {key: value for key, value in clean.items() if value is not None}
        for sink in self._sinks:
            sink.write(numbers)

    def flush(self) -> None:
        """Flush all lines to disk: a checkpoint may not outlive them. Raises UserError if they cannot be written."""
        try:
            with writing("run.output_dir", self._path, "room for the metrics of the steps"):
                self._write_waiting()
                os.fsync(self._file.fileno())
        except UserError as error:
            raise UserError(f"{error}. Once it can be written, the same command resumes the run") from None

    def close(self) -> None:
        """Close the file and all sinks, which send their remaining lines first."""
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def _write_waiting(self) -> None:
        """Append all waiting lines, or none of them (OSError)."""
        descriptor, rest = self._file.fileno(), self._waiting
        end = os.fstat(descriptor).st_size
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, end)  # part of a line may have been written
            raise
        self._waiting = b""


RELIABLE_SIGNAL_TO_NOISE = 3.0
"""Below this, a finite difference orders tokens by rounding as much as by utility (Spearman under about 0.9)."""


def list_notes(
    folder: Path, has_result: bool, environment: Mapping[str, Any], metrics: Sequence[Mapping[str, float | None]]
) -> list[str]:
    """List the caveats, a sentence each; none for a run that finished at the first attempt with reliable numbers."""
    notes = []
    if not has_result:
        last = int(metrics[-1]["step"] or 0)
        notes.append(f"No result is in its folder: it has not finished, or its result was moved. Last step: {last:,}.")
    resumed = environment.get("resumed")
    if isinstance(resumed, list) and resumed:
        steps = ", ".join(str(one.get("step")) for one in resumed if isinstance(one, dict))
        times = {1: "once", 2: "twice"}.get(len(resumed), f"{len(resumed)} times")
        notes.append(f"Resumed {times}, from step {steps}.")
    if (folder / LOST_METRICS).is_file():
        notes.append(f"Steps after a checkpoint were taken again; what they measured first is in {LOST_METRICS}.")
    not_finite = [int(line["step"] or 0) for line in metrics if line.get("loss") is None]
    if not_finite:
        notes.append(f"The loss was not finite in {_list_steps(not_finite)}.")
    noisy = [
        int(line["step"] or 0)
        for line in metrics
        if (ratio := line.get("signal_to_noise")) is not None and ratio < RELIABLE_SIGNAL_TO_NOISE
    ]
    if noisy:
        notes.append(
            f"Utilities are mostly rounding noise in {_list_steps(noisy)}: the loss change of the finite difference is "
            f"less than {RELIABLE_SIGNAL_TO_NOISE:g} times its error."
        )
    saturated = sum(int(line.get("num_saturated") or 0) for line in metrics)
    if saturated:
        notes.append(
            f"The KL budget was out of reach in {count(saturated, 'sequence')}, whose weight is on as few tokens as it "
            "can be."
        )
    commit = environment.get("git_commit")
    if isinstance(commit, str) and commit.endswith("-dirty"):
        notes.append("The code differed from its git commit when the run started.")
    return notes


def _list_steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
    return f"{len(steps):,} steps ({shown})" if len(steps) > 1 else f"step {shown}"
