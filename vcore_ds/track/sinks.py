"""What gets the lines of metrics.jsonl beside that file, each on a thread of its own: never a reason for a run to fail,
and none of its time."""

import atexit
from collections.abc import Callable, Mapping
from queue import Queue
from threading import Thread
from typing import Protocol

from vcore_ds.errors import first_line
from vcore_ds.track.console import Console

MOST_WAITING = 1000
"""Lines that may wait for a sink; what comes while there are so many is not sent."""

CLOSE_SECONDS = 20.0
"""Time to send what is left at the end of a run."""

DRAIN_SECONDS = 5.0
"""The same where a run ends early: another attempt may be waiting for its turn."""


class Sink(Protocol):
    """A place that keeps the numbers of a run. Every method may raise anything, and may take any time."""

    def write(self, values: Mapping[str, float | int]) -> None:
        """A step's numbers, `step` among them."""

    def close(self) -> None:
        """Sends what is left; the run has ended as it should."""


class BackgroundSink:
    """A sink that cannot stop or slow the run: it works on a thread, and its errors become one warning.

    The warning is printed by the caller's thread, with the next line or at the end.
    """

    def __init__(
        self, name: str, open_sink: Callable[[], Sink], console: Console, *, close_seconds: float = CLOSE_SECONDS
    ):
        """Args:
        name: for messages.
        open_sink: makes the sink, on its thread.
        """
        self._name, self._open, self._console, self._close_seconds = name, open_sink, console, close_seconds
        self._lines: Queue[Mapping[str, float | int] | None] = Queue()
        self._problem: str | None = None
        self._has_warned = False
        self._thread = Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()
        atexit.register(self._drain, DRAIN_SECONDS)

    def write(self, values: Mapping[str, float | int]) -> None:
        """Hands a step's numbers over, and returns at once."""
        if self._lines.qsize() < MOST_WAITING:
            self._lines.put(values)
        elif self._problem is None:
            self._problem = f"{MOST_WAITING:,} lines wait to be taken, and what comes meanwhile is not sent"
        self._warn()

    def close(self) -> None:
        """Waits until everything is sent, `close_seconds` at most."""
        atexit.unregister(self._drain)
        self._lines.put(None)
        self._thread.join(self._close_seconds)
        if self._thread.is_alive() and self._problem is None:
            self._problem = f"has not taken everything within {self._close_seconds:g} s after the end of the run"
        self._warn()

    def _work(self) -> None:
        """The thread. Whatever a tracker raises is its own affair, SystemExit too."""
        try:
            sink = self._open()
        except (Exception, SystemExit) as error:
            self._note(error)
            self._forget_lines()
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

    def _forget_lines(self) -> None:
        """Nobody will take them; the queue must not grow, or be waited for."""
        while self._lines.get() is not None:
            self._lines.task_done()
        self._lines.task_done()

    def _note(self, error: BaseException) -> None:
        if self._problem is None:
            self._problem = f"{type(error).__name__}: {first_line(error)}".rstrip(".")

    def _warn(self) -> None:
        if self._problem is not None and not self._has_warned:
            self._has_warned = True
            self._console.warn(f"{self._name}: {self._problem}. The run continues; metrics.jsonl has everything")

    def _drain(self, seconds: float) -> None:
        """Waits until the lines that were handed over are sent, without an end for the sink."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: self._lines.unfinished_tasks == 0, seconds)
