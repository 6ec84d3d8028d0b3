"""Where a rank's main thread is, and which process it is: what the ranks' watchdogs tell each other."""

import os
import socket
from dataclasses import dataclass, replace

import psutil

from vcore_ds.distributed import layout


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
