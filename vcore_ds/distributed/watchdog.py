"""The watchdog: ranks exchange heartbeats, and end the run if one of them is dead, hung or stuck.

- Dead: its process is gone. Ranks on the same host notice within seconds.
- Hung: no heartbeat, so none of its threads run (SIGSTOP, a host that swaps or is gone).
- Stuck: it has heartbeats, but its main thread stays behind while others wait in a collective.

The rank that notices tells all others through the process group's store. Each prints the lost rank, its host and its
last position, prints the stacks of its threads, and exits with 1.
"""

import faulthandler
import itertools
import json
import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from vcore_ds.common.errors import EXIT_STOPPED, OutOfMemory, RunFailed, RunStopped, UserError, first_line
from vcore_ds.distributed import layout
from vcore_ds.distributed.position import Position, find_stall_seconds, get_position, reset_position
from vcore_ds.distributed.process_group import end_process_group
from vcore_ds.distributed.signals import stop_signals


@dataclass(frozen=True)
class Identity:
    """The process of a rank."""

    rank: int
    host: str
    pid: int
    started: float  # seconds since the epoch, by the host's clock

    @classmethod
    def current(cls) -> "Identity":
        return cls(layout.rank("job"), socket.gethostname(), os.getpid(), psutil.Process().create_time())

    def process(self) -> psutil.Process | None:
        """The process, if it is on this host; None if the process id is another one's, as in containers."""
        try:
            process = psutil.Process(self.pid)
            return process if abs(process.create_time() - self.started) < 2.0 else None
        except psutil.NoSuchProcess:
            return None

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; does not compare `create_time`, which moves when the host's clock is set."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


BEAT_SECONDS = 1.0

LOADING_PATIENCE_SECONDS = 600.0
"""Least patience while models are loaded: reading a tensor from a slow file system holds Python's GIL."""

GRACE_SECONDS = 3.0
"""Time for the main thread to end with its own error, if a collective fails instead of hanging."""

SEARCH_SECONDS = 8.0  # time after a failed collective to find the lost rank

LEAVING_SECONDS = GRACE_SECONDS + 5 * BEAT_SECONDS
"""Longest time that rank 0 waits for the others to sign off: ranks that are told of an error end after GRACE_SECONDS.
"""

DUMP_SECONDS = 20.0  # for the record of the last collectives

STUCK_SHARE = 0.9
"""Share of engine.timeout_minutes after which a rank is stuck: before the collectives that wait for it time out."""


@dataclass(frozen=True)
class Verdict:
    """Why the run ends, broadcast to all ranks."""

    text: str
    exit_code: int = 1
    hung_rank: int | None = None
    is_explained: bool = False  # whether the text says what to do, so that stacks of other ranks add nothing


@contextmanager
def watching(lost_rank_seconds: float, timeout_minutes: float) -> Iterator[None]:
    """A context, watched by the watchdog, for all work of the ranks together; it ends with the process group, which
    survives an error on several ranks. Entering, and leaving without an error, are collectives. `lost_rank_seconds`:
    without a heartbeat, after which a rank counts as hung; `timeout_minutes`: of collectives."""
    reset_position()
    if layout.size("job") == 1:
        try:
            yield
        finally:
            end_process_group()
        return
    watchdog = Watchdog(lost_rank_seconds, STUCK_SHARE * 60.0 * timeout_minutes)
    stop_signals.find_cause, stop_signals.before_exit = watchdog.find_cause, watchdog.report_stop
    watchdog.start()
    try:
        yield
        # Before rank 0 signs off below: its process serves the store under some launchers.
        end_process_group()
    except (RunFailed, RunStopped):  # raised on all ranks alike, so no rank hangs
        raise
    except UserError as error:
        stop_signals.leave()  # the launcher sends SIGTERM once another rank has ended
        watchdog.report_mistake(error)
        raise
    except BaseException as error:
        stop_signals.leave()
        cause = watchdog.explain(error)
        if cause is not None:
            _say(f"{cause}; what follows is how this rank noticed")
        raise
    finally:
        stop_signals.find_cause = stop_signals.before_exit = None
        watchdog.close()


