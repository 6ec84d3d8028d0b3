"""A sweep: one recipe with changes, over cells and seeds; from a YAML file to the resolved recipe of every run."""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.functional_validators import AfterValidator, BeforeValidator

from vcore_ds.common.errors import UserError
from vcore_ds.config.files import ParsedYaml, UnreadableFile, parse_yaml, read_text
from vcore_ds.config.load import load_recipe, make_override
from vcore_ds.config.problems import RecipeError, describe_problem, show
from vcore_ds.config.resume import flat_values
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.batch_plan import plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.known_models import find_or_assume_shape
from vcore_ds.planning.settings import PlanSettings, derive_plan_settings

MOST_RUNS = 1000
"""SLURM numbers the tasks of an array up to 1,000, unless a site says otherwise."""

_MANY_RANKS = 192
"""Taken where a run's world size is not known: nodes of 4, 6 and 8 GPUs divide it."""

_SET_BY_THE_SWEEP = ("run.seed", "run.output_dir")


def _refuse_set_keys(words: tuple[str, ...]) -> tuple[str, ...]:
    if named := [key for word in words if (key := word.partition("=")[0].strip()) in _SET_BY_THE_SWEEP]:
        raise ValueError(f"expected no {named[0]}: the sweep sets it")
    return words


def _refuse_repeated(values: list[int]) -> list[int]:
    if len(set(values)) < len(values):
        raise ValueError("expected different seeds")
    return values


def _list_words(value: Any) -> Any:
    return () if value is None else (value,) if isinstance(value, str) else value


Seed = Annotated[int, Field(strict=True, ge=0)]
Text = Annotated[str, StringConstraints(min_length=1)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.+-]*$")]
Axis = Annotated[str, AfterValidator(lambda axis: _refuse_set_keys((axis,))[0])]
Overrides = Annotated[tuple[Text, ...], BeforeValidator(_list_words), AfterValidator(_refuse_set_keys)]
"""Fragments and overrides, as on a command line: a word, a list of words, or null for none."""


class SweepFile(BaseModel):
    """The contents of a sweep file."""

    model_config = ConfigDict(extra="forbid")

    recipe: Text
    output_dir: Text
    seeds: Annotated[list[Seed], Field(min_length=1), AfterValidator(_refuse_repeated)]
    common: Overrides = ()
    grid: dict[Axis, Annotated[list[Any] | dict[Name, Overrides], Field(min_length=1)]] = {}
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
class SweepRun:
    """One run of a sweep."""

    name: str  # `CELL/seed_N`
    cell: str
    seed: int
    recipe: Recipe


@dataclass(frozen=True)
class Sweep:
    """A sweep file, with every recipe resolved and validated."""

    file: Path
    folder: Path  # `output_dir`
    references: Mapping[str, str | None]  # cell -> the cell that it is compared with, in the order of the file
    runs: tuple[SweepRun, ...]  # seed by seed within a cell


def load_sweep(path: str | Path, num_ranks: int | None = None) -> Sweep:
    """Read a sweep file and resolve the recipe of every run. `num_ranks`: world size of a run; None where that is not
    known yet. Raises RecipeError with all problems of the file, or of all cells."""
    file, parsed = Path(path), _parse(Path(path))
    try:
        sweep = SweepFile.model_validate(parsed.value)
    except ValidationError as error:
        raise RecipeError(_describe(file, parsed, error)) from None
    axes = {axis: list(_list_choices(axis, values)) for axis, values in sweep.grid.items()}
    num_cells = len(sweep.cells) + (math.prod(map(len, axes.values())) if axes else 0)
    num_runs = num_cells * len(sweep.seeds)
    if not 0 < num_runs <= MOST_RUNS:
        key = "grid" if axes else "cells"
        _refuse(file, parsed, key, f"{num_runs:,} runs", f"1 to {MOST_RUNS:,}, from cells or grid or both")
    chosen = itertools.product(*axes.values()) if axes else ()
    cells = [_join_choices(dict(zip(axes, choices, strict=True))) for choices in chosen]
    cells += [Cell(name, {}, words) for name, words in sweep.cells.items()]
    for name, number in Counter(cell.name for cell in cells).items():
        if number > 1:
            _refuse(file, parsed, "cells", f"two cells that are called {show(name)}", "different names")
    known = {cell.name for cell in cells} | {choice for cell in cells for choice in cell.choices.values()}
    if sweep.reference is not None and sweep.reference not in known:
        expected = "the name of a cell, or a choice on an axis of the grid"
        _refuse(file, parsed, "reference", show(sweep.reference), expected)
    references = {cell.name: _find_reference(sweep.reference, cell, cells) for cell in cells}
    folder = Path(sweep.output_dir).expanduser()
    return Sweep(file, folder, references, tuple(_resolve(file, sweep, cells, folder, num_ranks)))


