"""The tables of a sweep: means over seeds with their intervals, differences paired by seed, and what the runs cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vcore_ds.commands.report.read import ReportedRun
from vcore_ds.commands.report.scaling import scaling_tables
from vcore_ds.commands.report.tables import NOTHING, Table
from vcore_ds.errors import UserError
from vcore_ds.results.presentation import markdown_rows
from vcore_ds.results.statistics import cell, paired
from vcore_ds.results.sweep_folder import State, SweepFolder, read_sweep_folder

LAST_SHARE = 0.1
"""Share of the steps, the last ones, over which the training loss is taken."""
DIGITS = 4
NOTE = (
    "± is half of the 95% interval of the mean (Student's t over seeds, from three seeds on). Differences are paired "
    "by seed. Where their interval does not contain 0 they are bold; among many rows some are so by chance."
)


@dataclass(frozen=True)
class SweepTables:
    """What a report says of a sweep."""

    name: str
    note: str
    missing: str
    """Runs that are not done and so not in the tables; empty where all are."""
    tables: list[Table]

    def markdown(self) -> str:
        parts = [f"# {self.name}", *([self.missing] if self.missing else [])]
        for table in self.tables:
            head, *rows = markdown_rows([table.head, *table.rows])
            parts.append("\n".join([head, "|" + "---|" * len(table.head), *rows]))
        return "\n\n".join([*parts, self.note]) + "\n"


def finished_runs(folder: Path) -> tuple[SweepFolder, list[str]]:
    """A sweep, and the names of its runs that are done.

    Raises:
        UserError: no run is done.
    """
    sweep = read_sweep_folder(folder)
    done = [run for run in sweep.runs if sweep.state(run) == State.DONE]
    if not done:
        raise UserError(f"{folder}: found no run of this sweep that is done; expected one. vcore-ds sweep trains them")
    return sweep, done


def sweep_tables(sweep: SweepFolder, runs: Sequence[ReportedRun]) -> SweepTables:
    """Tables over the runs that are done, whose names are those of the sweep."""
    by_cell: dict[str, dict[int, ReportedRun]] = {name: {} for name in sweep.references}
    for run in runs:
        by_cell[run.name.rpartition("/")[0]][run.recipe.run.seed] = run
    there = {run.name for run in runs}
    missing = [f"{name} ({sweep.state(name)})" for name in sweep.runs if name not in there]
    return SweepTables(
        name=f"Sweep {sweep.folder.resolve().name}",
        note=NOTE,
        missing=f"{len(runs)} of {len(sweep.runs)} runs are done; missing: {', '.join(missing)}." if missing else "",
        tables=[_result_table(sweep, by_cell), _cost_table(by_cell), *_scaling_tables(by_cell)],
    )


def _result_table(sweep: SweepFolder, by_cell: dict[str, dict[int, ReportedRun]]) -> Table:
    measures = _measures([run for found in by_cell.values() for run in found.values()])
    has_references = any(reference is not None for reference in sweep.references.values())
    head = ["cell", "seeds", *(["compared with"] if has_references else [])]
    for title in measures:
        head += [title, *(["difference"] if has_references else [])]
    rows = []
    for name, found in by_cell.items():
        reference = sweep.references[name]
        row = [name, str(len(found)), *([reference or ""] if has_references else [])]
        for value_of in measures.values():
            values = _by_seed(found, value_of)
            row.append(cell(list(values.values()), DIGITS) if values else NOTHING)
            if has_references:
                others = _by_seed(by_cell[reference], value_of) if reference is not None else {}
                differences = paired(values, others)
                row.append(cell(differences, DIGITS, difference=True) if differences else "")
        rows.append(row)
    return Table("Losses, nats", head, rows)


def _scaling_tables(by_cell: dict[str, dict[int, ReportedRun]]) -> list[Table]:
    """Power laws of the first held-out loss, or of the training loss where there is none."""
    title, value_of = next(iter(_measures([run for found in by_cell.values() for run in found.values()]).items()))
    return scaling_tables(by_cell, title, value_of)


Measure = Callable[[ReportedRun], float | None]


def _measures(runs: Sequence[ReportedRun]) -> dict[str, Measure]:
    """Title -> value of a run: the held-out losses that any run has, and the training loss."""
    names = dict.fromkeys(name for run in runs for name in run.held_out.after)
    measures: dict[str, Measure] = {}
    for name in names:
        measures[f"held-out loss{name and f', {name}'}"] = partial(_held_out_loss, name)
    measures[f"training loss, last {LAST_SHARE:.0%} of the steps"] = _last_loss
    return measures


def _held_out_loss(name: str, run: ReportedRun) -> float | None:
    return run.held_out.after.get(name)


def _last_loss(run: ReportedRun) -> float | None:
    """Mean of the uniform cross-entropy over the last steps, at least one."""
    losses = [loss for line in run.metrics if (loss := line.get("loss")) is not None]
    return float(np.mean(losses[-max(1, round(LAST_SHARE * len(losses))) :])) if losses else None


def _by_seed(found: dict[int, ReportedRun], value_of: Measure) -> dict[int, float]:
    values = {seed: value_of(run) for seed, run in sorted(found.items())}
    return {seed: value for seed, value in values.items() if value is not None}


def _cost_table(by_cell: dict[str, dict[int, ReportedRun]]) -> Table:
    """Means over seeds: cells with equal steps are not equal in cost."""
    head = ["cell", "steps", "supervised tokens", "seconds a step", "hours x ranks"]
    rows = []
    for name, found in by_cell.items():
        runs = list(found.values())
        steps = [run.metrics[-1]["step"] or 0 for run in runs]
        seconds = [run.total("seconds") for run in runs]
        ranks = [run.environment.get("world_size") for run in runs]
        # A step that was lost and taken again counts once; so does the first, which allocates and compiles.
        cells = [NOTHING] * 4
        if runs:
            hours = [each * rank / 3600 for each, rank in zip(seconds, ranks, strict=True) if isinstance(rank, int)]
            cells = [
                f"{np.mean(steps):,.0f}",
                f"{np.mean([run.total('supervised_tokens') for run in runs]):,.0f}",
                f"{np.sum(seconds) / max(1, np.sum(steps)):.3g}",
                f"{np.mean(hours):.3g}" if hours else NOTHING,
            ]
        rows.append([name, *cells])
    return Table("Cost, mean over seeds", head, rows)
