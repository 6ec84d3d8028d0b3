"""The page of scores: where utilities lie, by source and by length, and the best and worst traces token by token."""

from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.commands import html_page
from vcore_ds.commands.score.traces import ShownTrace, encode_traces
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.errors import UserError
from vcore_ds.files.aside import written_aside
from vcore_ds.files.model_folder import local_folder
from vcore_ds.files.scores_folder import PAGE, Scores, read_scores, read_tokens, read_traces, utility_columns
from vcore_ds.results.token_texts import TokenTexts

SOURCES = Path(__file__).parent / "page"
SCRIPTS = ("charts.js", "traces.js", "main.js")
"""In the order in which they stand in the page."""
NUM_BINS = 40
EDGES = (0.005, 0.995)
"""Quantiles between which a histogram has its bins; what is beyond is counted in the outer ones."""
MOST_POINTS = 3000
"""Traces that are drawn as points; of more, every so many by utility."""
MOST_SOURCES = 40
"""Sources with a row of their own, those with the most traces."""
COLUMNS = ("source", "row", "num_supervised_tokens", "loss")


def write_page(folder: Path) -> None:
    """Writes scores.html from the other files of a folder of scores.

    Raises:
        UserError: one of them is missing or damaged.
        OSError: the page cannot be written.
    """
    scores = read_scores(folder)
    names = [*COLUMNS, *(column for name in scores.sets for column in utility_columns(name))]
    page = render(scores, read_traces(folder, names), read_tokens(folder))
    with written_aside(folder / PAGE) as unfinished:
        unfinished.write_text(page, encoding="utf-8")


def render(scores: Scores, columns: dict[str, np.ndarray], shown: list[dict[str, Any]]) -> str:
    """The page as text.

    Args:
        columns: of scores.parquet by name, for each trace.
        shown: rows of tokens.parquet.
    """
    texts, why_no_tokens = _texts(scores, shown)
    encoded = [] if texts is None else [encode_traces(name, columns, shown, texts) for name in scores.sets]
    data = {
        "sets": [
            {
                "name": name,
                "histograms": {by: _histogram(_utilities(columns, name, by)) for by in ("mean", "sum")},
                "lengths": _points(columns, name),
            }
            for name in scores.sets
        ],
        "traces": [description for description, _ in encoded],
    }
    return html_page.render(
        SOURCES,
        "scores.html",
        SCRIPTS,
        data,
        {f"traces-{place}": blob for place, (_, blob) in enumerate(encoded)},
        title=f"Scores of {Path(scores.data.path).name}",
        scores=scores,
        how=_how(scores),
        sets=_sets_table(scores),
        dropped=_describe_dropped(scores),
        sources=[(name, _sources_table(columns, name)) for name in scores.sets],
        num_sources=len(np.unique(columns["source"].astype(str))),
        most_sources=MOST_SOURCES,
        why_no_tokens=why_no_tokens,
    )


def _texts(scores: Scores, shown: list[dict[str, Any]]) -> tuple[TokenTexts | None, str | None]:
    """What reads the tokens; None with the reason where they cannot be read."""
    try:
        # Of this machine alone: the scoring has read it from there, and a hub that cannot be reached takes a minute.
        tokenizer = load_tokenizer(str(local_folder(scores.model)))
        return TokenTexts(tokenizer, [ShownTrace.of(row) for row in shown]), None
    except UserError as error:
        return None, f"The tokens are not shown: {error}"


def _how(scores: Scores) -> str:
    """A sentence on the weights and the direction."""
    with_weights = f"the weights of {scores.model}"
    if scores.checkpoints:
        steps = ", ".join(f"{one.step:,}" for one in scores.checkpoints)
        with_weights = f"the weights of {scores.checkpoints[0].run} after step {steps}"
    along = "the gradient" if scores.direction == "sgd" else "the update that Adam makes of the gradient"
    return f"Taken with {with_weights}, along {along} of each set's loss."


