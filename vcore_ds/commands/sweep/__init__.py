"""`vcore-ds sweep`: run all cells and seeds of a sweep file, here one after another or as a SLURM job array."""

import argparse
import ctypes
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from vcore_ds.commands.arguments import positive
from vcore_ds.commands.check import check_model, plan_on
from vcore_ds.commands.plan.columns import find_lengths
from vcore_ds.commands.plan.prediction import LengthModel
from vcore_ds.commands.sweep.folder import (
    ATTEMPT,
    SWEEP,
    State,
    Sweep,
    SweepFolder,
    is_sweep,
    load_sweep,
    read_sweep_folder,
)
from vcore_ds.common.errors import EXIT_STOPPED, RunFailed, RunStopped, UserError
from vcore_ds.common.paths import can_be_hub_id, compute_file_digest, is_readable, reading, write_text, writing
from vcore_ds.common.text import align_columns, count
from vcore_ds.config.data_section import MANIFEST
from vcore_ds.config.load import SHIPPED_SLURM, dump_recipe, dump_yaml, read_resolved_recipe
from vcore_ds.config.problems import show
from vcore_ds.config.schema import Recipe, differing_keys, flat_values
from vcore_ds.distributed.signals import STOPPING

HELP = "run a grid or list of recipes over seeds, here or as a SLURM job array"
DESCRIPTION = (
    "Run every cell of a sweep file (YAML) with every seed: here, one after another, or as a SLURM job array. All "
    "recipes are validated first. The same command again skips finished runs, resumes unfinished ones and retries "
    "failed ones (docs/sweeps.md). Example: vcore-ds sweep launch_scripts/sweeps/smollm2.yaml --ranks 2"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("sweep", type=Path, metavar="SWEEP.yaml", help="sweep file, such as those in launch_scripts/sweeps")
    dry = "show the runs with their GPU hours and what would be refused, as check and plan say, and write nothing"
    add("--dry-run", action="store_true", help=dry)
    add("--gpu", metavar="NAME", help="kind of GPU that --dry-run plans for (default H100)")
    add("--status", action="store_true", help="show the state of each run and exit")
    add("--ranks", type=positive, default=1, metavar="N", help="ranks of each run here, or of its plan (default 1)")
    add("--slurm", action="store_true", help="submit unfinished runs as a job array")
    add("--sbatch", default="", metavar="'OPTION ...'", help="options for sbatch, such as '--nodes=2 --time=8:00:00'")
    parser.set_defaults(overrides=[])


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError for a user's mistake, RunFailed if runs have failed, RunStopped if some are unfinished after a
    stop request."""
    if arguments.overrides:
        raise UserError(
            f"sweep: found {' '.join(arguments.overrides)} after the sweep file; expected nothing. Put settings of all "
            "cells under common: in the file"
        )
    for option, other in (("sbatch", "slurm"), ("gpu", "dry_run")):
        if getattr(arguments, option) and not getattr(arguments, other):
            raise UserError(f"--{option}: found without --{other.replace('_', '-')}; expected both")
    sweep = load_sweep(arguments.sweep, None if arguments.slurm or arguments.status else arguments.ranks)
    if arguments.dry_run:
        plan_sweep(sweep, arguments.gpu or "H100", arguments.ranks)
    elif arguments.status:
        print(describe(read_sweep_folder(sweep.folder)))
    elif arguments.slurm:
        print(submit(begin_sweep(sweep), arguments.sbatch.split()))
    else:
        run_here(begin_sweep(sweep), arguments.ranks)


# ---- the folder ------------------------------------------------------------------------------------------------------

MOST_DIFFERENCES = 20  # maximum lines of a message on recipes that differ
FIXED = re.compile(
    r"data\.(train_path|probe_path|trusted_overlap|validation_(path|share)|keep\.scores)|schedule\..*|run\.validate_every"
    r"|checkpoint\.branch_from"
)
"""Keys that a resumed run may change but a sweep may not, because its runs are compared."""


def begin_sweep(sweep: Sweep) -> SweepFolder:
    """Make the sweep's folder, or extend that of the same sweep by new cells and seeds. Raises UserError where the
    folder holds something else, runs with other recipes, or runs that the sweep no longer has; or it cannot be
    written."""
    folder, before = sweep.folder, read_begun(sweep)
    with writing("output_dir", folder):
        added, inputs = [name for name in sweep.runs if name not in before.runs], digest_inputs(sweep.runs.values())
        for key, by_path in before.inputs.items():
            inputs[key] = {**inputs.get(key, {}), **by_path}
        begun = SweepFolder(folder, sweep.references, [*before.runs, *added], inputs)
        values = {"file": str(sweep.file), "cells": begun.references, "runs": begun.runs, "inputs": inputs}
        texts = {begun.recipe_path(name): dump_recipe(sweep.runs[name]) for name in added}
        texts |= {folder / "runs.txt": "".join(f"{run}\n" for run in begun.runs), folder / SWEEP: dump_yaml(values)}
        for path, text in texts.items():
            write_text(path, text)
    return begun


def read_begun(sweep: Sweep) -> SweepFolder:
    """Read what the sweep's folder holds of it, without runs if it is new. Raises UserError as `begin_sweep`."""
    folder, before = sweep.folder, SweepFolder(sweep.folder, {}, [], {})
    with reading("output_dir", folder, "a folder that can be read"):
        if is_sweep(folder):
            before = read_sweep_folder(folder)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(
                f"output_dir: {folder}: is not a sweep's folder, and not empty; expected a new folder. Set output_dir"
            )
    _refuse(folder, [*_list_changed_recipes(sweep, before), *_list_changed_inputs(before.inputs)])
    return before


def check_inputs(sweep: SweepFolder) -> None:
    """Raises UserError if the contents of data, scores or models have changed since the sweep first read them."""
    _refuse(sweep.folder, list(_list_changed_inputs(sweep.inputs)))


def _refuse(folder: Path, lines: Sequence[str]) -> None:
    """Raises UserError with these differences, if there are any."""
    if lines:
        listed = "\n".join(f"  {line}" for line in lines[:MOST_DIFFERENCES])
        raise UserError(
            f"output_dir: {folder}: holds a sweep with other runs:\n{listed}\n"
            "expected the same runs, to resume the sweep (cells and seeds may be added), or a new folder. Undo the "
            "change, or set output_dir"
        )


def _list_changed_recipes(sweep: Sweep, before: SweepFolder) -> Iterator[str]:
    for name in before.runs:
        if name not in sweep.runs:
            yield f"{name}: found there, not in {sweep.file}"
            continue
        there, here = read_resolved_recipe(before.recipe_path(name)), sweep.runs[name]
        old, new = flat_values(there), flat_values(here)
        differing = differing_keys(there, here)
        for key in old | new:
            if key in differing or (FIXED.fullmatch(key) and old.get(key) != new.get(key)):
                yield f"{name}: {key}: {show(old.get(key))} there, {show(new.get(key))} here"


def digest_inputs(recipes: Iterable[Recipe]) -> dict[str, dict[str, str]]:
    """Key of a recipe -> path -> digest of all inputs of these recipes that are on this machine: cells with other
    contents under the same path must not share a table. Raises UserError where a path exists and holds no data."""
    paths = set()
    for recipe in recipes:
        paths.add(("model.path", recipe.model.path))
        paths |= {(re.sub(r"(_path)\W.*", r"\1", f"data.{key}"), path) for key, path in recipe.data.paths().items()}
    digests: dict[str, dict[str, str]] = {}
    for key, path in sorted(paths):
        if (digest := _digest(key, path)) is not None:
            digests.setdefault(key, {})[path] = digest
    return digests


def _list_changed_inputs(digests: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """A line for each input whose contents have changed; missing ones are left to the runs."""
    for key, by_path in digests.items():
        for path, digest in by_path.items():
            if _digest(key, path) not in (None, digest):
                yield f"{key}: {path}: contents have changed since the sweep first read them"


def _digest(key: str, path: str) -> str | None:
    """None for a path that is not on this machine, such as a login node."""
    # Imported here: `vcore-ds sweep --status` does not need these, and they take seconds.
    from vcore_ds.data.prepare.sources import describe_source, find_files
    from vcore_ds.data.scores_folder import TRACES
    from vcore_ds.data.store import read_manifest
    from vcore_ds.models.model_identity import compute_model_digest

    if key == "model.path":
        try:
            return compute_model_digest(path)
        except UserError:
            return None
    if not is_readable(path):
        return None
    file = Path(path, TRACES) if key == "data.keep.scores" else Path(path)
    if not key.endswith("_path"):  # scores, or a single file
        with reading(key, file, "a file that can be read"):
            return compute_file_digest(file) if file.is_file() else None
    if (file / MANIFEST).is_file():
        return read_manifest(file)["digest"]
    with suppress(UserError):  # a folder with other splits; the run reports it if it lacks data.split
        return hashlib.sha256(json.dumps(describe_source(find_files([path], "train"))).encode()).hexdigest()
    return None


# ---- a plan ----------------------------------------------------------------------------------------------------------


def plan_sweep(sweep: Sweep, gpu: str, num_ranks: int) -> None:
    """Print the runs that are not done, with the plan and GPU hours of `vcore-ds plan`. Raises UserError as
    `begin_sweep`, and after printing for runs that `check` or `plan` refuses."""
    begun, rows, num_runs, hours = read_begun(sweep), [], 0, 0.0
    refused: dict[str, list[str]] = {}
    lengths: dict[str, LengthModel] = {}  # of cells that do not differ in what is checked, which takes seconds
    with tempfile.TemporaryDirectory() as cache:
        for cell in sweep.references:
            runs = [run for run in sweep.runs if run.rpartition("/")[0] == cell]
            num_left = sum(not begun.is_done(run) for run in runs)
            num_runs += num_left
            recipe = sweep.runs[runs[0]]
            checked = repr(recipe.model_copy(update={"optimizer": None, "run": None}))
            try:
                lengths[checked] = lengths.get(checked) or _check_run(recipe, cache)
                plan = plan_on(gpu, recipe, num_ranks, lengths[checked])
            except UserError as error:
                refused.setdefault(str(error), []).append(cell)
                rows.append((cell, count(num_left, "run"), "refused"))
                continue
            hours += num_left * plan.gpu_hours(plan.costed_steps)
            rows.append((cell, count(num_left, "run"), plan.describe().partition(" (assumed")[0]))
    print("\n".join(align_columns(rows, all_left=True)))
    print(f"{count(num_runs, 'run')}, {hours:,.3g} GPU hours in all (assumed speeds: vcore-ds plan)")
    if refused:
        lines = "".join(f"\n  {', '.join(cells)}: {problem}" for problem, cells in refused.items())
        raise UserError(f"{sum(map(len, refused.values()))} of {len(sweep.references)} cells would be refused:{lines}")


def _check_run(recipe: Recipe, cache: str) -> LengthModel:
    """Check model and data as `vcore-ds check` does, with token stores in the folder `cache`; return the lengths of the
    data. Raises UserError."""
    data, stores = recipe.data.model_copy(update={"cache_dir": cache}), dict[str, str]()
    for key, path in data.paths().items():
        if not is_readable(path) and not can_be_hub_id(path):
            raise UserError(f"data.{key}: {path}: there is no such file")
    if (tokenizer := check_model(recipe)) is not None:
        from vcore_ds.training.feed import check_local_data  # imports torch: seconds

        stores = check_local_data(data, recipe.model.path, tokenizer)
    return find_lengths(data, recipe.model.path, tokenizer, stores)


# ---- a job array -----------------------------------------------------------------------------------------------------

JOBS = "slurm_jobs.txt"  # file in the sweep's folder with the ids of its job arrays, one per line


def submit(sweep: SweepFolder, options: Sequence[str]) -> str:
    """Submit an array of the runs that are not done, running or queued; return a line to print. Raises UserError."""
    states = find_states(sweep)
    tasks = [task for task, state in enumerate(states) if state not in (State.DONE, State.RUNNING, QUEUED)]
    if not tasks:
        return f"nothing to submit: all {len(states)} runs are done, running or queued"
    array = f"--array={','.join(map(str, tasks))}"
    scripts = [str(SHIPPED_SLURM / name) for name in ("sweep.slurm", "train.sh")]
    command = ["sbatch", "--parsable", array, *options, scripts[0], str(sweep.folder), scripts[1]]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the jobs run this installation
    try:
        done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    except (FileNotFoundError, PermissionError):  # the latter where PATH has a folder without permission
        raise UserError("--slurm: found no sbatch on this machine; expected a login node of a SLURM cluster") from None
    if done.returncode != 0:
        raise UserError(f"--slurm: {shlex.join(command)}: {done.stderr.strip()}")
    job = done.stdout.strip().partition(";")[0]
    with writing("output_dir", sweep.folder), (sweep.folder / JOBS).open("a") as file:
        file.write(f"{job}\n")
    return f"job array {job}: {len(tasks)} of {len(states)} runs. vcore-ds sweep ... --status shows their state"


QUEUED = "queued"


def find_states(sweep: SweepFolder) -> list[str]:
    """The state of each run, and `QUEUED` for one that SLURM has not started, or is about to start again."""
    try:
        jobs = set((sweep.folder / JOBS).read_text().split())
        command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%F_%K"]
        tasks = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()
    except (OSError, subprocess.TimeoutExpired):  # no job array, or SLURM does not answer
        jobs, tasks = set(), []
    queued = {number for job, _, number in (task.partition("_") for task in tasks) if job in jobs}
    states = [sweep.state(run) for run in sweep.runs]
    return [
        QUEUED if str(task) in queued and state not in (State.DONE, State.RUNNING) else state
        for task, state in enumerate(states)
    ]


def describe(sweep: SweepFolder) -> str:
    """A line for each run, and the number of runs in each state."""
    states = find_states(sweep)
    rows = [
        (run, state, sweep.describe_failure(run) if state == State.FAILED else "")
        for run, state in zip(sweep.runs, states, strict=True)
    ]
    end = f"{len(states)} runs in {sweep.folder}: {_count(states)}"
    return "\n".join([*align_columns(rows, all_left=True), end])


def _count(states: Sequence[str]) -> str:
    counts = Counter(states)
    return ", ".join(f"{counts[state]} {state}" for state in [*State, QUEUED] if counts[state])


# ---- this machine ----------------------------------------------------------------------------------------------------

POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


def run_here(sweep: SweepFolder, num_ranks: int) -> None:
    """Train, one after another, all runs that are not done and that no other process is training; a failed run does not
    stop the others. A stop request (SIGTERM, SIGINT, SIGUSR1) is forwarded to the current run, which saves and stops.
    Raises UserError where inputs have changed since the sweep first read them, RunFailed for failed runs, RunStopped
    for unfinished ones."""
    requests: list[int] = []
    before = {number: signal.signal(number, lambda number, _: requests.append(number)) for number in STOPPING}
    try:
        for number, run in enumerate(sweep.runs, start=1):
            if requests:
                break
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
                code = _run_one(sweep, run, num_ranks, log, requests)
            outcome = {0: "done", EXIT_STOPPED: "stopped and saved"}.get(code)
            outcome = outcome or f"failed, {sweep.describe_failure(run)}"
            print(f"{' ' * len(where)}  {outcome}, after {time.monotonic() - started:,.0f} s", flush=True)
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)
    states = [sweep.state(run) for run in sweep.runs]
    done = f"{states.count(State.DONE)} of {len(states)} runs are done"
    again = "The same command skips finished runs, resumes stopped ones and retries failed ones"
    failed = [run for run, state in zip(sweep.runs, states, strict=True) if state == State.FAILED]
    if failed and not requests:
        lines = "".join(f"  {run}: {sweep.describe_failure(run)}\n" for run in failed)
        raise RunFailed(f"{done}, {len(failed)} failed:\n{lines}{again}. Logs: {sweep.folder / 'logs'}")
    if others := _count([state for state in states if state != State.DONE]):
        cause = f"stopped by {signal.Signals(requests[0]).name}: " if requests else ""
        raise RunStopped(f"{cause}{done}, {others}. {again}")
    print(f"{done}. Tables and curves: vcore-ds report {shlex.quote(str(sweep.folder))}", flush=True)


def _run_one(sweep: SweepFolder, run: str, num_ranks: int, log: BinaryIO, requests: Sequence[int]) -> int:
    """Train a run, forward the stop requests that arrive, and return the exit code."""
    launcher = ["-m", "vcore_ds.distributed.torchrun", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), "-m", "vcore_ds.commands.cli", "train"]
    with writing("output_dir", sweep.folder):
        sweep.exit_path(run).unlink(missing_ok=True)
        log.write(f"{ATTEMPT} of {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n".encode())
        log.flush()
        # The child inherits the open log and its lock, which lasts until the last process of the run ends.
        process = subprocess.Popen(
            [*command, str(sweep.recipe_path(run))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONSAFEPATH": "1"},  # the user's working folder may hold a queue.py
            start_new_session=True,  # else Ctrl-C would reach the run twice
            preexec_fn=_stop_with_parent,
        )
        num_forwarded = 0
        while process.poll() is None:
            for number in requests[num_forwarded:]:
                process.send_signal(number)
                num_forwarded += 1
            time.sleep(POLL_SECONDS)
        # A request may have ended the run before it had a handler.
        code = EXIT_STOPPED if -process.returncode in requests else process.returncode
        sweep.exit_path(run).write_text(f"{code}\n")
    return code


def _stop_with_parent() -> None:
    """Make the run save and stop if this process is killed, instead of training on unattended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
