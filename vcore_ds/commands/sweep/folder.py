"""A sweep: from its file to the recipe of every run, and its folder with their logs and states.

sweep.yaml                   cells and the cell that each is compared with, all runs in order, digests of inputs
runs.txt                     the runs, one per line: task N of a job array is line N, from 0
recipes/CELL/seed_1.yaml     resolved recipe
logs/CELL/seed_1.log         output of all attempts; locked during an attempt
logs/CELL/seed_1.exit        exit code of the last attempt that ended
runs/CELL/seed_1/            the run's folder
"""

import fcntl
import itertools
import json
import math
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.functional_validators import BeforeValidator

from vcore_ds.common.errors import EXIT_STOPPED, UserError
from vcore_ds.common.paths import expand_home, writing
from vcore_ds.config.load import load_recipe, make_override, read_yaml
from vcore_ds.config.problems import RecipeError, describe_problem, show
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.known_models import find_or_assume_shape
from vcore_ds.planning.settings import derive_plan_settings

MOST_RUNS = 1000  # SLURM numbers the tasks of an array up to 1,000, unless a site says otherwise
_MANY_RANKS = 192  # taken where a run's world size is not known: nodes of 4, 6 and 8 GPUs divide it


Text = Annotated[str, StringConstraints(min_length=1)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.+-]*$")]
Overrides = Annotated[
    tuple[Text, ...], BeforeValidator(lambda word: () if word is None else (word,) if isinstance(word, str) else word)
]
"""Fragments and overrides, as on a command line: a word, a list of words, or null for none."""


class SweepFile(BaseModel):
    """The contents of a sweep file."""

    model_config = ConfigDict(extra="forbid")

    recipe: Text
    output_dir: Text
    seeds: Annotated[list[Annotated[int, Field(strict=True, ge=0)]], Field(min_length=1)]
    common: Overrides = ()
    grid: dict[str, Annotated[list[Any] | dict[Name, Overrides], Field(min_length=1)]] = {}
    """Axes, the last one fastest: `section.key` with its values, or a name with its choices."""
    cells: dict[Name, Overrides] = {}
    reference: str | None = None


@dataclass(frozen=True)
class Cell:
    """Runs that differ in the seed only."""

    name: str
    choices: Mapping[str, str]  # axis of the grid -> what was chosen on it; empty for a cell of the list
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """A sweep file, with every recipe resolved and validated."""

    file: Path
    folder: Path  # `output_dir`
    references: dict[str, str | None]  # cell -> the cell that it is compared with, in the order of the file
    runs: dict[str, Recipe]  # `CELL/seed_N`, seed by seed within a cell


def load_sweep(path: str | Path, num_ranks: int | None = None) -> Sweep:
    """Read a sweep file and resolve the recipe of every run. `num_ranks`: world size of a run; None where that is not
    known yet. Raises RecipeError with all problems of the file, or of all cells."""
    file = Path(path)
    values, lines = _parse(file)

    def place(key: str) -> str:
        return f"{file}{f':{line}' if (line := lines.get(key)) else ''}: {key}"

    def check(is_valid: bool, key: str, found: str, expected: str) -> None:
        if not is_valid:
            raise RecipeError([f"{place(key)}: {describe_problem(found, expected)}"])

    try:
        sweep = SweepFile.model_validate(values)
    except ValidationError as error:
        problems: dict[str, str] = {}
        for one in error.errors():
            key = str(one["loc"][0])
            for part in one["loc"][1:]:  # without the parts that name a type
                key = f"{key}.{part}" if f"{key}.{part}" in lines else key
            found = "nothing" if one["type"] == "missing" else show(one["input"])
            # Of a value that may have one of several types, the first says enough.
            problems.setdefault(key, f"found {found}; {one['msg'].removeprefix('Value error, ')}")
        raise RecipeError(f"{place(key)}: {text}" for key, text in problems.items()) from None
    num_cells = len(sweep.cells) + (math.prod(map(len, sweep.grid.values())) if sweep.grid else 0)
    num_runs = num_cells * len(sweep.seeds)
    expected = f"1 to {MOST_RUNS:,}, from cells or grid or both"
    check(0 < num_runs <= MOST_RUNS, "grid" if sweep.grid else "cells", f"{num_runs:,} runs", expected)
    cells = [*_list_grid(sweep.grid), *(Cell(name, {}, words) for name, words in sweep.cells.items())]
    names = {cell.name for cell in cells}
    check(len(names) == len(cells), "cells", "cells of one name", "different names")
    check(len(set(sweep.seeds)) == len(sweep.seeds), "seeds", show(sweep.seeds), "different seeds")
    known = {None, *names, *(choice for cell in cells for choice in cell.choices.values())}
    expected = "the name of a cell, or a choice on an axis of the grid"
    check(sweep.reference in known, "reference", show(sweep.reference), expected)
    references = {cell.name: _find_reference(sweep.reference, cell, cells) for cell in cells}
    folder = expand_home(sweep.output_dir)
    return Sweep(file, folder, references, _resolve(file, sweep, cells, folder, num_ranks))


