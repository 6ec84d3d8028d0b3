"""The page of a report."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.commands import html_page
from vcore_ds.commands.report.curves import make_charts
from vcore_ds.commands.report.read import Group, ReportedRun, group_runs
from vcore_ds.commands.report.scaling import SweepTables
from vcore_ds.commands.report.tables import (
    compare_tables,
    difference_table,
    environment_table,
    phases_of,
    results_table,
    summary,
    tables_of,
)
from vcore_ds.commands.report.traces import (
    MOST_FOLLOWED_TOKENS,
    MOST_TOKENS,
    encode_followed,
    encode_traces,
    part_of_run,
    utilities_of,
)
from vcore_ds.common.paths import write_atomically, writing
from vcore_ds.common.statistics import rank_correlation
from vcore_ds.config.load import dump_recipe

SOURCES = Path(__file__).parent / "page"
SCRIPTS = ("charts.js", "traces.js", "followed.js", "density.js", "main.js")
"""In the order in which they stand in the page."""


def write_page(runs: Sequence[ReportedRun], path: Path, sweep: SweepTables | None = None) -> Path:
    """Writes the report of the runs, at least one, and of the sweep that they are of.

    Raises:
        UserError: the file cannot be written.
    """
    page = render(runs, sweep)
    with writing("--output", path, "a file that can be written"), write_atomically(path) as unfinished:
        unfinished.write_text(page, encoding="utf-8")
    return path


def render(runs: Sequence[ReportedRun], sweep: SweepTables | None = None) -> str:
    """The page as text."""
    groups = group_runs(runs)
    with_texts = [run for run in runs if run.texts is not None]
    described = [encode_traces(run, part_of_run(MOST_TOKENS, runs)) for run in with_texts]
    for run, (description, _) in zip(with_texts, described, strict=True):
        description["spearman"] = correlate_with_losses(run)
    of_followed = [encode_followed(run, part_of_run(MOST_FOLLOWED_TOKENS, runs)) for run in with_texts]
    followed = [found for found in of_followed if found is not None]
    labels = [group.label for group in groups]
    charts = make_charts(groups)
    report = {
        "groups": labels,
        "charts": [asdict(chart) for chart in charts if not chart.is_constant()],
        "tokens": [description for description, _ in described],
        "followed": [description for description, _ in followed],
        "weightRange": weight_range(with_texts),
    }
    blobs = {
        f"{name}-{place}": blob
        for name, found in (("tokens", described), ("followed", followed))
        for place, (_, blob) in enumerate(found)
    }
    return html_page.render(
        SOURCES,
        "report.html",
        SCRIPTS,
        report,
        blobs,
        constants=[(chart.title, chart.values(labels)) for chart in charts if chart.is_constant()],
        **_texts(runs, groups, sweep),
    )


def _texts(runs: Sequence[ReportedRun], groups: Sequence[Group], sweep: SweepTables | None) -> dict[str, Any]:
    """What the template writes itself."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    if sweep is not None:
        title = sweep.name[0].lower() + sweep.name[1:]
    return {
        "title": f"Report on {title}",
        "summary": summary(runs),
        "sweep": sweep,
        "has_seeds": any(len(group.runs) > 1 for group in groups),
        "runs": [
            {
                "name": run.name,
                "notes": run.notes,
                "why_no_tables": run.why_no_tables,
                "recipe": dump_recipe(run.recipe),
            }
            for run in runs
        ],
        "results": results_table(runs),
        "phases": phases_of(runs),
        "comparisons": compare_tables(runs),
        "gained": [tables_of(run, run.tables) for run in runs if run.tables is not None],
        "differences": difference_table(runs),
        "environment": environment_table(runs),
    }


def weight_range(runs: Sequence[ReportedRun]) -> float:
    """Where the colours of weights end, as a power of 2: 98% of the recorded tokens of all runs lie within, so that a
    colour means the same in each."""
    weights = [sequence.relative_weights for run in runs for record in run.records for sequence in record.sequences]
    if not weights:
        return 1.0
    positive = np.concatenate(weights)
    powers = np.abs(np.log2(positive[positive > 0]))
    return max(0.02, float(np.quantile(powers, 0.98))) if len(powers) else 1.0


def correlate_with_losses(run: ReportedRun) -> float | None:
    """Rank correlation of utility and loss over the tokens of a record, mean over records where it is defined."""
    found = []
    for record in run.records:
        utilities, losses = utilities_of(record), np.concatenate([sequence.losses for sequence in record.sequences])
        correlation = None if utilities is None else rank_correlation(utilities, losses)
        if correlation is not None:
            found.append(correlation)
    return float(np.mean(found)) if found else None
