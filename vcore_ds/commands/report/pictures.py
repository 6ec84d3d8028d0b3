"""The curves of a report for a paper: a PNG and a PDF each."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vcore_ds.commands.report.curves import Chart, make_charts
from vcore_ds.commands.report.read import ReportedRun, group_runs
from vcore_ds.files.user_paths import writing
from vcore_ds.results.presentation import COLOURS, check_matplotlib, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHES = ("-", "--", ":", "-.")


def write_pictures(runs: Sequence[ReportedRun], folder: Path) -> list[Path]:
    """Writes the curves of the runs that are not constant, and returns the files.

    Raises:
        UserError: matplotlib is missing, or the folder cannot be written.
    """
    check_matplotlib("--png")
    groups = group_runs(runs)
    written = []
    with writing("--png", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for chart in make_charts(groups):
            if chart.is_constant():
                continue
            figure = new_figure(4.0, 2.8)
            axes = figure.add_subplot()
            _draw(axes, chart, [group.label for group in groups])
            for ending in (".png", ".pdf"):
                path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', chart.key)}{ending}"
                figure.savefig(path, dpi=200)
                written.append(path)
    return written


def _draw(axes: "Axes", chart: Chart, labels: Sequence[str]) -> None:
    for one in chart.series:
        colour = COLOURS[one.group % len(COLOURS)]
        style = DASHES[one.group % len(DASHES)] if len(one.steps) > 1 else "o"
        axes.plot(one.steps, one.values, style, color=colour, label=labels[one.group], linewidth=1.5)
        for low, high in one.bands:
            axes.fill_between(one.steps, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel("step")
    # Names are the user's, and not formulas where they hold `$`.
    axes.set_ylabel(chart.title + (f" ({chart.unit})" if chart.unit else ""), parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    if len(labels) > 1:
        for text in axes.legend(frameon=False, fontsize="small").get_texts():
            text.set_parse_math(False)
