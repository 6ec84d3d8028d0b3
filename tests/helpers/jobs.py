"""Commands with several ranks, which a test watches, signals and kills while they run."""

import os
import shlex
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from tests.helpers.commands import HANG_SECONDS, REPOSITORY, command_environment, free_port
from tests.helpers.ranks import forkserver


class AnyJob(ABC):
    """Ranks that write to one log. Leaving the `with` block kills those still running."""

    def __init__(self, name: str, log: Path):
        self._name, self._log = name, log

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Parents first: a launcher that outlives its child for a moment would report the child's end.
        for process in sorted(self._processes_left(), key=lambda process: (process.create_time(), process.pid)):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_seconds: float = HANG_SECONDS) -> None:
        """Wait until the output contains `text`; raises AssertionError if the job ends before."""
        deadline = time.monotonic() + timeout_seconds
        while text not in self.output:
            ended = self._exit_code() is not None
            assert not ended and time.monotonic() < deadline, f"no {text!r}: {self._name}\n{self.output}"
            time.sleep(0.02)
        self._processes_left()

    def wait(self, timeout_seconds: float = HANG_SECONDS) -> int:
        """Wait until no process of the job is left; returns its exit code."""
        deadline = time.monotonic() + timeout_seconds
        code = None
        while code is None or self._processes_left():
            code = self._exit_code()
            assert time.monotonic() < deadline, f"still running: {self._processes_left()}: {self._name}\n{self.output}"
            time.sleep(0.05)
        return code

    @abstractmethod
    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank; raises AssertionError if it does not exist yet."""

    @abstractmethod
    def _exit_code(self) -> int | None:
        """Exit code of the job, None while it runs."""

    @abstractmethod
    def _processes_left(self) -> list[psutil.Process]:
        """Processes of the job that are still running."""


class Job(AnyJob):
    """A launcher and its ranks, started by a command line."""

    def __init__(self, line: str, log: Path, **environment: str):
        """`line`: as typed in a shell in the repository. `log`: file for stdout and stderr."""
        super().__init__(line, log)
        self._seen: set[psutil.Process] = set()
        with open(log, "wb") as file:
            self.launcher = psutil.Popen(
                shlex.split(line),
                cwd=REPOSITORY,
                env=command_environment() | environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.launcher.wait()

    def rank(self, rank: int) -> psutil.Process:
        for process in self._processes_left():
            with suppress(psutil.Error):
                environment = process.environ()
                # The children of a rank inherit its environment.
                if environment.get("RANK") == str(rank) and process.parent().environ().get("RANK") != str(rank):
                    return process
        raise AssertionError(f"no rank {rank}:\n{self.output}")

    def _exit_code(self) -> int | None:
        return self.launcher.poll()

    def _processes_left(self) -> list[psutil.Process]:
        """Processes of the job, including those that outlive the launcher."""
        with suppress(psutil.NoSuchProcess):
            self._seen |= {psutil.Process(self.launcher.pid), *self.launcher.children(recursive=True)}
        return [process for process in self._seen if _is_running(process)]


class ForkedJob(AnyJob):
    """The ranks of a command without its launcher, forked from the server that has imported everything
    (`helpers/ranks.py`): launcher and imports take most of the time of a short run.

    Like a launcher, it terminates the other ranks when one has failed. Like torchrun, it serves the store of the ranks.
    """

    def __init__(
        self,
        main: Callable[[Sequence[str]], int],
        arguments: Sequence[str],
        log: Path,
        *,
        num_ranks: int = 1,
        rank_0_serves_store: bool = False,
        **environment: str,
    ):
        """`main`: the command's function, at the top level of a module. Takes `arguments` and returns the exit code.
        `log`: file for stdout and stderr. `rank_0_serves_store`: whether rank 0 serves the store, as under the
        deepspeed launcher."""
        super().__init__(" ".join(arguments), log)
        log.write_bytes(b"")
        shared = command_environment() | environment
        shared |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
        }
        if not rank_0_serves_store:
            self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            shared |= {
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
            }
        self._ranks: list[Any] = [
            forkserver().Process(
                target=become_rank,
                args=(main, arguments, str(log), shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}),
            )
            for rank in range(num_ranks)
        ]
        self._first_failure: int | None = None
        for rank in self._ranks:
            rank.start()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for rank in self._ranks:
            rank.join()

    def rank(self, rank: int) -> psutil.Process:
        return psutil.Process(self._ranks[rank].pid)

    def _exit_code(self) -> int | None:
        codes = [rank.exitcode for rank in self._ranks]
        if self._first_failure is None:
            self._first_failure = next((code for code in codes if code), None)
            if self._first_failure is not None:
                for rank in self._ranks:
                    rank.terminate()
        if None in codes:
            return None
        return 0 if self._first_failure is None else max(self._first_failure, 1)

    def _processes_left(self) -> list[psutil.Process]:
        return [psutil.Process(rank.pid) for rank in self._ranks if rank.is_alive()]


def become_rank(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], log: str, environment: dict[str, str]
) -> None:
    """Run a command in this process, which has just been forked. `log`: file to which output is appended."""
    os.setsid()
    os.chdir(REPOSITORY)
    os.environ.clear()
    os.environ.update(environment)
    file, nothing = os.open(log, os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, file, file)):
        os.dup2(descriptor, number)
    sys.stdin = open(0)  # noqa: SIM115  as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    sys.argv = ["vcore-ds", *arguments]
    sys.exit(main(arguments))


def forget_rank() -> None:
    """Remove the variables of a rank from this process, for a launcher that is forked."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]


def _is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
