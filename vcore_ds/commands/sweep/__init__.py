"""`vcore-ds sweep`: run all cells and seeds of a sweep file, here one after another or as a SLURM job array."""

import argparse
import ctypes
import getpass
import itertools
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from vcore_ds.commands.arguments import positive
from vcore_ds.commands.sweep.folder import ATTEMPT, State, SweepFolder, begin_sweep, check_inputs, read_sweep_folder
from vcore_ds.common.errors import EXIT_STOPPED, RunFailed, RunStopped, UserError
from vcore_ds.common.paths import writing
from vcore_ds.common.text import align_columns

HELP = "run a grid or list of recipes over seeds, here or as a SLURM job array"
DESCRIPTION = (
    "Run every cell of a sweep file (YAML) with every seed: here, one after another, or as a SLURM job array whose "
    "tasks requeue and resume by themselves. All recipes are validated before the first run starts. The same command "
    "again skips finished runs, resumes unfinished ones and retries failed ones. docs/sweeps.md describes the file; "
    "vcore-ds report FOLDER makes the tables. Example: vcore-ds sweep launch_scripts/sweeps/smollm2.yaml --ranks 2"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("sweep", type=Path, metavar="SWEEP.yaml", help="sweep file, such as those in launch_scripts/sweeps")
    add("--status", action="store_true", help="show the state of each run and exit")
    add("--ranks", type=positive, default=1, metavar="N", help="ranks of each run on this machine (default 1)")
    add("--slurm", action="store_true", help="submit unfinished runs as a job array; start it in the repository")
    add("--sbatch", default="", metavar="'OPTION ...'", help="options for sbatch, such as '--nodes=2 --time=8:00:00'")
    parser.set_defaults(overrides=[])


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError for a user's mistake, RunFailed if runs have failed, RunStopped if some are unfinished after a
    stop request."""
    from vcore_ds.commands.sweep.cells import load_sweep

    if arguments.overrides:
        raise UserError(
            f"sweep: found {' '.join(arguments.overrides)} after the sweep file; expected nothing. Put settings of all "
            "cells under common: in the file"
        )
    if arguments.sbatch and not arguments.slurm:
        raise UserError("--sbatch: found without --slurm; expected both, to submit a job array")
    sweep = load_sweep(arguments.sweep, None if arguments.slurm or arguments.status else arguments.ranks)
    if arguments.status:
        print(describe(read_sweep_folder(sweep.folder)))
    elif arguments.slurm:
        print(submit(begin_sweep(sweep), arguments.sbatch))
    else:
        run_here(begin_sweep(sweep), arguments.ranks)


SCRIPT = Path("launch_scripts/slurm/sweep.slurm")
JOBS = "slurm_jobs.txt"  # file in the sweep's folder with the ids of its job arrays, one per line


def submit(sweep: SweepFolder, options: str) -> str:
    """Submit a job array of the runs that are not done, running or queued; return a line for the screen. Raises
    UserError where the repository or sbatch is missing, `options` have unbalanced quotes, or sbatch fails."""
    if not SCRIPT.is_file():
        raise UserError(f"--slurm: found no {SCRIPT} here; submit from the repository: cd REPOSITORY")
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise UserError(f"--sbatch: found {options!r}: {error}; expected options in balanced quotes") from None
    queued = queued_tasks(sweep)
    left = (task for task, run in enumerate(sweep.runs) if sweep.state(run) not in (State.DONE, State.RUNNING))
    tasks = [task for task in left if task not in queued]
    if not tasks:
        return f"nothing to submit: all {len(sweep.runs)} runs are done, running or queued"
    command = ["sbatch", "--parsable", f"--array={_format_ranges(tasks)}", *words, str(SCRIPT), str(sweep.folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("--slurm: found no sbatch on this machine; expected a login node of a SLURM cluster") from None
    if done.returncode != 0:
        raise UserError(f"--slurm: {shlex.join(command)}: {done.stderr.strip()}")
    job = done.stdout.strip().partition(";")[0]
    with writing("output_dir", sweep.folder), (sweep.folder / JOBS).open("a") as file:
        file.write(f"{job}\n")
    return f"job array {job}: {len(tasks)} of {len(sweep.runs)} runs. vcore-ds sweep ... --status shows their state"


def queued_tasks(sweep: SweepFolder) -> set[int]:
    """Task numbers of this sweep that are queued or running; empty if SLURM does not answer."""
    try:
        jobs = set((sweep.folder / JOBS).read_text().split())
        command = ["squeue", "--noheader", "--array", f"--user={getpass.getuser()}", "--format=%F_%K"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    lines = (line.split("_") for line in done.stdout.split())
    return {int(task) for job, task in lines if job in jobs and task.isdecimal()}


def _format_ranges(tasks: list[int]) -> str:
    """`0-2,5` for 0, 1, 2, 5: a list of a thousand numbers could exceed the limit of a command line."""
    groups = itertools.groupby(enumerate(tasks), lambda pair: pair[1] - pair[0])  # consecutive numbers
    parts = [[task for _, task in group] for _, group in groups]
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def describe(sweep: SweepFolder) -> str:
    queued = queued_tasks(sweep)
    rows = []
    for task, run in enumerate(sweep.runs):
        state = str(sweep.state(run))
        if state not in (State.DONE, State.RUNNING) and task in queued:
            state = "queued"
        progress = f"{num_steps:,} steps" if (num_steps := sweep.num_steps(run)) else ""
        rows.append((run, state, describe_failure(sweep, run) if state == State.FAILED else progress))
    counts = Counter(state for _, state, _ in rows)
    numbers = ", ".join(f"{counts[state]} {state}" for state in [*State, "queued"] if counts[state])
    return "\n".join([*align_columns(rows, all_left=True), f"{len(sweep.runs)} runs in {sweep.folder}: {numbers}"])


def describe_failure(sweep: SweepFolder, run: str) -> str:
    return f"exit code {sweep.exit_code(run)}: {sweep.last_words(run)}"


_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1


def run_here(sweep: SweepFolder, num_ranks: int) -> None:
    """Train, one after another, all runs that are not done and that no other process is training; a failed run does not
    stop the others. A stop request (SIGTERM, SIGINT, SIGUSR1) is forwarded to the current run, which saves and stops.
    Raises UserError where inputs have changed since the sweep first read them, RunFailed for failed runs, RunStopped
    for unfinished ones."""
    with _Children() as children:
        for number, run in enumerate(sweep.runs, start=1):
            where = f"[{number}/{len(sweep.runs)}] {run}"
            if sweep.is_done(run):
                print(f"{where}: done already", flush=True)
                continue
            check_inputs(sweep)  # days may have passed since the first run
            with sweep.lock_log(run) as log:
                if log is None or sweep.is_done(run):  # another process may have finished it since
                    print(f"{where}: {'another process is training it' if log is None else 'done already'}", flush=True)
                    continue
                print(f"{where}: {sweep.log_path(run)}", flush=True)
                started = time.monotonic()
                code = _run_one(sweep, run, num_ranks, log, children)
            outcome = {0: "done", EXIT_STOPPED: "stopped and saved"}.get(code)
            outcome = outcome or f"failed, {describe_failure(sweep, run)}"
            print(f"{' ' * len(where)}  {outcome}, after {time.monotonic() - started:,.0f} s", flush=True)
            if children.stopped_by is not None:
                break
    _conclude(sweep, children.stopped_by)


def _run_one(sweep: SweepFolder, run: str, num_ranks: int, log: BinaryIO, children: "_Children") -> int:
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
    again = "The same command skips finished runs, resumes stopped ones and retries failed ones"
    failed = [f"  {run}: {describe_failure(sweep, run)}\n" for run, state in states.items() if state == State.FAILED]
    if stopped_by is None and failed:
        raise RunFailed(f"{done}, {len(failed)} failed:\n{''.join(failed)}{again}. Logs: {sweep.folder / 'logs'}")
    if counts[State.DONE] < len(states):
        others = ", ".join(f"{counts[state]} {state}" for state in State if state != State.DONE and counts[state])
        cause = "" if stopped_by is None else f"stopped by {stopped_by}: "
        raise RunStopped(f"{cause}{done}, {others}. {again}")
    print(f"{done}. Tables and curves: vcore-ds report {shlex.quote(str(sweep.folder))}", flush=True)


class _Children:
    """Runs one command at a time and forwards stop requests to it, in a `with` block. `stopped_by`: name of the first
    request."""

    def __init__(self) -> None:
        self.stopped_by: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "_Children":
        self._before = {number: signal.signal(number, self._forward) for number in _STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def run(self, command: list[str], log: BinaryIO) -> int:
        """Run a command and return its exit code; after a stop request, start nothing and return EXIT_STOPPED."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # a request between check and start would be lost
        try:
            if self.stopped_by is not None:
                return EXIT_STOPPED
            # The child inherits the open log and its lock, which lasts until the last process of the run ends.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # else Ctrl-C would reach the run twice
                preexec_fn=_begin_child,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        return self._process.wait()

    def _forward(self, number: int, _: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or signal.Signals(number).name
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def _begin_child() -> None:
    """Make the run save and stop if this process is killed, instead of training on unattended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
