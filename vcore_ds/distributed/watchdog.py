"""Every rank shows the others that it is alive, and ends the run where one of them is dead, hung or stuck.

- Dead: its process is gone. Ranks on the same host see it within seconds.
- Hung: no sign of life, so not even its threads run (SIGSTOP, a host that swaps or is gone).
- Stuck: alive, but its main thread stays behind while others have gone on and wait in a collective.

The rank that notices tells all others through the process group's store; each prints which rank it was, on which host
and where it was last, prints its own stacks, and exits with 1.
"""

import faulthandler
import itertools
import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from vcore_ds.common.errors import EXIT_STOPPED, RunFailed, RunStopped, UserError
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import end_process_group
from vcore_ds.distributed.signals import stop_signals

# Where a rank's main thread is, and which process it is: what the ranks' watchdogs tell each other.


@dataclass(frozen=True)
class Position:
    """Where a rank's main thread is. All ranks pass the same marks in the same order, so more marks means further."""

    num_marks: int = 0
    step: int = 0
    phase: str = "loading"
    beat: int = 0
    left: bool = False
    """The rank ended normally and is not missed."""

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}" if self.step else self.phase


_here = Position()


def here() -> Position:
    """This rank's position."""
    return _here


def mark(phase: str, step: int | None = None) -> None:
    """Records what the main thread does from here on. Costs nothing; no communication, but every rank must call it.

    Args:
        phase: a word or two.
        step: optimizer step, from 1; None leaves it as it is.
    """
    global _here
    _here = replace(_here, num_marks=_here.num_marks + 1, phase=phase, step=_here.step if step is None else step)


