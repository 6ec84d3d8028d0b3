"""A sweep: one recipe with changes, over cells and seeds; from a YAML file to the resolved recipe of every run."""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vcore_ds.common.errors import UserError
from vcore_ds.config.files import ParsedYaml, UnreadableFile, parse_yaml, read_text
from vcore_ds.config.load import load_recipe, make_override
from vcore_ds.config.problems import RecipeError, show
from vcore_ds.config.resume import flat_values
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.known_models import find_or_assume_shape
from vcore_ds.planning.settings import PlanSettings, derive_plan_settings

KEYS = ("recipe", "output_dir", "seeds", "common", "grid", "cells", "reference")
MOST_RUNS = 1000
"""SLURM numbers the tasks of an array up to 1,000, unless a site says otherwise."""

_MANY_RANKS = 192
"""Taken where a run's world size is not known: nodes of 4, 6 and 8 GPUs divide it."""

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
_SET_BY_THE_SWEEP = ("run.seed", "run.output_dir")


@dataclass(frozen=True)
class Cell:
    """Runs that differ in the seed only."""

    name: str
    choices: Mapping[str, str]
    """Axis of the grid -> what was chosen on it; empty for a cell of the list."""
    overrides: tuple[str, ...]
    """Fragments and overrides, as on a command line."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str
    """`CELL/seed_N`."""
    cell: str
    seed: int
    recipe: Recipe


@dataclass(frozen=True)
class Sweep:
    """A sweep file, with every recipe resolved and validated."""

    file: Path
    folder: Path
    """`output_dir`."""
    references: Mapping[str, str | None]
    """Cell -> the cell that it is compared with, in the order of the file."""
    runs: tuple[SweepRun, ...]
    """Seed by seed within a cell."""


def load_sweep(path: str | Path, num_ranks: int | None = None) -> Sweep:
    """Read a sweep file and resolve the recipe of every run.

    Args:
        num_ranks: world size of a run; None where that is not known yet.

    Raises:
        RecipeError: with all problems of the file and of all cells.
    """
    draft = _read(Path(path))
    cells = [*_expand_grid(draft), *_list_named_cells(draft)]
    seeds, recipe, folder = _take_seeds(draft), _take_text(draft, "recipe"), _take_text(draft, "output_dir")
    common = _check_overrides(draft, "common", draft.values.get("common"))
    names = [cell.name for cell in cells]
    for name in sorted(name for name, count in Counter(names).items() if count > 1):
        draft.add("cells", f"found two cells that are called {show(name)}; expected different names")
    num_runs = len(cells) * max(1, len(seeds))
    if num_runs > MOST_RUNS:
        draft.add("seeds", f"found {num_runs:,} runs; expected at most {MOST_RUNS:,}")
        cells = []
    references = {cell.name: _find_reference(draft, cell, cells) for cell in cells}
    if draft.problems:
        raise RecipeError(draft.problems)
    base = Path(folder).expanduser()
    runs = _resolve(draft, recipe, common, cells, seeds, base, num_ranks)
    return Sweep(Path(path), base, references, tuple(runs))


@dataclass
class _Draft:
    file: Path
    parsed: ParsedYaml
    problems: list[str] = field(default_factory=list)

    @property
    def values(self) -> dict[str, Any]:
        return self.parsed.value

    def add(self, key: str, text: str) -> None:
        line = self.parsed.lines.get(key)
        self.problems.append(f"{self.file}{'' if line is None else f':{line}'}: {key}: {text}")


def _read(path: Path) -> _Draft:
    expected = f"expected a sweep: YAML with the keys {', '.join(KEYS)}"
    try:
        parsed = parse_yaml(read_text(path))
    except FileNotFoundError:
        raise RecipeError([f"{path}: found no such file; {expected}"]) from None
    except UnreadableFile as error:
        raise RecipeError([f"{path}{error.position}: {error}; {expected}"]) from None
    if not isinstance(parsed.value, dict):
        raise RecipeError([f"{path}: found {show(parsed.value)}; {expected}"])
    draft = _Draft(path, parsed)
    for key, line, first_line in parsed.duplicates:
        draft.problems.append(f"{path}:{line}: {key}: found a second time (first in line {first_line}); expected once")
    if parsed.value.keys() & Recipe.model_fields.keys():
        raise RecipeError([f"{path}: found a recipe; {expected}. Write one with the line `recipe: {path}`"])
    for key in parsed.value:
        if key not in KEYS:
            draft.add(key, f"found an unknown key; expected {', '.join(KEYS)}")
    return draft


def _take_text(draft: _Draft, key: str) -> str:
    value = draft.values.get(key)
    if isinstance(value, str) and value:
        return value
    meaning = {"recipe": "a recipe's file name", "output_dir": "the folder of the sweep"}[key]
    draft.add(key, f"found {show(value)}; expected {meaning}")
    return ""


def _take_seeds(draft: _Draft) -> list[int]:
    value = draft.values.get("seeds")
    seeds = value if isinstance(value, list) else []
    if seeds and all(type(seed) is int and seed >= 0 for seed in seeds) and len(set(seeds)) == len(seeds):
        return seeds
    draft.add("seeds", f"found {show(value)}; expected a list of different whole numbers, such as [1, 2, 3]")
    return []


def _check_overrides(draft: _Draft, key: str, value: Any) -> tuple[str, ...]:
    """Return fragments and overrides, given as a word, a list of words, or null for none."""
    overrides = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(overrides, list) or not all(isinstance(word, str) and word for word in overrides):
        draft.add(key, f"found {show(value)}; expected FRAGMENT.yaml or section.key=value, or a list of these")
        return ()
    for word in overrides:
        if word.partition("=")[0].strip() in _SET_BY_THE_SWEEP:
            draft.add(key, f"found {show(word)}; expected no {word.partition('=')[0]}: the sweep sets it")
    return tuple(overrides)


def _iter_named_overrides(draft: _Draft, key: str, value: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    if not isinstance(value, dict) or not value:
        draft.add(key, f"found {show(value)}; expected NAME: its overrides, one or more")
        return
    for name, overrides in value.items():
        if not _NAME.fullmatch(name):
            draft.add(key, f"found the name {show(name)}; expected letters, digits and . _ + -")
        yield name, _check_overrides(draft, f"{key}.{name}", overrides)


def _list_named_cells(draft: _Draft) -> list[Cell]:
    if "cells" not in draft.values:
        if "grid" not in draft.values:
            draft.add("cells", "found neither cells nor grid; expected at least one")
        return []
    return [
        Cell(name, {}, overrides) for name, overrides in _iter_named_overrides(draft, "cells", draft.values["cells"])
    ]


def _expand_grid(draft: _Draft) -> list[Cell]:
    """List the cells of the product of the axes, the last one fastest."""
    grid = draft.values.get("grid", {})
    if not isinstance(grid, dict) or ("grid" in draft.values and not grid):
        draft.add("grid", f"found {show(grid)}; expected axes: section.key: [values], or NAME: {{choice: overrides}}")
        return []
    axes = {axis: list(_iter_choices(draft, axis, value)) for axis, value in grid.items()}
    if math.prod(map(len, axes.values())) > MOST_RUNS:
        draft.add("grid", f"found more than {MOST_RUNS:,} cells; expected at most {MOST_RUNS:,} runs")
        return []
    cells = []
    for chosen in itertools.product(*axes.values()) if axes else ():
        labels = [label for label, _ in chosen]
        overrides = tuple(word for _, words in chosen for word in words)
        cells.append(Cell(",".join(labels), dict(zip(axes, labels, strict=True)), overrides))
    return cells


def _iter_choices(draft: _Draft, axis: str, value: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (label, overrides) along an axis: the values of a key of the recipe, or named overrides."""
    if "." not in axis:
        yield from _iter_named_overrides(draft, f"grid.{axis}", value)
        return
    if axis in _SET_BY_THE_SWEEP:
        draft.add(f"grid.{axis}", "found a key that the sweep sets; expected another one")
    if not isinstance(value, list) or not value:
        draft.add(f"grid.{axis}", f"found {show(value)}; expected a list of values")
        return
    for choice in value:
        text = f"{choice:g}" if isinstance(choice, float) else choice if isinstance(choice, str) else json.dumps(choice)
        label, key = re.sub(r"[^\w.+-]", "_", text), axis.rpartition(".")[2]
        yield label if key == "name" else f"{key}={label}", (make_override(axis, choice),)


