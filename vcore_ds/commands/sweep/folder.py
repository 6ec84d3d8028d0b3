"""A sweep's folder: its runs with their recipes, logs and states, and checks that all of them stay comparable.

sweep.yaml                   cells and the cell that each is compared with, all runs in order, digests of inputs
runs.txt                     the runs, one per line: task N of a job array is line N, from 0
recipes/CELL/seed_1.yaml     resolved recipe
logs/CELL/seed_1.log         output of all attempts; locked during an attempt
logs/CELL/seed_1.exit        exit code of the last attempt that ended
runs/CELL/seed_1/            the run's folder
"""

import fcntl
import hashlib
import json
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from vcore_ds.commands.sweep.cells import Sweep
from vcore_ds.common.digests import compute_file_digest
from vcore_ds.common.errors import EXIT_STOPPED, UserError
from vcore_ds.common.paths import is_readable, reading, write_text, writing
from vcore_ds.config.files import UnreadableFile, dump_yaml, parse_yaml, read_text
from vcore_ds.config.load import dump_recipe
from vcore_ds.config.resume import differing_keys, flat_values, read_resolved_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import ScheduleConfig
from vcore_ds.training.run_folder import METRICS

DATA_KEYS = ("data.train_path", "data.probe_path", "data.validation_path")
FILE_KEYS = ("data.keep.scores", "data.reference_log_probabilities", "data.token_weights")
MODEL_KEY = "model.path"

Digests = Mapping[str, Mapping[str, str]]  # key of a recipe -> path -> digest of the contents


def digest_inputs(recipes: Iterable[Recipe]) -> dict[str, dict[str, str]]:
    """Digests of all inputs of these recipes that are on this machine: cells with other contents under the same path
    must not share a table. Raises UserError where a path exists and holds no data."""
    digests: dict[str, dict[str, str]] = {}
    for key, path in sorted({(key, path) for recipe in recipes for key, path in _paths(recipe)}):
        if (digest := _digest(key, path)) is not None:
            digests.setdefault(key, {})[path] = digest
    return digests


def changed_inputs(digests: Digests) -> Iterator[str]:
    """A line for each input whose contents have changed; missing ones are left to the runs. Raises UserError as
    `digest_inputs`."""
    for key, by_path in digests.items():
        for path, digest in by_path.items():
            if _digest(key, path) not in (None, digest):
                yield f"{key}: {path}: contents have changed since the sweep first read them"


def _paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    yield MODEL_KEY, recipe.model.path
    for key, path in recipe.data.paths().items():
        yield next(name for name in (*DATA_KEYS, *FILE_KEYS) if f"data.{key}".startswith(name)), path


def _digest(key: str, path: str) -> str | None:
    """None for a path that is not on this machine, such as a login node."""
    # Imported here: `vcore-ds sweep --status` does not need these, and they take seconds.
    from vcore_ds.data.prepare.sources import describe_source, find_files
    from vcore_ds.data.scores_folder import TRACES
    from vcore_ds.data.store import MANIFEST, read_manifest
    from vcore_ds.models.model_identity import compute_model_digest

    if key == MODEL_KEY:
        try:
            return compute_model_digest(path)
        except UserError:
            return None
    if not is_readable(path):
        return None
    if key in FILE_KEYS:
        file = Path(path) / TRACES if key == "data.keep.scores" else Path(path)
        if not file.is_file():
            return None
        with reading(key, file, "a file that can be read"):
            return compute_file_digest(file)
    if (Path(path) / MANIFEST).is_file():
        return read_manifest(Path(path))["digest"]
    entries = describe_source(find_files([path], "train"))
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


