"""The HTML page of scores: the distribution of utilities, by source and length, and the best and worst traces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.commands.report.page import render_page
from vcore_ds.commands.report.tokens import TokenTexts
from vcore_ds.commands.report.traces import index_type, loss_levels, nearest, pack_arrays, rounded, utility_levels
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import write_text
from vcore_ds.data import scores_folder
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.models.model_identity import find_local_folder

MOST_TOKENS = 800_000
"""Maximum tokens of a page, about 3 MB. If there are more, every trace is truncated to its share."""
SUPERVISED = 1  # flag of a supervised token; the others belong to the prompt


@dataclass(frozen=True, eq=False)
class ShownTrace:
    """The tokens of a trace, including the prompt."""

    token_ids: np.ndarray
    positions: np.ndarray

    @staticmethod
    def from_row(row: Mapping[str, Any], most_tokens: int | None = None) -> "ShownTrace":
        """The first `most_tokens` tokens of a row of tokens.parquet."""
        ids = np.array(row["tokens"][:most_tokens], dtype=np.int32)
        return ShownTrace(ids, np.arange(len(ids)))


def encode_traces(
    name: str, columns: Mapping[str, np.ndarray], shown: Sequence[Mapping[str, Any]], texts: TokenTexts
) -> tuple[dict[str, Any], str]:
    """Encode the shown traces of a set for the page, the best first: a description for JSON, and the tokens as gzip in
    base64. The bytes are arrays over all tokens: index in `texts` (`bytesText` bytes each, little-endian), then one
    byte each: index in the levels of loss and of utility, and flags."""
    total, mean, rank, _ = scores_folder.utility_columns(name)
    rows = sorted((row for row in shown if row["set"] == name), key=lambda row: columns[rank][row["sequence"]])
    most = max(1, MOST_TOKENS // max(1, len(shown)))
    supervised = [np.array(row["supervised"][:most], dtype=np.bool_) for row in rows]
    is_supervised = np.concatenate(supervised)
    losses, utilities = np.zeros((2, len(is_supervised)))
    for values, key in ((losses, "losses"), (utilities, "utilities")):
        parts = [row[key][: int(flags.sum())] for row, flags in zip(rows, supervised, strict=True)]
        values[is_supervised] = np.concatenate(parts)
    names: dict[str, int] = {}
    pieces = [piece for row in rows for piece in texts.read_pieces(ShownTrace.from_row(row, most))]
    places = np.array([names.setdefault(piece, len(names)) for piece in pieces])
    levels = {"loss": loss_levels(losses), "utility": utility_levels(utilities[is_supervised])}
    text_type = index_type(len(names))
    arrays = [
        places.astype(text_type),
        nearest(levels["loss"], losses),
        nearest(levels["utility"], utilities),
        is_supervised.astype(np.uint8) * SUPERVISED,
    ]
    sequences = [
        {
            "step": "",
            "tokens": len(flags),
            "wholeTokens": len(row["tokens"]),
            "title": f"{columns['source'][place]}, row {columns['row'][place]:,}",
            "rank": int(columns[rank][place]),
            "mean": float(f"{columns[mean][place]:.4g}"),
            "sum": float(f"{columns[total][place]:.4g}"),
            "loss": float(f"{columns['loss'][place]:.4g}"),
        }
        for row, flags in zip(rows, supervised, strict=True)
        for place in [row["sequence"]]
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
    return description, pack_arrays(arrays)


SOURCES = Path(__file__).parent / "page"
SCRIPTS = ("charts.js", "traces.js", "main.js")  # in the order of the page
NUM_BINS = 40
EDGES = (0.005, 0.995)
"""Quantiles that limit a histogram's bins; traces beyond them are counted in the outer bins."""
MOST_POINTS = 3000  # maximum points of a scatter plot; of more traces, every k-th by rank is drawn
MOST_SOURCES = 40  # maximum rows of the table of sources: those with the most traces
COLUMNS = ("source", "row", "num_supervised_tokens", "loss")


def write_page(folder: Path) -> None:
    """Write scores.html from the other files of the folder. Raises UserError where one of them is missing or damaged,
    OSError where the page cannot be written."""
    scores = scores_folder.read_scores(folder)
    names = [*COLUMNS, *(column for name in scores.sets for column in scores_folder.utility_columns(name))]
    page = render(scores, scores_folder.read_traces(folder, names), scores_folder.read_tokens(folder))
    write_text(folder / scores_folder.PAGE, page)


