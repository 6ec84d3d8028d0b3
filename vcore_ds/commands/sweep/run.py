"""The runs of a sweep on this machine, one after another, each in processes of its own."""

import ctypes
import getpass
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from vcore_ds.commands.sweep.folder import ATTEMPT, State, SweepFolder, check_inputs
from vcore_ds.common.errors import EXIT_STOPPED, RunFailed, RunStopped, UserError
from vcore_ds.common.paths import writing

# A sweep as a SLURM job array: a task for each run that is not done.


SCRIPT = Path("launch_scripts/slurm/sweep.slurm")
JOBS = "slurm_jobs.txt"
"""In the sweep's folder: the ids of the arrays, a line each."""


def submit(sweep: SweepFolder, options: str) -> str:
    """Submits the runs that are neither done, nor at work, nor in the queue. Returns a line that says so.

    Args:
        options: for sbatch, as on a command line.

    Raises:
        UserError: the repository or sbatch is not there, the options are no words of a shell, or sbatch refuses.
    """
    if not SCRIPT.is_file():
        raise UserError(
            f"--slurm: found no {SCRIPT} here; submit from the repository: cd REPOSITORY && vcore-ds sweep ..."
        )
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise UserError(f"--sbatch: found {options!r}: {error}; expected options in balanced quotes") from None
    queued = queued_tasks(sweep)
    tasks = [
        task
        for task, run in enumerate(sweep.runs)
        if task not in queued and sweep.state(run) not in (State.DONE, State.RUNNING)
    ]
    if not tasks:
        return f"nothing to submit: all {len(sweep.runs)} runs are done, at work or in the queue"
    command = [
        "sbatch",
        "--parsable",
        f"--array={_ranges(tasks)}",
        *words,
        str(SCRIPT),
        str(sweep.folder),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("--slurm: found no sbatch on this machine; expected a login node of a SLURM cluster") from None
    if done.returncode != 0:
        raise UserError(f"--slurm: {shlex.join(command)}: {done.stderr.strip()}")
    job = done.stdout.strip().partition(";")[0]
    with writing("output_dir", sweep.folder), (sweep.folder / JOBS).open("a") as file:
        file.write(f"{job}\n")
    return f"job array {job}: {len(tasks)} of {len(sweep.runs)} runs. vcore-ds sweep ... --status shows how far it is"


def queued_tasks(sweep: SweepFolder) -> set[int]:
    """Tasks of this sweep in the queue, running ones included; none where SLURM cannot be asked."""
    try:
        jobs = set((sweep.folder / JOBS).read_text().split())
        command = ["squeue", "--noheader", "--array", f"--user={getpass.getuser()}", "--format=%F_%K"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    found = (line.split("_") for line in done.stdout.split())
    return {int(task) for job, task in found if job in jobs and task.isdecimal()}


def _ranges(tasks: list[int]) -> str:
    """`0-2,5` for 0, 1, 2, 5: a thousand single numbers would be longer than a command line should be."""
    parts: list[list[int]] = []
    for task in tasks:
        if parts and parts[-1][-1] == task - 1:
            parts[-1].append(task)
        else:
            parts.append([task])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


# What of a sweep is done, running, failed, as text.


def describe(sweep: SweepFolder) -> str:
    """A line for each run, and their numbers by state."""
    queued = queued_tasks(sweep)
    words = {}
    for task, run in enumerate(sweep.runs):
        state = sweep.state(run)
        is_queued = state not in (State.DONE, State.RUNNING) and task in queued
        words[run] = "queued" if is_queued else str(state)
    width = max(map(len, sweep.runs))
    lines = [f"{run:{width}}  {word:7}  {details(sweep, run, word)}".rstrip() for run, word in words.items()]
    counts = Counter(words.values())
    numbers = ", ".join(f"{counts[word]} {word}" for word in [*State, "queued"] if counts[word])
    return "\n".join([*lines, f"{len(sweep.runs)} runs in {sweep.folder}: {numbers}"])


def details(sweep: SweepFolder, run: str, word: str) -> str:
    """What there is to say of a run beside its state."""
    if word == State.FAILED:
        return describe_failure(sweep, run)
    num_steps = sweep.num_steps(run)
    return f"{num_steps:,} steps" if num_steps else ""


def describe_failure(sweep: SweepFolder, run: str) -> str:
    """Exit code and last line."""
    return f"exit code {sweep.exit_code(run)}: {sweep.last_words(run)}"


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
    command = [sys.executable, *(launcher if num_ranks > 1 else []), "-m", "vcore_ds.commands.cli", "train"]
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
