"""A command with several ranks that a test watches, signals and kills while it runs."""

import shlex
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from tests.helpers.commands import HANG_SECONDS, REPOSITORY, command_environment


class Job:
    """A launcher and its ranks. Leaving the `with` block kills those that are left."""

    def __init__(self, line: str, log: Path, **environment: str):
        """Args:
        line: as typed in a shell in the repository.
        log: file for stdout and stderr.
        """
        self._log, self._line = log, line
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes_left():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.launcher.wait()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_seconds: float = HANG_SECONDS) -> None:
        """Waits until the output contains `text`; raises AssertionError where the launcher ends before."""
        deadline = time.monotonic() + timeout_seconds
        while text not in self.output:
            ended = self.launcher.poll() is not None
            assert not ended and time.monotonic() < deadline, f"no {text!r}: {self._line}\n{self.output}"
            time.sleep(0.02)
        self._processes_left()

    def rank(self, rank: int) -> psutil.Process:
        """The process of that rank; raises AssertionError where there is none yet."""
        for process in self._processes_left():
            with suppress(psutil.Error):
                environment = process.environ()
                # A rank's own children have its environment too.
                if environment.get("RANK") == str(rank) and process.parent().environ().get("RANK") != str(rank):
                    return process
        raise AssertionError(f"no rank {rank}:\n{self.output}")

    def wait(self, timeout_seconds: float = HANG_SECONDS) -> int:
        """Waits until no process of the job is left. Returns the launcher's exit code."""
        deadline = time.monotonic() + timeout_seconds
        code = None
        while code is None or self._processes_left():
            code = self.launcher.poll()
            assert time.monotonic() < deadline, f"still running: {self._processes_left()}: {self._line}\n{self.output}"
            time.sleep(0.05)
        return code

    def _processes_left(self) -> list[psutil.Process]:
        """All processes of the job that are left, including those that outlive the launcher."""
        with suppress(psutil.NoSuchProcess):
            self._seen |= {psutil.Process(self.launcher.pid), *self.launcher.children(recursive=True)}
        return [process for process in self._seen if _is_running(process)]


def _is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
