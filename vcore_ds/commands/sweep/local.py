"""The runs of a sweep on this machine, one after another, each in processes of its own."""

import ctypes
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import BinaryIO

from vcore_ds.commands.sweep.status import describe_failure
from vcore_ds.errors import EXIT_STOPPED, RunFailed, RunStopped
from vcore_ds.files.user_paths import writing
from vcore_ds.results.sweep_folder import ATTEMPT, State, SweepFolder, check_inputs

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1


def run_here(sweep: SweepFolder, num_ranks: int) -> None:
    """Starts every run that is not done and that no other process has, and waits for each.

    A run that fails does not stop the others. A stop request (SIGTERM, SIGINT, SIGUSR1) is passed on to the run at
    work, which saves; no other is started then.

    Raises:
        UserError: data, scores or a model have other contents than when the sweep first read them.
        RunFailed: runs have failed; names them with exit code and last line.
        RunStopped: runs are left, after a stop request or with another process.
    """
    with _Children() as children:
        for number, run in enumerate(sweep.runs, start=1):
            where = f"[{number}/{len(sweep.runs)}] {run}"
            if sweep.state(run) == State.DONE:
                print(f"{where}: done already", flush=True)
                continue
            check_inputs(sweep)  # days may have passed since the first run
            with sweep.held(run) as log:
                if log is None:
                    print(f"{where}: another process is at work on it", flush=True)
                    continue
                print(f"{where}: {sweep.log_path(run)}", flush=True)
                started = time.monotonic()
                code = _run_one(sweep, run, num_ranks, log, children)
            ended = {0: "done", EXIT_STOPPED: "stopped and saved"}.get(
                code
            ) or f"failed, {describe_failure(sweep, run)}"
            print(f"{' ' * len(where)}  {ended}, after {time.monotonic() - started:,.0f} s", flush=True)
            if children.stopped_by is not None:
                break
    _conclude(sweep, children.stopped_by)


def _run_one(sweep: SweepFolder, run: str, num_ranks: int, log: BinaryIO, children: "_Children") -> int:
    """The exit code of an attempt."""
    launcher = ["-m", "vcore_ds.distributed.torchrun", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), "-m", "vcore_ds.cli", "train"]
    with writing("output_dir", sweep.folder):
        sweep.exit_path(run).unlink(missing_ok=True)
        log.write(f"{ATTEMPT} of {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n".encode())
        log.flush()
        code = children.run([*command, str(sweep.recipe_path(run))], log)
        sweep.exit_path(run).write_text(f"{code}\n")
    return code


def _conclude(sweep: SweepFolder, stopped_by: str | None) -> None:
    states = {run: sweep.state(run) for run in sweep.runs}
    counts = Counter(states.values())
    done = f"{counts[State.DONE]} of {len(states)} runs are done"
    again = "The same command skips what is done, resumes what was stopped, and tries again what has failed"
    failed = [f"  {run}: {describe_failure(sweep, run)}" for run, state in states.items() if state == State.FAILED]
    if stopped_by is None and failed:
        listed = "\n".join(failed)
        raise RunFailed(f"{done}, {len(failed)} failed:\n{listed}\n{again}. Logs: {sweep.folder / 'logs'}")
    if counts[State.DONE] < len(states):
        others = ", ".join(f"{counts[state]} {state}" for state in State if state != State.DONE and counts[state])
        cause = "" if stopped_by is None else f"stopped by {stopped_by}: "
        raise RunStopped(f"{cause}{done}, {others}. {again}")
    print(f"{done}. Tables and curves: vcore-ds report {shlex.quote(str(sweep.folder))}", flush=True)


class _Children:
    """Runs one command at a time and passes stop requests on to it, in a `with` block.

    Attributes:
        stopped_by: name of the first request; None while there is none.
    """

    def __init__(self) -> None:
        self.stopped_by: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "_Children":
        self._before = {number: signal.signal(number, self._pass_on) for number in _STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def run(self, command: list[str], log: BinaryIO) -> int:
        """The exit code; EXIT_STOPPED without starting anything after a stop request."""
        with _blocked():  # a request between the look and the start would reach nobody
            if self.stopped_by is not None:
                return EXIT_STOPPED
            # The open log is inherited, and with it the lock: it ends with the last process of the run.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is passed on once, not sent twice
                preexec_fn=_begin_child,
            )
        return self._process.wait()

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or signal.Signals(number).name
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


@contextmanager
def _blocked() -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)


def _begin_child() -> None:
    """The run saves and stops where this process is killed, instead of training on unseen."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
