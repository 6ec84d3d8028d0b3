"""Stop requests: signals to this process, the end of the launcher that started it, a STOP file and a time limit.

Imports little, so that signals are handled before torch and deepspeed are imported, which can take a minute.
"""

import math
import multiprocessing
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

from vcore_ds.common.errors import EXIT_STOPPED

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

SAME_REQUEST_SECONDS = 3.0
"""Signals within this time are one request: a terminal sends Ctrl-C to the ranks and to the launcher, which sends them
SIGTERM; `scancel` reaches the ranks and the batch script, which forwards it."""

LAST_WORDS_SECONDS = 10.0
"""Time for a rank to print its last message and exit: the launcher sends SIGTERM to all ranks once one has ended."""

LAUNCHER_POLL_SECONDS = 1.0


class StopSignals:
    """Handler of stop requests. While nothing can be lost (loading, exporting) a request ends the process at once with
    EXIT_STOPPED. Inside `deferred` (training) the first request is only recorded, as `received`, for the end of the
    step; a second one ends the process at once, unless it belongs to the first (SAME_REQUEST_SECONDS). Before the
    process ends outside `deferred`, `find_cause` may name another rank whose end has caused the request; without one,
    `before_exit` is called with the request and has two seconds.

    A separate thread reads the signals from the pipe to which Python's C handler writes: a Python handler would wait
    for the main thread, which may hang in a collective."""

    def __init__(self) -> None:
        self.received: str | None = None
        self.find_cause: Callable[[], str | None] | None = None
        self.before_exit: Callable[[str], None] | None = None
        self._received_at = 0.0
        self._held_back = False
        self._exits_at: float | None = None
        self._lock = threading.Lock()
        self._pipe: tuple[int, int] | None = None

    def listen(self) -> None:
        """Start to handle stop requests; call it in the main thread. Calling it again has no effect."""
        if self._pipe is not None:
            return
        _stderr()  # duplicate it before anything redirects it
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in STOPPING:
            if signal.getsignal(number) != signal.SIG_IGN:  # `nohup command &` ignores SIGINT
                signal.signal(number, lambda *_: None)
        # A forked child would write its signals into this process's pipe and ignore them itself.
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_reset_in_child)
        threading.Thread(target=self._listen, name="stop signals", daemon=True).start()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A context for code that must not be interrupted and polls `received`. A request still pending on exit ends
        the process."""
        with self._lock:
            self._held_back = True
        try:
            yield
        except BaseException:
            self.leave()
            raise
        with self._lock:
            self._held_back = False
        if self.received is not None:
            self._exit(self.received)

    def leave(self, last_words_seconds: float = LAST_WORDS_SECONDS) -> None:
        """Announce that the process is about to exit with a message and an exit code: for `last_words_seconds` signals
        are ignored, afterwards they end the process."""
        self._exits_at = time.monotonic() + last_words_seconds

    def request(self, name: str) -> None:
        """Act as if the signal `name` had arrived. Thread-safe."""
        now = time.monotonic()
        with self._lock:
            deferred, first = self._held_back, self.received is None
            if first:
                self.received, self._received_at = name, now
        if self._exits_at is not None:
            if now > self._exits_at:
                os._exit(128 + getattr(signal, name, 0))
        elif not deferred:
            self._exit(name)
        elif first:
            _say(f"{name}: this step is finished and saved, then the run stops (a second signal ends it at once)")
        elif now - self._received_at > SAME_REQUEST_SECONDS:
            _say(f"{name} after {self.received}: ending at once, without saving")
            os._exit(128 + getattr(signal, name, 0))

    def _exit(self, name: str) -> None:
        self.leave()
        cause = self.find_cause() if self.find_cause is not None else None
        if cause is not None:
            _say(f"{cause}; the launcher ended this rank ({name})")
        elif os.environ.get("LOCAL_RANK", "0") == "0":
            _say(f"{name} outside of the training steps: there is nothing to save")
        if cause is None and self.before_exit is not None:
            thread = threading.Thread(target=self.before_exit, args=(name,), daemon=True)
            thread.start()
            thread.join(2.0)
        for child in multiprocessing.active_children():  # such as the processes that prepare data
            child.kill()
        os._exit(EXIT_STOPPED)

    def _listen(self) -> None:
        assert self._pipe is not None
        launchers = _find_launchers()
        while True:
            if select.select([self._pipe[0]], [], [], LAUNCHER_POLL_SECONDS)[0]:
                for number in os.read(self._pipe[0], 64):
                    if number in STOPPING:
                        self.request(signal.Signals(number).name)
            elif launchers and _list_ancestors(len(launchers)) != launchers:
                launchers = []
                self.request("the end of its launcher")


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _reset_in_child() -> None:
    signal.set_wakeup_fd(-1)
    for number in STOPPING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    _unblock()


def _say(text: str) -> None:
    # Not print: the main thread may never release the buffer's lock.
    os.write(_stderr(), f"vcore-ds: rank {os.environ.get('RANK', '0')}: {text}\n".encode())


@cache
def _stderr() -> int:
    """A duplicate of stderr: while DeepSpeed tests the compiler (`OpBuilder.has_function`), 2 is redirected."""
    return os.dup(2)


def _find_launchers() -> list[int]:
    """Process ids of the launcher's processes above this one, nearest first; empty without a known launcher. Without
    this, ranks would survive a `kill` of the `deepspeed` command, which ends only that command, or a SIGKILL of
    torchrun."""
    above = _list_ancestors(2)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return above[:1]
    lines: list[str] = []
    with suppress(psutil.Error):
        lines = [" ".join(psutil.Process(pid).cmdline()) for pid in above]
    if not lines or "deepspeed.launcher.launch" not in lines[0]:
        return []
    return above[: 1 + ("deepspeed" in lines[-1])]


def _list_ancestors(count: int) -> list[int]:
    return [process.pid for process in psutil.Process().parents()[:count]]


stop_signals = StopSignals()  # the instance of this process


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
        from vcore_ds.distributed import layout  # imports torch

        now = time.monotonic()
        self._seconds_steps.append(now - self._step_started_at)
        self._step_started_at = now
        local = self._local_reason(layout.is_first())
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

    def _local_reason(self, is_first: bool) -> str | None:
        """This rank's reason. Only rank 0 checks file and clock, because nodes' file systems and clocks differ."""
        if stop_signals.received is not None or not is_first:
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