def render(scores: scores_folder.Scores, columns: dict[str, np.ndarray], shown: list[dict[str, Any]]) -> str:
    """Render the page as HTML. `columns`: of scores.parquet, by name; `shown`: rows of tokens.parquet."""
    texts, why_no_tokens = _read_texts(scores, shown)
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
    return render_page(
        SOURCES,
        "scores.html",
        SCRIPTS,
        data,
        {f"traces-{place}": blob for place, (_, blob) in enumerate(encoded)},
        title=f"Scores of {Path(scores.data.path).name}",
        scores=scores,
        how=_describe_weights(scores),
        sets=_sets_table(scores),
        dropped=_describe_dropped(scores),
        sources=[(name, _sources_table(columns, name)) for name in scores.sets],
        num_sources=len(np.unique(columns["source"].astype(str))),
        most_sources=MOST_SOURCES,
        why_no_tokens=why_no_tokens,
    )


def _read_texts(scores: scores_folder.Scores, shown: list[dict[str, Any]]) -> tuple[TokenTexts | None, str | None]:
    """The texts of the tokens; or None and the reason why they cannot be read."""
    try:
        # Local only: scoring has just read it here, and waiting for an unreachable hub takes a minute.
        tokenizer = load_tokenizer(str(find_local_folder(scores.model)))
        return TokenTexts(tokenizer, [ShownTrace.from_row(row) for row in shown]), None
    except UserError as error:
        return None, f"The tokens are not shown: {error}"


def _describe_weights(scores: scores_folder.Scores) -> str:
    model = scores.model
    if scores.checkpoints:
        steps = ", ".join(f"{one.step:,}" for one in scores.checkpoints)
        model = f"{scores.checkpoints[0].run} after step {steps}"
    jacobian = f", multiplied by the Jacobian of {scores.direction.capitalize()}'s update,"
    gradient = f"gradient{'' if scores.direction == 'sgd' else jacobian}"
    rank = f" (approximated: rank {scores.probe_rank})" if scores.probe_rank is not None else ""
    return f"Computed with the weights of {model}, along the {gradient} of each set's loss{rank}."


def _describe_dropped(scores: scores_folder.Scores) -> list[str]:
    """A sentence for the scored data, and for each set, if rows of its source were dropped."""
    uses: list[tuple[scores_folder.DataSet, str]] = [(scores.data, "scored")]
    uses += [(one, f"used as the trusted set {name}") for name, one in scores.sets.items()]
    return [
        f"{one.num_sequences:,} of {one.num_rows:,} rows of {one.path} are {use}; dropped: "
        + "; ".join(f"{number:,} {reason}" for reason, number in one.dropped.items())
        + "."
        for one, use in uses
        if one.dropped and one.num_rows is not None
    ]


def _utilities(columns: dict[str, np.ndarray], name: str, by: str) -> np.ndarray:
    """The finite utilities, fp64 [n]."""
    total, mean, _, _ = scores_folder.utility_columns(name)
    values = columns[mean if by == "mean" else total].astype(np.float64)
    return values[np.isfinite(values)]


def _histogram(utilities: np.ndarray) -> dict[str, Any]:
    """Number of traces in bins of equal width; 0 is an edge between two bins."""
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
    """Length and utilities of at most `MOST_POINTS` traces."""
    total, mean, rank, _ = scores_folder.utility_columns(name)
    order = np.argsort(columns[rank], kind="stable")
    order = order[np.isfinite(columns[mean][order]) & (columns["num_supervised_tokens"][order] > 0)]
    chosen = order[:: max(1, -(-len(order) // MOST_POINTS))]
    return {
        "tokens": columns["num_supervised_tokens"][chosen].tolist(),
        "mean": [float(f"{value:.4g}") for value in columns[mean][chosen]],
        "sum": [float(f"{value:.4g}") for value in columns[total][chosen]],
    }


def _sets_table(scores: scores_folder.Scores) -> list[list[str]]:
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
    """A row for all sources together, if there are several, then one per source, the one with the most traces first."""
    mean = columns[scores_folder.utility_columns(name)[1]].astype(np.float64)
    rows = []
    for label, members in scores_folder.group_by_source(columns["source"], MOST_SOURCES):
        chosen = members & np.isfinite(mean)
        values, tokens = mean[chosen], columns["num_supervised_tokens"][chosen]
        quartiles = np.quantile(values, [0.25, 0.5, 0.75]) if len(values) else np.full(3, np.nan)
        share = f"{(values > 0).mean():.0%}" if len(values) else "–"
        length = f"{tokens.mean():,.0f}" if len(values) else "–"
        rows.append([label, f"{len(values):,}", share, *(f"{value:.3g}" for value in quartiles), length])
    return rows
