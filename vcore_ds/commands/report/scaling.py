"""Power laws over the cells of a sweep that differ in size only: of the model, of the data, or of both."""

from collections.abc import Callable, Mapping

import numpy as np

from vcore_ds.commands.report.power_law import Fit, fit_laws
from vcore_ds.commands.report.read import ReportedRun
from vcore_ds.commands.report.tables import Table
from vcore_ds.config.resume import flat_values
from vcore_ds.planning.memory_settings import parameter_counts
from vcore_ds.planning.run_plan import find_shape

SIZE_KEYS = ("model.path", "data.train_path", "schedule.num_steps", "schedule.num_epochs", "run.seed", "run.output_dir")
"""Keys in which cells that are fitted together may differ."""
SMALLEST_RANGE = 1.5
"""A size whose largest value is a smaller multiple of its smallest is taken as constant."""


def scaling_tables(
    by_cell: Mapping[str, Mapping[int, ReportedRun]], title: str, value_of: Callable[[ReportedRun], float | None]
) -> list[Table]:
    """A table for each group of cells that differ in size only and are enough for a fit; none in other sweeps.

    Args:
        title: of the loss.
        value_of: the loss of a run, None where it has none.
    """
    families: dict[str, list[str]] = {}
    for name, found in by_cell.items():
        if found:
            values = flat_values(next(iter(found.values())).recipe)
            rest = {key: value for key, value in values.items() if key not in SIZE_KEYS}
            families.setdefault(repr(rest), []).append(name)
    tables = []
    for names in families.values():
        fits, columns = _fit({name: list(by_cell[name].values()) for name in names}, value_of)
        if fits:
            caption = f"Power law of the {title}, {' and '.join(columns)}: {', '.join(names)}"
            head = ["law", *fits[0].names, "largest, predicted", "largest, measured", "error"]
            tables.append(Table(caption, head, [_row(fit) for fit in fits]))
    return tables


def _fit(
    cells: Mapping[str, list[ReportedRun]], value_of: Callable[[ReportedRun], float | None]
) -> tuple[list[Fit], list[str]]:
    """The fits, best first, and what their sizes are; none where nothing differs in size, or too little is there."""
    sizes: dict[str, dict[str, float]] = {"N": {}, "D": {}}
    for name, runs in cells.items():
        num_parameters = _num_parameters(runs[0])
        if num_parameters is not None:
            sizes["N"][name] = num_parameters
        sizes["D"][name] = float(np.mean([_num_tokens(run) for run in runs]))
    if len({run.recipe.model.path for runs in cells.values() for run in runs}) > 1 and len(sizes["N"]) < len(cells):
        return [], []  # sizes that differ and are not known
    columns = [name for name, found in sizes.items() if len(found) == len(cells) and _varies(list(found.values()))]
    points, losses = [], []
    for name, runs in cells.items():
        for run in runs:
            loss = value_of(run)
            if loss is not None and loss > 0:
                points.append([sizes[column][name] for column in columns])
                losses.append(loss)
    words = {"N": "N the model's parameters", "D": "D supervised tokens"}
    return (fit_laws(points, losses, columns) if columns and losses else []), [words[column] for column in columns]


def _varies(values: list[float]) -> bool:
    return min(values) > 0 and max(values) >= SMALLEST_RANGE * min(values)


def _num_parameters(run: ReportedRun) -> float | None:
    found = find_shape(run.recipe.model.path)
    return None if found is None or not found[0].hidden_size else float(parameter_counts(found[0]).all)


def _num_tokens(run: ReportedRun) -> float:
    return sum(line.get("supervised_tokens") or 0.0 for line in run.metrics)


def _row(fit: Fit) -> list[str]:
    cells = [
        f"{value:.3f} ({low:.3f} to {high:.3f})" for value, (low, high) in zip(fit.values, fit.intervals, strict=True)
    ]
    low, high = fit.predicted_interval
    return [
        fit.law,
        *cells,
        f"{fit.predicted:.4f} ({low:.4f} to {high:.4f})",
        f"{fit.measured:.4f}",
        f"{fit.error:+.2%}",
    ]