def _describe_dropped(scores: Scores) -> list[str]:
    """A sentence for the data and each set whose store lacks rows of its source."""
    return [
        f"{one.num_sequences:,} of {one.num_rows:,} rows of {one.path} are scored{with_set}; dropped: "
        + "; ".join(f"{number:,} {reason}" for reason, number in one.dropped.items())
        + "."
        for one, with_set in [(scores.data, ""), *((one, f" with, as {name}") for name, one in scores.sets.items())]
        if one.dropped and one.num_rows is not None
    ]


def _utilities(columns: dict[str, np.ndarray], name: str, by: str) -> np.ndarray:
    """fp64 [n], the finite ones."""
    total, mean, _, _ = utility_columns(name)
    values = columns[mean if by == "mean" else total].astype(np.float64)
    return values[np.isfinite(values)]


def _histogram(utilities: np.ndarray) -> dict[str, Any]:
    """Traces in bins of equal width, with 0 at an edge between two of them."""
    low, high = np.quantile(utilities, EDGES) if len(utilities) else (0.0, 0.0)
    low, high = min(low, 0.0), max(high, 0.0)
    width = max(high - low, 1e-30) / NUM_BINS
    first, last = int(np.floor(low / width)), max(int(np.ceil(high / width)), int(np.floor(low / width)) + 1)
    places = np.clip(np.floor(utilities / width).astype(np.int64), first, last - 1) - first
    return {
        "low": first * width,
        "width": width,
        "counts": np.bincount(places, minlength=last - first).tolist(),
        "numPositive": int((utilities > 0).sum()),
    }


def _points(columns: dict[str, np.ndarray], name: str) -> dict[str, list[float]]:
    """Length and utilities of traces, at most `MOST_POINTS`."""
    total, mean, rank, _ = utility_columns(name)
    order = np.argsort(columns[rank], kind="stable")
    order = order[np.isfinite(columns[mean][order]) & (columns["num_supervised_tokens"][order] > 0)]
    chosen = order[:: max(1, -(-len(order) // MOST_POINTS))]
    return {
        "tokens": columns["num_supervised_tokens"][chosen].tolist(),
        "mean": [float(f"{value:.4g}") for value in columns[mean][chosen]],
        "sum": [float(f"{value:.4g}") for value in columns[total][chosen]],
    }


def _sets_table(scores: Scores) -> list[list[str]]:
    def correlation(value: float | None) -> str:
        return "–" if value is None else f"{value:+.2f}"

    return [
        [
            name,
            one.path,
            f"{one.num_sequences:,}",
            f"{one.loss:.4f}",
            f"{one.gradient_norm:.4g}",
            correlation(one.length_correlation_mean),
            correlation(one.length_correlation_sum),
        ]
        for name, one in scores.sets.items()
    ]


def _sources_table(columns: dict[str, np.ndarray], name: str) -> list[list[str]]:
    """A row for each source, those with the most traces first, after one for all."""
    mean = columns[utility_columns(name)[1]].astype(np.float64)
    sources, index = np.unique(columns["source"].astype(str), return_inverse=True)
    by_size = np.argsort(-np.bincount(index), kind="stable")[:MOST_SOURCES]
    groups = [("all", np.isfinite(mean))] * (len(sources) > 1)
    groups += [(str(sources[i]), (index == i) & np.isfinite(mean)) for i in by_size]
    rows = []
    for label, chosen in groups:
        values, tokens = mean[chosen], columns["num_supervised_tokens"][chosen]
        quartiles = np.quantile(values, [0.25, 0.5, 0.75]) if len(values) else np.full(3, np.nan)
        share = f"{(values > 0).mean():.0%}" if len(values) else "–"
        length = f"{tokens.mean():,.0f}" if len(values) else "–"
        rows.append([label, f"{len(values):,}", share, *(f"{value:.3g}" for value in quartiles), length])
    return rows