class Watchdog:
    """The watchdog of a rank. One thread exchanges heartbeats through the store, another one judges them: the first can
    block forever, since a request to a store whose server is stopped has no timeout."""

    _numbers = itertools.count()

    def __init__(self, patience_seconds: float, stuck_seconds: float):
        self._patience_seconds, self._stuck_seconds = patience_seconds, stuck_seconds
        self._rank = layout.rank("job")
        # A separate connection: the default one is locked while the main thread waits on it.
        store = _get_default_store().clone()  # type: ignore[attr-defined]  # torch's stub leaves it out
        self._store = PrefixStore(f"watchdog/{next(self._numbers)}", store)
        self._store.set(str(self._rank), self._status_line(0))
        if self._rank == 0:
            self._store.set("verdict", "")
        self._identities = self._exchange_identities()
        others = [identity for identity in self._identities if identity.rank != self._rank]
        local = self._identities[self._rank]
        same_host = {identity.rank: identity.process() for identity in others if identity.host == local.host}
        self._local = {rank: process for rank, process in same_host.items() if process is not None}
        # Each rank watches rank 0 and the ranks of its host; rank 0 watches all. So the requests to the store grow with
        # the world size, not with its square.
        self._watched = [identity.rank for identity in others] if self._rank == 0 else list(self._local)
        if self._rank != 0 and 0 not in self._watched:
            self._watched.append(0)

        now = time.monotonic()
        self._positions = dict.fromkeys(self._watched, Position())
        self._changed_at = dict.fromkeys(self._watched, now)
        self._behind: dict[int, tuple[int, float]] = {}
        self._dead_since_exchange: dict[int, int] = {}
        self._num_exchanges, self._exchanged_at, self._judged_at, self._resumed_at = 0, now, now, now
        self._store_error: Exception | None = None
        self._to_broadcast: Verdict | None = None
        self._known_verdict: Verdict | None = None
        self._closing, self._quiet = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True)
            for target in (self._exchange, self._watch)
        ]

    def _exchange_identities(self) -> list[Identity]:
        """Exchange the identities of all ranks through the store: no collective, since NCCL makes a communicator in the
        first one, blocks in C where a rank is missing, and must be watched by then."""
        names = [f"identity/{rank}" for rank in range(layout.size("job"))]
        self._store.set(names[self._rank], json.dumps(asdict(Identity.current())))
        if self._rank == 0:  # so that the requests do not grow with the square of the number of ranks
            self._store.set("identities", "\n".join(line.decode() for line in self._store.multi_get(names)))
        return [Identity(**json.loads(line)) for line in self._store.get("identities").splitlines()]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Sign off and end the threads. Rank 0 signs off last: under the deepspeed launcher its process serves the
        store, and torch prints a C++ stack trace on every rank that uses a store that is gone."""
        self._quiet.set()
        self._closing.set()
        for thread in self._threads:
            thread.join(2 * BEAT_SECONDS + (LEAVING_SECONDS if self._rank == 0 else 0.0))

    def broadcast(self, verdict: Verdict) -> None:
        """End the other ranks with this verdict; waits a few seconds at most until it is in the store."""
        self._to_broadcast = verdict
        deadline = time.monotonic() + GRACE_SECONDS
        while self._known_verdict is None and self._store_error is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def find_cause(self) -> str | None:
        """Find the rank whose end made the launcher send this one a stop request; None if no rank has ended. Takes up
        to two beats, until that rank's last words arrive."""
        deadline = time.monotonic() + 2 * BEAT_SECONDS
        dead = [rank for rank, process in self._local.items() if not is_alive(process)]
        while dead and self._known_verdict is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._known_verdict is not None:
            return self._known_verdict.text
        return next(
            (f"{self._locate(rank)}: its process is dead" for rank in dead if not self._positions[rank].left), None
        )

    def report_stop(self, request: str) -> None:
        """Tell the others before this rank exits on a stop request, with nothing to save, so that they exit with the
        same code."""
        self.broadcast(Verdict(f"{request} ended {self._identities[self._rank]}", EXIT_STOPPED))

    def report_mistake(self, error: UserError) -> None:
        """Tell the others before this rank exits because of a UserError. If only some ranks have it, such as a file
        that is missing on one node, the others would hang, and no launcher ends the ranks of another node."""
        self._quiet.set()
        self.broadcast(Verdict(f"{self._locate(self._rank)}: {error}", error.EXIT_CODE))

    def explain(self, error: BaseException) -> str | None:
        """Find the lost rank that caused an error in this rank's main thread; without one, tell the others about the
        error and return None. Takes up to SEARCH_SECONDS after a failed collective. Raises RunFailed if the other rank
        has explained it."""
        self._quiet.set()
        deadline = time.monotonic() + (SEARCH_SECONDS if _is_collective_error(error) else 0.0)
        while time.monotonic() < deadline:
            # A collective has failed already, so a few missing heartbeats are enough.
            verdict = self._known_verdict or self._judge(patience_seconds=4 * BEAT_SECONDS)
            if verdict is not None:
                self.broadcast(verdict)
                if verdict.is_explained:
                    raise RunFailed(verdict.text) from None
                return verdict.text
            time.sleep(0.2)
        if isinstance(error, OutOfMemory):
            self.broadcast(Verdict(first_line(error), is_explained=True))
        else:
            self.broadcast(Verdict(f"{self._locate(self._rank)}: {type(error).__name__}: {first_line(error)}"))
        return None

    def _exchange(self) -> None:
        names = ["verdict", *map(str, self._watched)]
        leaves_at = math.inf
        try:
            for beat in itertools.count(1):
                closing = self._closing.wait(BEAT_SECONDS)
                if self._to_broadcast is not None and self._known_verdict is None:
                    self._store.compare_set("verdict", "", json.dumps(asdict(self._to_broadcast)))
                self._store.set(str(self._rank), self._status_line(beat, closing))
                if closing and self._rank != 0:
                    return  # signing off is the last request: rank 0 may end as soon as it reads it
                verdict, *lines = self._store.multi_get(names)
                now = time.monotonic()
                for rank, line in zip(self._watched, lines, strict=True):
                    position = Position(**json.loads(line))
                    if position != self._positions[rank]:
                        self._positions[rank], self._changed_at[rank] = position, now
                if verdict:
                    self._known_verdict = Verdict(**json.loads(verdict))
                self._num_exchanges, self._exchanged_at = beat, now
                if closing:
                    leaves_at = min(leaves_at, now + LEAVING_SECONDS)
                    if now > leaves_at or self._is_last():
                        return
                    time.sleep(0.05)
        except RuntimeError as error:  # the type of all errors of a store
            self._store_error = error

    def _is_last(self) -> bool:
        """Whether all watched ranks have signed off or ended."""
        return all(
            position.left or (rank in self._local and not is_alive(self._local[rank]))
            for rank, position in self._positions.items()
        )

    def _status_line(self, beat: int, left: bool = False) -> str:
        return json.dumps(asdict(replace(get_position(), beat=beat, left=left)))

    def _watch(self) -> None:
        while not self._quiet.wait(BEAT_SECONDS):
            if self._store_error is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                if not self._quiet.wait(GRACE_SECONDS):
                    # The launcher serves the store, and the ranks can still finish their step without it.
                    stop_signals.request("the end of its launcher")
                return
            verdict = self._known_verdict or self._judge(self._patience_seconds)
            if verdict is not None:
                self.broadcast(verdict)
                if not self._quiet.wait(GRACE_SECONDS):
                    self._end(self._known_verdict or verdict)
                return

    def _judge(self, patience_seconds: float) -> Verdict | None:
        now = time.monotonic()
        if now - self._judged_at > 5 * BEAT_SECONDS:
            # This process was suspended or swapped out, so its data about the others is old.
            self._exchanged_at = self._resumed_at = now
            self._behind.clear()
            self._changed_at = dict.fromkeys(self._watched, now)
        self._judged_at = now
        if self._store_error is not None:
            return Verdict(f"{self._locate(0)}: it is dead: its store is gone")

        for rank, process in self._local.items():
            if rank not in self._dead_since_exchange and not is_alive(process):
                self._dead_since_exchange[rank] = self._num_exchanges
            # Its sign-off may not have arrived yet.
            is_long_dead = self._num_exchanges > self._dead_since_exchange.get(rank, self._num_exchanges) + 1
            if is_long_dead and not self._positions[rank].left:
                return Verdict(f"{self._locate(rank)}: its process is dead")

        slow_seconds, here = max(patience_seconds, LOADING_PATIENCE_SECONDS), get_position()
        if now - self._exchanged_at > (slow_seconds if here.is_loading else patience_seconds):
            return Verdict(f"{self._locate(0)}: no answer for {now - self._exchanged_at:.0f} s from its store", 1, 0)
        for rank, position in self._positions.items():
            silent = now - self._changed_at[rank]
            # Two marks further, this rank has passed a collective that the other one reached after it had loaded.
            still_loads = position.is_loading and here.num_marks < position.num_marks + 2
            patience = slow_seconds if here.is_loading or still_loads else patience_seconds
            if silent > patience and not position.left:
                return Verdict(f"{self._locate(rank)}: no sign of life for {silent:.0f} s", 1, rank)
        return self._judge_progress(now) if self._rank == 0 else None

    def _judge_progress(self, now: float) -> Verdict | None:
        if (seconds := find_stall_seconds(self._resumed_at)) is not None:
            return Verdict(f"{self._locate(0)}: no rank has gone on for {seconds:.0f} s")
        positions = self._positions | {0: get_position()}
        furthest = max(positions.values(), key=lambda position: position.num_marks)
        for rank, position in positions.items():
            if position.num_marks == furthest.num_marks or position.left:
                self._behind.pop(rank, None)
                continue
            marks, since = self._behind.get(rank, (-1, now))
            if marks != position.num_marks:
                self._behind[rank] = (position.num_marks, now)
            elif now - since > self._stuck_seconds:
                return Verdict(f"{self._locate(rank)}: stuck there for {now - since:.0f} s; others wait at: {furthest}")
        return None

    def _locate(self, rank: int) -> str:
        position = get_position() if rank == self._rank else self._positions.get(rank, Position())
        return f"{self._identities[rank]}, last seen at: {position}"

    def _end(self, verdict: Verdict) -> None:
        _say(f"{verdict.text}; the run ends")
        if verdict.exit_code == 1 and not verdict.is_explained:
            with suppress(OSError):  # no file descriptor left
                _say(f"its threads:\n{_format_stacks()}")
        if verdict.hung_rank in self._local:
            # It cannot end by itself, and launchers wait half a minute before they kill it.
            with suppress(psutil.NoSuchProcess):
                self._local[verdict.hung_rank].kill()
        if verdict.exit_code == 1 and not verdict.is_explained:
            with suppress(Exception):  # of any kind: the process must end
                _say(f"its last collectives, for torchfrtrace: {_dump_collectives()}")
        if self._rank == 0:
            time.sleep(2 * BEAT_SECONDS)  # it may serve the store, from which the others still read the verdict
        os._exit(verdict.exit_code)


def _is_collective_error(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "onnection", "Broken"))
    )


def _format_stacks() -> str:
    """The stacks of all threads of this process, as one text: faulthandler writes word by word, and ranks that end at
    the same time share a log."""
    file = os.memfd_create("stacks")
    faulthandler.dump_traceback(file, all_threads=True)
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace").rstrip()


def _dump_collectives() -> str:
    """Write PyTorch's record of the last collectives to a file, as NCCL's watchdog would after
    `engine.timeout_minutes`; return its path."""
    dump = getattr(_distributed_c10d, "_dump_nccl_trace" if dist.get_backend() == "nccl" else "_dump_fr_trace")
    # It asks NCCL for its communicators, and NCCL may hang: a thread without Python's lock then ends this process.
    faulthandler.dump_traceback_later(DUMP_SECONDS, exit=True)
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE", f"{tempfile.gettempdir()}/nccl_trace_rank_")
    path = f"{prefix}{layout.rank('job')}"
    Path(path).write_bytes(dump())
    faulthandler.cancel_dump_traceback_later()
    return path


def _say(text: str) -> None:
    # Not print: the main thread may never release the buffer's lock.
    os.write(2, f"vcore-ds: rank {layout.rank('job')}: {text}\n".encode())