def _find_reference(draft: _Draft, cell: Cell, cells: Sequence[Cell]) -> str | None:
    """Find the cell that `reference` names for this one: a cell of that name, else the cell that differs only in having
    this choice on its axis. None for the reference itself."""
    wanted = draft.values.get("reference")
    if wanted is None:
        return None
    if any(other.name == wanted for other in cells):
        return None if cell.name == wanted else str(wanted)
    axes = [axis for other in cells for axis, choice in other.choices.items() if choice == wanted]
    if not axes:
        problem = f"found {show(wanted)}; expected the name of a cell, or a choice on an axis of the grid"
        if not any(problem in known for known in draft.problems):
            draft.add("reference", problem)
        return None
    choices = {**cell.choices, axes[0]: wanted}
    twin = next((other.name for other in cells if other.choices == choices), None)
    return None if twin == cell.name else twin


def _resolve(
    draft: _Draft,
    recipe: str,
    common: Sequence[str],
    cells: Sequence[Cell],
    seeds: Sequence[int],
    folder: Path,
    num_ranks: int | None,
) -> list[SweepRun]:
    """Resolve the recipe of every run. Raises RecipeError with the problems of all cells; a common one appears once."""
    runs: list[SweepRun] = []
    problems: dict[str, list[str]] = {}
    for cell in cells:
        for seed in seeds:
            name = f"{cell.name}/seed_{seed}"
            overrides = [
                *common,
                *cell.overrides,
                make_override("run.seed", seed),
                make_override("run.output_dir", folder / "runs" / name),
            ]
            try:
                loaded = load_recipe(recipe, overrides)
                settings = derive_plan_settings(loaded)
                plan = plan_batch(
                    settings, num_ranks or _find_divisible_ranks(settings), find_or_assume_shape(loaded.model.path)
                )
                deepspeed_config(settings, plan)
            except UserError as error:
                for problem in error.problems if isinstance(error, RecipeError) else [str(error)]:
                    problems.setdefault(problem, []).append(cell.name)
                break  # the other seeds have the same problems
            runs.append(SweepRun(name, cell.name, seed, loaded))
    if not problems:
        problems |= {problem: [] for problem in _find_equal_cells(draft.file, runs)}
    if problems:
        raise RecipeError(
            problem if len(where) in (0, len(cells)) else f"{draft.file}: {', '.join(where)}: {problem}"
            for problem, where in problems.items()
        )
    return runs


def _find_divisible_ranks(settings: PlanSettings) -> int:
    """Find a world size that the tensor-, expert- and sequence-parallel sizes divide."""
    sizes = [k for k in (settings.batch.sequence_parallel, settings.probe.sequence_parallel) if k != "auto"]
    return settings.parallel.tensor * math.lcm(_MANY_RANKS, settings.parallel.expert, *sizes)


def _find_equal_cells(file: Path, runs: Sequence[SweepRun]) -> Iterator[str]:
    """Find cells with the same recipe under two names, which a typing mistake makes."""
    by_recipe: dict[str, str] = {}
    for run in runs:
        values = {key: value for key, value in flat_values(run.recipe).items() if key not in _SET_BY_THE_SWEEP}
        first = by_recipe.setdefault(repr(values), run.cell)
        if first != run.cell and run.seed == runs[0].seed:
            yield f"{file}: {first}, {run.cell}: found two cells with the same recipe; expected a difference"
