"""A sweep as a SLURM job array: a task for each run that is not done."""

import getpass
import shlex
import subprocess
from pathlib import Path

from vcore_ds.errors import UserError
from vcore_ds.files.user_paths import writing
from vcore_ds.results.sweep_folder import State, SweepFolder

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