@dataclass(frozen=True)
class Identity:
    """The process of a rank."""

    rank: int
    host: str
    pid: int
    started: float
    """Seconds since the epoch, by the host's clock."""

    @classmethod
    def own(cls) -> "Identity":
        """Of this process."""
        return cls(layout.rank("job"), socket.gethostname(), os.getpid(), psutil.Process().create_time())

    def process(self) -> psutil.Process | None:
        """The process itself, on this host; None where host name or process id mean another one, as in containers."""
        try:
            process = psutil.Process(self.pid)
            return process if abs(process.create_time() - self.started) < 2.0 else None
        except psutil.NoSuchProcess:
            return None

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def is_alive(process: psutil.Process) -> bool:
    """Not by `create_time`, which moves when the host's clock is set."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


BEAT_SECONDS = 1.0

LOADING_PATIENCE_SECONDS = 600.0
"""Least patience while models are loaded: reading weights holds Python's lock for as long as one tensor takes to arrive
from a slow file system."""

GRACE_SECONDS = 3.0
"""Time for the main thread to end by itself, with its own error, where a collective fails instead of hanging."""

SEARCH_SECONDS = 8.0
"""Time after a failed collective until the missing rank shows."""

LEAVING_SECONDS = GRACE_SECONDS + 5 * BEAT_SECONDS
"""Longest time that rank 0 waits for the others to leave: those that noticed a mistake at once sign off at once, and
those that are told of it end after the time of grace."""

STUCK_SHARE = 0.9
"""Share of engine.timeout_minutes: a stuck rank is named shortly before the collectives that wait for it give up."""


@dataclass(frozen=True)
class Verdict:
    """Why the run ends, told to all ranks."""

    text: str
    exit_code: int = 1
    hung_rank: int | None = None


@contextmanager
def watching(lost_rank_seconds: float, timeout_minutes: float) -> Iterator[None]:
    """Around all that the ranks do together, whose process group then ends (`end_process_group`). A collective at both
    ends, if no error passes through.

    Args:
        lost_rank_seconds: without a sign of life, after which a rank counts as hung.
        timeout_minutes: of a collective.
    """
    if layout.size("job") == 1:
        yield
        end_process_group()
        return
    watchdog = Watchdog(lost_rank_seconds, STUCK_SHARE * 60.0 * timeout_minutes)
    stop_signals.before_exit = watchdog.tell_of_stop
    watchdog.start()
    try:
        yield
        # Before rank 0 signs off below: its process serves the store under some launchers.
        end_process_group()
    except (RunFailed, RunStopped):  # raised on all ranks alike: nobody waits for another
        raise
    except UserError as error:
        stop_signals.leave()  # the launcher ends this rank as soon as another one has left
        watchdog.tell_of_mistake(error)
        raise
    except BaseException as error:
        stop_signals.leave()
        cause = watchdog.explain(error)
        if cause is not None:
            _say(f"{cause}; what follows is how this rank noticed")
        raise
    finally:
        stop_signals.before_exit = None
        watchdog.close()


class Watchdog:
    """Two threads: one talks to the store, the other judges. The first can block for good: a store whose server is
    stopped answers no request, and its client knows no timeout."""

    _numbers = itertools.count()

    def __init__(self, patience_seconds: float, stuck_seconds: float):
        self._patience_seconds, self._stuck_seconds = patience_seconds, stuck_seconds
        self._rank = layout.rank("job")
        # A connection of its own: the default one is locked while the main thread waits on it.
        store = _get_default_store().clone()  # type: ignore[attr-defined]  # torch's stub leaves it out
        self._store = PrefixStore(f"watchdog/{next(self._numbers)}", store)
        self._store.set(str(self._rank), self._own_line(0))
        if self._rank == 0:
            self._store.set("verdict", "")
        self._identities: list[Identity] = layout.gather_objects("job", Identity.own())
        others = [identity for identity in self._identities if identity.rank != self._rank]
        own = self._identities[self._rank]
        same_host = {identity.rank: identity.process() for identity in others if identity.host == own.host}
        self._local = {rank: process for rank, process in same_host.items() if process is not None}
        # Everybody watches rank 0 and its own host; rank 0 watches all: the store serves a number of values that grows
        # with the world size, not with its square.
        self._watched = [identity.rank for identity in others] if self._rank == 0 else list(self._local)
        if self._rank != 0 and 0 not in self._watched:
            self._watched.append(0)

        now = time.monotonic()
        self._positions = dict.fromkeys(self._watched, Position())
        self._changed_at = dict.fromkeys(self._watched, now)
        self._behind: dict[int, tuple[int, float]] = {}
        self._dead_since_exchange: dict[int, int] = {}
        self._num_exchanges, self._exchanged_at, self._judged_at = 0, now, now
        self._store_error: Exception | None = None
        self._to_tell: Verdict | None = None
        self._told: Verdict | None = None
        self._closing, self._quiet = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True)
            for target in (self._exchange, self._watch)
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Signs off, so that this rank is not missed.

        Rank 0 signs off last: under the deepspeed launcher its process serves the store, and torch prints a stack trace
        of C++ on every rank that still asks a store that is gone.
        """
        self._quiet.set()
        self._closing.set()
        for thread in self._threads:
            thread.join(2 * BEAT_SECONDS + (LEAVING_SECONDS if self._rank == 0 else 0.0))

    def tell(self, verdict: Verdict) -> None:
        """Ends the other ranks too; waits until the store has it, a few seconds at most."""
        self._to_tell = verdict
        deadline = time.monotonic() + GRACE_SECONDS
        while self._told is None and self._store_error is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def tell_of_stop(self, request: str) -> None:
        """Called before this rank alone leaves, with nothing to save: the others, on whichever node, leave with the
        same exit code. Prints the dead rank where the request came from the launcher because of one."""
        for rank, process in self._local.items():
            if not is_alive(process) and not self._positions[rank].left:
                _say(f"{self._where(rank)}: its process is dead")
                return
        self.tell(Verdict(f"{request} ended {self._identities[self._rank]}", EXIT_STOPPED))

    def tell_of_mistake(self, error: UserError) -> None:
        """Called before this rank leaves because of it. Most mistakes are found by all ranks alike; one that only some
        find, such as a file that is missing on one node, would leave the others waiting, and no launcher ends the ranks
        of another node."""
        self._quiet.set()
        self.tell(Verdict(f"{self._where(self._rank)}: {error}", error.EXIT_CODE))

    def explain(self, error: BaseException) -> str | None:
        """The cause of an error in this rank's main thread, where it is the end of another rank; otherwise tells the
        others about the error. Takes up to SEARCH_SECONDS where a collective has failed."""
        self._quiet.set()
        deadline = time.monotonic() + (SEARCH_SECONDS if _is_of_a_collective(error) else 0.0)
        while time.monotonic() < deadline:
            # The connection is lost already, so a few missing beats are proof enough.
            verdict = self._told or self._judge(patience_seconds=4 * BEAT_SECONDS)
            if verdict is not None:
                self.tell(verdict)
                return verdict.text
            time.sleep(0.2)
        first_line = (str(error).splitlines() or [""])[0]
        self.tell(Verdict(f"{self._where(self._rank)}: {type(error).__name__}: {first_line}"))
        return None

    # ---- the thread that talks to the store ------------------------------------------------------------------------

    def _exchange(self) -> None:
        names = ["verdict", *map(str, self._watched)]
        leaves_at = math.inf
        try:
            for beat in itertools.count(1):
                closing = self._closing.wait(BEAT_SECONDS)
                self._store.set(str(self._rank), self._own_line(beat, closing))
                if self._to_tell is not None and self._told is None:
                    self._store.compare_set("verdict", "", json.dumps(asdict(self._to_tell)))
                verdict, *lines = self._store.multi_get(names)
                now = time.monotonic()
                for rank, line in zip(self._watched, lines, strict=True):
                    position = Position(**json.loads(line))
                    if position != self._positions[rank]:
                        self._positions[rank], self._changed_at[rank] = position, now
                if verdict:
                    self._told = Verdict(**json.loads(verdict))
                self._num_exchanges, self._exchanged_at = beat, now
                if closing:
                    leaves_at = min(leaves_at, now + LEAVING_SECONDS)
                    if self._rank != 0 or now > leaves_at or self._is_last():
                        return
                    time.sleep(0.05)
        except RuntimeError as error:  # all errors of a store are
            self._store_error = error

    def _is_last(self) -> bool:
        """Whether all ranks that this one watches have signed off, or have ended."""
        return all(
            position.left or (rank in self._local and not is_alive(self._local[rank]))
            for rank, position in self._positions.items()
        )

    def _own_line(self, beat: int, left: bool = False) -> str:
        return json.dumps(asdict(replace(here(), beat=beat, left=left)))

    # ---- the thread that judges ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._quiet.wait(BEAT_SECONDS):
            if self._store_error is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                if not self._quiet.wait(GRACE_SECONDS):
                    # The store is the launcher's, and the ranks can still finish their step without it.
                    stop_signals.request("the end of its launcher")
                return
            verdict = self._told or self._judge(self._patience_seconds)
            if verdict is not None:
                self.tell(verdict)
                if not self._quiet.wait(GRACE_SECONDS):
                    self._end(self._told or verdict)
                return

    def _judge(self, patience_seconds: float) -> Verdict | None:
        now = time.monotonic()
        if now - self._judged_at > 5 * BEAT_SECONDS:
            # This process itself stood still (suspended, swapped out): what it knows of the others is old.
            self._exchanged_at = now
            self._changed_at = dict.fromkeys(self._watched, now)
        self._judged_at = now
        if self._store_error is not None:
            return Verdict(f"{self._where(0)}: it is dead: the store that it serves is gone")

        for rank, process in self._local.items():
            if rank not in self._dead_since_exchange and not is_alive(process):
                self._dead_since_exchange[rank] = self._num_exchanges
            # Its sign-off may be on the way.
            is_long_dead = self._num_exchanges > self._dead_since_exchange.get(rank, self._num_exchanges) + 1
            if is_long_dead and not self._positions[rank].left:
                return Verdict(f"{self._where(rank)}: its process is dead")

        if here().step == 0:
            patience_seconds = max(patience_seconds, LOADING_PATIENCE_SECONDS)
        if now - self._exchanged_at > patience_seconds:
            return Verdict(f"{self._where(0)}: no answer for {now - self._exchanged_at:.0f} s from its store", 1, 0)
        for rank, position in self._positions.items():
            silent = now - self._changed_at[rank]
            if silent > patience_seconds and not position.left:
                return Verdict(f"{self._where(rank)}: no sign of life for {silent:.0f} s", 1, rank)
        return self._judge_progress(now) if self._rank == 0 else None

    def _judge_progress(self, now: float) -> Verdict | None:
        positions = self._positions | {0: here()}
        furthest = max(positions.values(), key=lambda position: position.num_marks)
        for rank, position in positions.items():
            if position.num_marks == furthest.num_marks or position.left:
                self._behind.pop(rank, None)
                continue
            marks, since = self._behind.get(rank, (-1, now))
            if marks != position.num_marks:
                self._behind[rank] = (position.num_marks, now)
            elif now - since > self._stuck_seconds:
                return Verdict(f"{self._where(rank)}: stuck there for {now - since:.0f} s; others wait at: {furthest}")
        return None

    def _where(self, rank: int) -> str:
        position = here() if rank == self._rank else self._positions.get(rank, Position())
        return f"{self._identities[rank]}, last seen at: {position}"

    def _end(self, verdict: Verdict) -> None:
        _say(f"{verdict.text}; the run ends")
        if verdict.exit_code == 1:
            with suppress(OSError):  # of a process without a file descriptor left
                _say(f"its threads:\n{_stacks()}")
        if verdict.hung_rank in self._local:
            # It cannot end itself, and launchers wait half a minute before they do, if they are still there.
            with suppress(psutil.NoSuchProcess):
                self._local[verdict.hung_rank].kill()
        if self._rank == 0:
            time.sleep(2 * BEAT_SECONDS)  # its process may serve the store, from which the others have yet to hear
        os._exit(verdict.exit_code)


def _is_of_a_collective(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "onnection", "Broken"))
    )


def _stacks() -> str:
    """Where all threads of this process are. In one piece: faulthandler writes word by word, and the ranks that end at
    the same time into one log."""
    file = os.memfd_create("stacks")
    faulthandler.dump_traceback(file, all_threads=True)
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace").rstrip()


def _say(text: str) -> None:
    # Not print: the main thread may hold the buffer's lock for good.
    os.write(2, f"vcore-ds: rank {layout.rank('job')}: {text}\n".encode())