SWEEP, RUN_NAMES = "sweep.yaml", "runs.txt"
MOST_DIFFERENCES = 20  # maximum lines of a message on recipes that differ
FIXED = (
    "data.train_path",
    "data.probe_path",
    "data.trusted_overlap",
    "data.validation_path",
    "data.keep.scores",
    "run.validate_every",
    "checkpoint.branch_from",
    *(f"schedule.{key}" for key in ScheduleConfig.model_fields),
)
"""Keys that a resumed run may change but a sweep may not, because its runs are compared."""
_CANCELLED = 128 + signal.SIGTERM
"""Exit code of a job script that SLURM has terminated, to cancel or to requeue it."""
ATTEMPT = "== attempt"  # prefix of the first line of an attempt in a log


class State(StrEnum):
    """State of a run."""

    DONE = "done"
    RUNNING = "running"
    FAILED = "failed"
    STOPPED = "stopped"  # started but unfinished: it will resume
    WAITING = "waiting"


@dataclass(frozen=True)
class SweepFolder:
    """A sweep's folder with the contents of sweep.yaml."""

    folder: Path
    references: dict[str, str | None]  # cell -> the cell that it is compared with
    runs: list[str]  # `CELL/seed_N`, in the order of their task numbers
    inputs: Digests = field(default_factory=dict)
    """Digests of data, scores and models from when the sweep first read them."""

    def recipe_path(self, run: str) -> Path:
        return self.folder / "recipes" / f"{run}.yaml"

    def log_path(self, run: str) -> Path:
        """File of the output of all attempts; locked during an attempt."""
        return self.folder / "logs" / f"{run}.log"

    def exit_path(self, run: str) -> Path:
        return self.folder / "logs" / f"{run}.exit"

    def run_folder(self, run: str) -> Path:
        return self.folder / "runs" / run

    def is_done(self, run: str) -> bool:
        """Whether the run's result exists, whoever trained it."""
        folder = self.run_folder(run)
        return (folder / "adapter").exists() or (folder / "model").exists()

    def state(self, run: str) -> State:
        if self.is_done(run):
            return State.DONE
        if self._is_locked(run):
            return State.RUNNING
        code = self.exit_code(run)
        if code not in (None, 0, EXIT_STOPPED, _CANCELLED):
            return State.FAILED
        return State.STOPPED if self.log_path(run).exists() else State.WAITING

    def exit_code(self, run: str) -> int | None:
        """The exit code of the last attempt; None if it was killed before it wrote one."""
        try:
            return int(self.exit_path(run).read_text())
        except (OSError, ValueError):
            return None

    def num_steps(self, run: str) -> int:
        try:
            return (self.run_folder(run) / METRICS).read_bytes().count(b"\n")
        except OSError:
            return 0

    def last_words(self, run: str) -> str:
        """The last message of the last attempt: the last of vcore-ds, else the last line with a letter or digit."""
        try:
            text = self.log_path(run).read_text(errors="replace")
        except OSError:
            return "nothing"
        lines = [line.strip() for line in text.rpartition(ATTEMPT)[2].splitlines()[1:]]
        lines = [line for line in lines if any(char.isalnum() for char in line)]
        messages = [line for line in lines if line.startswith("vcore-ds: ")]
        return (messages or lines or ["nothing"])[-1]

    @contextmanager
    def lock_log(self, run: str) -> Iterator[BinaryIO | None]:
        """Open the run's log, locked for this process and its children; None if another process holds the lock."""
        path = self.log_path(run)
        with writing("output_dir", self.folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("ab")
        with file:
            yield file if _lock(file, wait_seconds=1.0) else None  # waits, because `state` holds it for a moment

    def _is_locked(self, run: str) -> bool:
        try:
            with self.log_path(run).open("rb") as file:
                return not _lock(file)
        except OSError:
            return False


def _lock(file: BinaryIO, wait_seconds: float = 0.0) -> bool:
    """Lock the file; False if another process holds the lock. Always True on a file system without locks."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        except OSError:
            return True
        else:
            return True


def is_sweep(folder: Path) -> bool:
    return (folder / SWEEP).is_file()


def read_sweep_folder(folder: Path) -> SweepFolder:
    """Read sweep.yaml. Raises UserError where sweep.yaml is missing or damaged."""
    path = folder / SWEEP
    try:
        values = parse_yaml(read_text(path)).value
        references, runs = values["cells"], values["runs"]
        inputs = values.get("inputs", {})  # missing up to vcore_ds 0.7
        is_valid = isinstance(references, dict) and isinstance(inputs, dict)
        if not is_valid or not all(run.rpartition("/")[0] in references for run in runs):
            raise TypeError
        return SweepFolder(folder, references, list(runs), inputs)
    except FileNotFoundError:
        raise UserError(f"{folder}: found no {SWEEP} there; expected the folder of a sweep (output_dir)") from None
    except (UnreadableFile, TypeError, KeyError, AttributeError):
        raise UserError(f"{path}: is damaged; expected what vcore-ds sweep writes there") from None


def begin_sweep(sweep: Sweep) -> SweepFolder:
    """Make the sweep's folder, or extend that of the same sweep by new cells and seeds. Raises UserError where the
    folder holds something else, runs with other recipes, or runs that the sweep no longer has; or it cannot be
    written."""
    folder = sweep.folder
    wanted = {run.name: run.recipe for run in sweep.runs}
    before = SweepFolder(folder, {}, [])
    with writing("output_dir", folder):
        if is_sweep(folder):
            before = read_sweep_folder(folder)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(
                f"output_dir: {folder}: is not a sweep's folder, and not empty; expected a new folder. Set output_dir"
            )
        _check_recipes(sweep, before, wanted)
        added, inputs = [name for name in wanted if name not in before.runs], digest_inputs(wanted.values())
        for key, by_path in before.inputs.items():
            inputs[key] = {**inputs.get(key, {}), **by_path}
        begun = SweepFolder(folder, dict(sweep.references), [*before.runs, *added], inputs)
        values = {"file": str(sweep.file), "cells": begun.references, "runs": begun.runs, "inputs": inputs}
        texts = {begun.recipe_path(name): dump_recipe(wanted[name]) for name in added}
        texts |= {folder / RUN_NAMES: "".join(f"{run}\n" for run in begun.runs), folder / SWEEP: dump_yaml(values)}
        for path, text in texts.items():
            write_text(path, text)
    return begun


def check_inputs(sweep: SweepFolder) -> None:
    """Raises UserError if the contents of data, scores or models have changed since the sweep first read them."""
    _refuse(sweep.folder, [*changed_inputs(sweep.inputs)])


def _check_recipes(sweep: Sweep, before: SweepFolder, wanted: Mapping[str, Recipe]) -> None:
    lines = []
    for name in before.runs:
        if name not in wanted:
            lines.append(f"{name}: found there, not in {sweep.file}")
            continue
        recipe = read_resolved_recipe(before.recipe_path(name))
        lines += [f"{name}: {key}: {old!r} there, {new!r} here" for key, (old, new) in _differing(recipe, wanted[name])]
    _refuse(before.folder, [*lines, *changed_inputs(before.inputs)])


def _refuse(folder: Path, lines: list[str]) -> None:
    """Raises UserError with these differences, if there are any."""
    if lines:
        more = [f"and {len(lines) - MOST_DIFFERENCES:,} more"] if len(lines) > MOST_DIFFERENCES else []
        listed = "\n".join(f"  {line}" for line in [*lines[:MOST_DIFFERENCES], *more])
        raise UserError(
            f"output_dir: {folder}: holds a sweep with other runs:\n{listed}\n"
            "expected the same runs, to resume the sweep (cells and seeds may be added), or a new folder. Undo the "
            "change, or set output_dir"
        )


def _differing(before: Recipe, now: Recipe) -> Iterator[tuple[str, tuple[object, object]]]:
    yield from differing_keys(before, now).items()
    old, new = flat_values(before), flat_values(now)
    yield from ((key, (old.get(key), new.get(key))) for key in FIXED if old.get(key) != new.get(key))
