"""The page of scores: where utilities lie, by source and by length, and the best and worst traces token by token."""

import base64
import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.commands import html_page
from vcore_ds.commands.report.tokens import TokenTexts
from vcore_ds.commands.report.traces import loss_levels, nearest, rounded, utility_levels
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import write_atomically
from vcore_ds.data.scores_folder import (
    PAGE,
    ScoredData,
    Scores,
    TrustedSet,
    read_scores,
    read_tokens,
    read_traces,
    utility_columns,
)
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.models.model_identity import find_local_folder

# The best and worst traces as a page can hold them: a byte for each measure of a token, compressed; each text once.


MOST_TOKENS = 800_000
"""Tokens of a page, some 3 MB of it. Where there are more, each trace is cut to its part of them."""
SUPERVISED = 1
"""Flag of a token that is trained on; the others belong to the prompt."""


@dataclass(frozen=True, eq=False)
class ShownTrace:
    """The tokens of a trace, prompt included."""

    token_ids: np.ndarray
    positions: np.ndarray

    @staticmethod
    def of(row: Mapping[str, Any], most_tokens: int | None = None) -> "ShownTrace":
        """From a row of tokens.parquet, its first `most_tokens`."""
        ids = np.array(row["tokens"][:most_tokens], dtype=np.int32)
        return ShownTrace(ids, np.arange(len(ids)))


def encode_traces(
    name: str, columns: Mapping[str, np.ndarray], shown: Sequence[Mapping[str, Any]], texts: TokenTexts
) -> tuple[dict[str, Any], str]:
    """What the page knows of the shown traces of a set: a description for JSON, and the tokens as base64 of gzip.

    The bytes are, for all tokens, one array after the other: place in `texts` (`bytesText` each, little-endian), then a
    byte each: place in the levels of loss, of utility, and flags. The best trace comes first, the worst last.
    """
    total, mean, rank, _ = utility_columns(name)
    rows = sorted((row for row in shown if row["set"] == name), key=lambda row: columns[rank][row["sequence"]])
    most = max(1, MOST_TOKENS // max(1, len(shown)))
    names: dict[str, int] = {}
    sequences: list[dict[str, Any]] = []
    places: list[np.ndarray] = []
    flags: list[np.ndarray] = []
    losses: list[np.ndarray] = []
    utilities: list[np.ndarray] = []
    for row in rows:
        trace, place = ShownTrace.of(row, most), row["sequence"]
        supervised = np.array(row["supervised"][:most], dtype=np.bool_)
        places.append(np.array([names.setdefault(piece, len(names)) for piece in texts.pieces_of(trace)]))
        flags.append(supervised.astype(np.uint8) * SUPERVISED)
        for found, values in ((losses, row["losses"]), (utilities, row["utilities"])):
            of_tokens = np.zeros(len(supervised))
            of_tokens[supervised] = values[: int(supervised.sum())]
            found.append(of_tokens)
        sequences.append(
            {
                "step": "",
                "tokens": len(supervised),
                "wholeTokens": len(row["tokens"]),
                "title": f"{columns['source'][place]}, row {columns['row'][place]:,}",
                "rank": int(columns[rank][place]),
                "mean": float(f"{columns[mean][place]:.4g}"),
                "sum": float(f"{columns[total][place]:.4g}"),
                "loss": float(f"{columns['loss'][place]:.4g}"),
            }
        )
    all_losses, all_utilities, all_flags = (np.concatenate(parts) for parts in (losses, utilities, flags))
    levels = {"loss": loss_levels(all_losses), "utility": utility_levels(all_utilities[all_flags == SUPERVISED])}
    text_type = np.dtype("<u2" if len(names) <= 1 << 16 else "<u4")
    arrays = [
        np.concatenate(places).astype(text_type),
        nearest(levels["loss"], all_losses),
        nearest(levels["utility"], all_utilities),
        all_flags,
    ]
    description = {
        "name": name,
        "texts": list(names),
        "bytesText": text_type.itemsize,
        "bytesRank": 0,
        "levels": rounded(levels),
        "numScored": len(columns[rank]),
        "sequences": sequences,
    }
    packed = gzip.compress(b"".join(array.tobytes() for array in arrays), compresslevel=6, mtime=0)
    return description, base64.b64encode(packed).decode()


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
    with write_atomically(folder / PAGE) as unfinished:
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
        tokenizer = load_tokenizer(str(find_local_folder(scores.model)))
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
    uses: list[tuple[ScoredData | TrustedSet, str]] = [(scores.data, "scored")]
    uses += [(one, f"used as the trusted set {name}") for name, one in scores.sets.items()]
    return [
        f"{one.num_sequences:,} of {one.num_rows:,} rows of {one.path} are {use}; dropped: "
        + "; ".join(f"{number:,} {reason}" for reason, number in one.dropped.items())
        + "."
        for one, use in uses
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