def _parse(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The values of a sweep file, and the line of each key."""
    expected = f"a sweep: YAML with the keys {', '.join(SweepFile.model_fields)}"
    values, lines = read_yaml(path, expected)
    if values.keys() & Recipe.model_fields.keys():
        raise RecipeError([f"{path}: found no sweep; expected {expected}. The line `recipe: FILE` names a recipe"])
    return values, lines


def _list_grid(grid: Mapping[str, list[Any] | dict[str, tuple[str, ...]]]) -> Iterator[Cell]:
    """The cells of a grid: along each axis the values of a key of the recipe, or named overrides."""
    axes: list[list[tuple[str, tuple[str, ...]]]] = []
    for axis, values in grid.items():
        choices = list(values.items()) if isinstance(values, dict) else []
        for value in [] if choices else values:
            text = f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
            label, key = re.sub(r"[^\w.+-]", "_", text), axis.rpartition(".")[2]
            choices.append((label if key == "name" else f"{key}={label}", (make_override(axis, value),)))
        axes.append(choices)
    for chosen in itertools.product(*axes) if axes else ():
        labels = dict(zip(grid, (label for label, _ in chosen), strict=True))
        yield Cell(",".join(labels.values()), labels, tuple(word for _, words in chosen for word in words))


def _find_reference(wanted: str | None, cell: Cell, cells: Sequence[Cell]) -> str | None:
    """Find the cell that `reference` names for this one: a cell of that name, else the cell that differs only in having
    this choice on its axis. None for the reference itself."""
    if wanted is None or wanted in {other.name for other in cells}:
        return None if wanted == cell.name else wanted
    axis = next(axis for other in cells for axis, choice in other.choices.items() if choice == wanted)
    choices = {**cell.choices, axis: wanted}
    return next((other.name for other in cells if other is not cell and other.choices == choices), None)


def _resolve(
    file: Path, sweep: SweepFile, cells: Sequence[Cell], folder: Path, num_ranks: int | None
) -> dict[str, Recipe]:
    """Resolve the recipe of every run. Raises RecipeError with the problems of all cells; a common one appears once."""
    runs: dict[str, Recipe] = {}
    problems: dict[str, list[str]] = {}
    cell_of: dict[str, str] = {}  # recipe -> the first cell with it; a typing mistake makes two
    for cell in cells:
        try:
            set_here = (make_override("run.output_dir", folder), make_override("run.seed", 0))
            recipe = load_recipe(sweep.recipe, [*sweep.common, *cell.overrides, *set_here])
            settings = derive_plan_settings(recipe)
            sizes = [k for k in (settings.batch.sequence_parallel, settings.probe.sequence_parallel) if k != "auto"]
            num = num_ranks or settings.parallel.tensor * math.lcm(_MANY_RANKS, settings.parallel.expert, *sizes)
            deepspeed_config(settings, plan_batch(settings, num, find_or_assume_shape(recipe.model.path)))
        except UserError as error:
            for problem in error.problems if isinstance(error, RecipeError) else [str(error)]:
                problems.setdefault(problem, []).append(cell.name)
            continue
        for seed in sweep.seeds:
            name = f"{cell.name}/seed_{seed}"
            changes = {"seed": seed, "output_dir": str(folder / "runs" / name)}
            runs[name] = recipe.model_copy(update={"run": recipe.run.model_copy(update=changes)})
        if (first := cell_of.setdefault(repr(recipe), cell.name)) != cell.name:
            problems[f"{file}: {first}, {cell.name}: found two cells with the same recipe; expected a difference"] = []
    if problems:
        raise RecipeError(
            problem if len(where) in (0, len(cells)) else f"{file}: {', '.join(where)}: {problem}"
            for problem, where in problems.items()
        )
    return runs


# ---- the folder ------------------------------------------------------------------------------------------------------

SWEEP = "sweep.yaml"
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
    inputs: dict[str, dict[str, str]]
    """Key of a recipe -> path -> digest of data, scores or a model when the sweep first read them."""

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
        return any((self.run_folder(run) / result).exists() for result in ("adapter", "model"))

    def state(self, run: str) -> State:
        if self.is_done(run):
            return State.DONE
        if not self.log_path(run).exists():
            return State.WAITING
        with self.log_path(run).open("rb") as file:
            if not _lock(file):
                return State.RUNNING
        has_failed = self.exit_code(run) not in (None, 0, EXIT_STOPPED, _CANCELLED)
        return State.FAILED if has_failed else State.STOPPED

    def exit_code(self, run: str) -> int | None:
        """The exit code of the last attempt; None if it was killed before it wrote one."""
        try:
            return int(self.exit_path(run).read_text())
        except (OSError, ValueError):
            return None

    def describe_failure(self, run: str) -> str:
        """The exit code and last message of the last attempt: the last of vcore-ds, else the last line with a letter or
        digit."""
        attempt = self.log_path(run).read_text(errors="replace").rpartition(ATTEMPT)[2]
        lines = [line.strip() for line in attempt.splitlines()[1:] if any(map(str.isalnum, line))]
        messages = [line for line in lines if line.startswith("vcore-ds: ")]
        return f"exit code {self.exit_code(run)}: {(messages or lines or ['nothing'])[-1]}"

    @contextmanager
    def lock_log(self, run: str) -> Iterator[BinaryIO | None]:
        """Open the run's log, locked for this process and its children; None if another process holds the lock."""
        path = self.log_path(run)
        with writing("output_dir", self.folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("ab")
        with file:
            yield file if _lock(file, tries=20) else None  # `state` holds it for a moment


def _lock(file: BinaryIO, tries: int = 1) -> bool:
    """Lock the file; False if another process holds the lock. Always True on a file system without locks."""
    for _ in range(tries):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            return True
        else:
            return True
    return False


def is_sweep(folder: Path) -> bool:
    return (folder / SWEEP).is_file()


def read_sweep_folder(folder: Path) -> SweepFolder:
    """Read sweep.yaml. Raises UserError where it is missing, damaged, or of another version."""
    expected = "the folder of a sweep (output_dir), as vcore-ds sweep writes it"
    values, _ = read_yaml(folder / SWEEP, expected)
    try:
        return SweepFolder(folder, dict(values["cells"]), list(values["runs"]), dict(values["inputs"]))
    except (TypeError, KeyError, ValueError):
        raise UserError(f"{folder / SWEEP}: is damaged, or of another version; expected {expected}") from None
