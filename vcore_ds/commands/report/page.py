"""The HTML page of a report, and the frame that all pages share: style, scripts, one file that fetches nothing.

The content of a page, above all traces, is untrusted. The template escapes it, its JSON contains no `<`, the scripts
insert it as text nodes, and the page's content security policy allows only the page's script.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from vcore_ds.commands.report import tables, traces
from vcore_ds.commands.report.curves import make_charts
from vcore_ds.commands.report.read import ReportedRun, group_runs
from vcore_ds.commands.report.scaling import SweepTables
from vcore_ds.common.paths import write_text, writing
from vcore_ds.common.statistics import rank_correlation
from vcore_ds.config.load import dump_recipe

SOURCES = Path(__file__).parent / "page"
SCRIPTS = ("charts.js", "traces.js", "followed.js", "density.js", "main.js")  # in the order of the page


def write_page(runs: Sequence[ReportedRun], path: Path, sweep: SweepTables | None = None) -> Path:
    """Write the report of the runs, at least one, and of their sweep, if any. Raises UserError where the file cannot be
    written."""
    page = render(runs, path.parent, sweep)
    with writing("--output", path, "a file that can be written"):
        write_text(path, page)
    return path


def render(runs: Sequence[ReportedRun], folder: Path, sweep: SweepTables | None = None) -> str:
    """Render the page as HTML; `folder`: where it will be, for its links."""
    groups = group_runs(runs)
    with_texts = [run for run in runs if run.texts is not None]
    tokens = [traces.encode_traces(run, traces.tokens_per_run(traces.MOST_TOKENS, runs)) for run in with_texts]
    for run, (description, _) in zip(with_texts, tokens, strict=True):
        description["spearman"] = correlate_with_losses(run)
    encoded = (
        traces.encode_followed(run, traces.tokens_per_run(traces.MOST_FOLLOWED_TOKENS, runs)) for run in with_texts
    )
    followed = [one for one in encoded if one is not None]
    labels = [group.label for group in groups]
    charts = make_charts(groups)
    report = {
        "groups": labels,
        "charts": [asdict(chart) for chart in charts if not chart.is_constant()],
        "tokens": [description for description, _ in tokens],
        "followed": [description for description, _ in followed],
        "weightRange": weight_range(with_texts),
    }
    blobs = {
        f"{name}-{place}": blob
        for name, descriptions in (("tokens", tokens), ("followed", followed))
        for place, (_, blob) in enumerate(descriptions)
    }
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    if sweep is not None:
        title = sweep.name[0].lower() + sweep.name[1:]
    return render_page(
        SOURCES,
        "report.html",
        SCRIPTS,
        report,
        blobs,
        title=f"Report on {title}",
        summary=tables.summary(runs),
        sweep=sweep,
        has_seeds=any(len(group.runs) > 1 for group in groups),
        runs=runs,
        recipes=[dump_recipe(run.recipe) for run in runs],
        results=tables.results_table(runs),
        about_results=tables.explain_results(runs),
        phases=tables.make_phases(runs),
        constants=[(chart.title, chart.format_values(labels)) for chart in charts if chart.is_constant()],
        comparisons=tables.compare_tables(runs),
        gained=[tables.make_token_tables(run, run.tables) for run in runs if run.tables is not None],
        differences=tables.difference_table(runs),
        environment=tables.environment_table(runs),
        profiles=tables.make_profiles(runs, folder),
    )


def weight_range(runs: Sequence[ReportedRun]) -> float:
    """Range of the colour scale of weights, as a power of 2. It holds 98% of the recorded tokens of all runs together,
    so that a colour means the same in each."""
    weights = [sequence.relative_weights for run in runs for record in run.records for sequence in record.sequences]
    if not weights:
        return 1.0
    positive = np.concatenate(weights)
    powers = np.abs(np.log2(positive[positive > 0]))
    return max(0.02, float(np.quantile(powers, 0.98))) if len(powers) else 1.0


def correlate_with_losses(run: ReportedRun) -> float | None:
    """Rank correlation of utility and loss over the tokens of a record: mean over the records where it is defined."""
    correlations = []
    for record in run.records:
        losses = np.concatenate([sequence.losses for sequence in record.sequences])
        if (utilities := traces.join_utilities(record)) is not None:
            correlations.append(rank_correlation(utilities, losses))
    defined = [correlation for correlation in correlations if correlation is not None]
    return float(np.mean(defined)) if defined else None


STYLE, BASE = "style.css", "base.js"


def render_page(
    folder: Path, template: str, scripts: Sequence[str], data: Any, blobs: Mapping[str, str], **texts: Any
) -> str:
    """Render a page as HTML from the template and scripts (joined in this order after `BASE`) in `folder`. `data`: JSON
    for the scripts; `blobs`: element id -> base64 data for them; `texts`: variables of the template."""
    sources = [SOURCES / BASE, *(folder / name for name in scripts)]
    script = "\n" + "\n".join(path.read_text(encoding="utf-8") for path in sources)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FileSystemLoader([folder, SOURCES]),
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(
        policy=f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'",
        style=Markup((SOURCES / STYLE).read_text(encoding="utf-8")),
        script=Markup(script),
        report=Markup(as_json(data)),
        blobs={name: Markup(blob) for name, blob in blobs.items()},
        **texts,
    )


def as_json(value: Any) -> str:
    """JSON that is safe in a script element: without `<`, and ASCII only."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