def _parse(path: Path) -> ParsedYaml:
    expected = f"expected a sweep: YAML with the keys {', '.join(SweepFile.model_fields)}"
    try:
        parsed = parse_yaml(read_text(path))
    except FileNotFoundError:
        raise RecipeError([f"{path}: found no such file; {expected}"]) from None
    except UnreadableFile as error:
        raise RecipeError([f"{path}{error.position}: {error}; {expected}"]) from None
    if not isinstance(parsed.value, dict):
        raise RecipeError([f"{path}: found {show(parsed.value)}; {expected}"])
    if parsed.value.keys() & Recipe.model_fields.keys():
        raise RecipeError([f"{path}: found a recipe; {expected}. Write one with the line `recipe: {path}`"])
    if parsed.duplicates:
        raise RecipeError(
            f"{path}:{line}: {key}: {describe_problem(f'a second time (first in line {first})', 'once')}"
            for key, line, first in parsed.duplicates
        )
    return parsed


def _describe(file: Path, parsed: ParsedYaml, error: ValidationError) -> list[str]:
    """A line for each problem. Of a value that may have one of several types, the first says enough."""
    problems: dict[str, str] = {}
    for one in error.errors():
        key = str(one["loc"][0])
        for part in one["loc"][1:]:  # without the parts that name a type
            key = f"{key}.{part}" if f"{key}.{part}" in parsed.lines else key
        found = "nothing" if one["type"] == "missing" else show(one["input"])
        problems.setdefault(key, f"found {found}; {one['msg'].removeprefix('Value error, ')}")
    return [_place(file, parsed, key, text) for key, text in problems.items()]


def _place(file: Path, parsed: ParsedYaml, key: str, text: str) -> str:
    line = parsed.lines.get(key)
    return f"{file}{'' if line is None else f':{line}'}: {key}: {text}"


def _refuse(file: Path, parsed: ParsedYaml, key: str, found: str, expected: str) -> None:
    raise RecipeError([_place(file, parsed, key, describe_problem(found, expected))])


Choice = tuple[str, tuple[str, ...]]  # label, overrides


def _list_choices(axis: str, values: Sequence[Any] | Mapping[str, tuple[str, ...]]) -> Iterator[Choice]:
    """Yield the choices along an axis: the values of a key of the recipe, or named overrides."""
    if isinstance(values, Mapping):
        yield from values.items()
        return
    for value in values:
        text = f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
        label, key = re.sub(r"[^\w.+-]", "_", text), axis.rpartition(".")[2]
        yield label if key == "name" else f"{key}={label}", (make_override(axis, value),)


def _join_choices(choices: Mapping[str, Choice]) -> Cell:
    labels = {axis: label for axis, (label, _) in choices.items()}
    return Cell(",".join(labels.values()), labels, tuple(word for _, words in choices.values() for word in words))


def _find_reference(wanted: str | None, cell: Cell, cells: Sequence[Cell]) -> str | None:
    """Find the cell that `reference` names for this one: a cell of that name, else the cell that differs only in having
    this choice on its axis. None for the reference itself."""
    if wanted is None:
        return None
    twin: str | None = wanted
    if not any(other.name == wanted for other in cells):
        axis = next(axis for other in cells for axis, choice in other.choices.items() if choice == wanted)
        choices = {**cell.choices, axis: wanted}
        twin = next((other.name for other in cells if other.choices == choices), None)
    return None if twin == cell.name else twin


def _resolve(
    file: Path, sweep: SweepFile, cells: Sequence[Cell], folder: Path, num_ranks: int | None
) -> list[SweepRun]:
    """Resolve the recipe of every run. Raises RecipeError with the problems of all cells; a common one appears once."""
    runs: list[SweepRun] = []
    problems: dict[str, list[str]] = {}
    for cell in cells:
        for seed in sweep.seeds:
            name = f"{cell.name}/seed_{seed}"
            overrides = [
                *sweep.common,
                *cell.overrides,
                make_override("run.seed", seed),
                make_override("run.output_dir", folder / "runs" / name),
            ]
            try:
                loaded = load_recipe(sweep.recipe, overrides)
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
        problems |= {problem: [] for problem in _find_equal_cells(file, runs)}
    if problems:
        raise RecipeError(
            problem if len(where) in (0, len(cells)) else f"{file}: {', '.join(where)}: {problem}"
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
