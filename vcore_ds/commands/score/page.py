"""The HTML page of scores: the distribution of utilities, by source and length, and the best and worst traces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.commands.report.page import (
    NOTHING,
    Block,
    Drawing,
    Notes,
    Page,
    PageTrace,
    Section,
    Table,
    encode_traces,
    format_number,
)
from vcore_ds.commands.report.tokens import TokenTexts
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import write_text
from vcore_ds.common.text import count
from vcore_ds.data import scores_folder
from vcore_ds.data.tokenization import load_tokenizer
from vcore_ds.models.model_identity import find_local_folder

MOST_TOKENS = 800_000
"""Maximum tokens of a page, about 3 MB. If there are more, every trace is truncated to its share."""
ENDS = ("the highest mean utility", "the lowest mean utility")
NUM_BINS = 40
EDGES = (0.005, 0.995)
"""Quantiles that limit a histogram's bins; traces beyond them are counted in the outer bins."""
MOST_POINTS = 3000  # maximum points of a scatter plot; of more traces, every k-th by rank is drawn
MOST_SOURCES = 40  # maximum rows of the table of sources: those with the most traces
COLUMNS = ("source", "row", "num_supervised_tokens", "loss")
BY = {"mean": "Mean over the tokens", "sum": "Sum over the tokens"}


@dataclass(frozen=True, eq=False)
class ShownTokens:
    """The tokens of a trace, including the prompt."""

    token_ids: np.ndarray
    positions: np.ndarray

    @staticmethod
    def from_row(row: Mapping[str, Any], most_tokens: int | None = None) -> "ShownTokens":
        """The first `most_tokens` tokens of a row of tokens.parquet."""
        ids = np.array(row["tokens"][:most_tokens], dtype=np.int32)
        return ShownTokens(ids, np.arange(len(ids)))


def encode_scored(
    name: str, columns: Mapping[str, np.ndarray], shown: Sequence[Mapping[str, Any]], texts: TokenTexts
) -> tuple[dict[str, Any], str]:
    """Encode the shown traces of a set for the page: the best, the best first, then the worst, the worst first."""
    rank = columns[scores_folder.utility_columns(name)[2]]
    rows = sorted((row for row in shown if row["set"] == name), key=lambda row: rank[row["sequence"]])
    most = max(1, MOST_TOKENS // max(1, len(shown)))
    half = scores_folder.NUM_SHOWN
    ends = zip(ENDS, (rows[:half], rows[-half:][::-1]), strict=True)
    traces = [_page_trace(end, name, columns, row, most) for end, some in ends for row in some]
    return encode_traces(name, texts, traces, has_one_scale=True)


def _page_trace(end: str, name: str, columns: Mapping[str, np.ndarray], row: Mapping[str, Any], most: int) -> PageTrace:
    place, num_tokens = row["sequence"], len(row["tokens"])
    total, mean, rank, _ = (columns[column][place] for column in scores_folder.utility_columns(name))
    supervised = np.array(row["supervised"][:most], dtype=np.bool_)
    measures = {"utility": np.zeros(len(supervised)), "loss": np.zeros(len(supervised))}
    for key, values in zip(("utilities", "losses"), measures.values(), strict=True):
        values[supervised] = row[key][: int(supervised.sum())]
    source, number = str(columns["source"][place]), int(columns["row"][place])
    facts = [f"rank {rank:,} of {len(columns['row']):,}", f"mean {format_number(mean)}", f"sum {format_number(total)}"]
    facts.append(f"loss {columns['loss'][place]:.4g} nats")
    if num_tokens > most:
        facts.append(f"the first {most:,} of {num_tokens:,} tokens")
    tokens = ShownTokens.from_row(row, most)
    return PageTrace(end, source, number, f"{source}, row {number:,}", facts, tokens, measures, supervised, num_tokens)


def write_page(folder: Path) -> None:
    """Write scores.html from the other files of the folder. Raises UserError where one of them is missing or damaged,
    OSError where the page cannot be written."""
    scores = scores_folder.read_scores(folder)
    names = [*COLUMNS, *(column for name in scores.sets for column in scores_folder.utility_columns(name))]
    page = make_page(scores, scores_folder.read_traces(folder, names), scores_folder.read_tokens(folder))
    write_text(folder / scores_folder.PAGE, page.html())


def make_page(scores: scores_folder.Scores, columns: dict[str, np.ndarray], shown: list[dict[str, Any]]) -> Page:
    """Make the page. `columns`: of scores.parquet, by name; `shown`: rows of tokens.parquet."""
    texts, why_no_tokens = _read_texts(scores, shown)
    encoded = [] if texts is None else [encode_scored(name, columns, shown, texts) for name in scores.sets]
    titles = [
        {"key": f"{by}-{name}", "section": BY[by], "title": name, "note": ""} for by in BY for name in scores.sets
    ]
    pairs = [(name, by) for by in BY for name in scores.sets]
    data = {
        "histograms": [one | _histogram(columns, *pair) for one, pair in zip(titles, pairs, strict=True)],
        "points": [one | _points(columns, *pair) for one, pair in zip(titles, pairs, strict=True)],
        "scores": [description for description, _ in encoded],
    }
    num_sources = len(np.unique(columns["source"].astype(str)))
    fewer = f"The {MOST_SOURCES} sources with the most traces, of {num_sources}."
    sources = [_sources_table(columns, name) for name in scores.sets]
    histograms: list[Block] = [ABOUT_HISTOGRAMS, Drawing("histograms")]
    by_source: list[Block] = [*([fewer] if num_sources > MOST_SOURCES else []), sources]
    sections = [
        Section("sets", "", "", [_sets_table(scores), *_find_dropped(scores)]),
        Section("distribution", "Distribution of the utility", "Distribution", histograms),
        Section("sources", "By source", "Sources", by_source),
        Section("length", "Utility and length", "Length", [ABOUT_LENGTH, Drawing("points")]),
        Section("traces", "The best and the worst traces", "Traces", [Drawing("viewer", why_no_tokens)]),
    ]
    summary = (
        f"The influence of {count(scores.data.num_sequences, 'trace')} on {count(len(scores.sets), 'trusted set')} "
        f"(the target or validation set of LESS). {_describe_weights(scores)} A utility is positive where learning the "
        "trace lowers the set's loss."
    )
    blobs = {f"scores-{place}": blob for place, (_, blob) in enumerate(encoded)}
    return Page(f"Scores of {Path(scores.data.path).name}", summary, sections, data, blobs)


ABOUT_HISTOGRAMS = (
    "Number of traces by utility: the mean over a trace's tokens, and their sum. The 0.5% highest and the 0.5% lowest "
    "are counted in the outermost bars. Point at a bar, or select the plot and press the arrow keys."
)
ABOUT_LENGTH = (
    "A sum grows with the number of tokens: long traces have the largest, with either sign. A mean does not, but it "
    "varies more for short traces, which are therefore over-represented at both ends. If the points spread less to the "
    "right, selection by the mean prefers short traces; if they spread more, selection by the sum prefers long ones."
)


def _read_texts(scores: scores_folder.Scores, shown: list[dict[str, Any]]) -> tuple[TokenTexts | None, list[str]]:
    """The texts of the tokens; or None and the reason why they cannot be read."""
    try:
        # Local only: scoring has just read it here, and waiting for an unreachable hub takes a minute.
        tokenizer = load_tokenizer(str(find_local_folder(scores.model)))
        return TokenTexts(tokenizer, [ShownTokens.from_row(row) for row in shown]), []
    except UserError as error:
        return None, [f"The tokens are not shown: {error}"]


def _describe_weights(scores: scores_folder.Scores) -> str:
    model = scores.model
    if scores.checkpoints:
        steps = ", ".join(f"{one.step:,}" for one in scores.checkpoints)
        model = f"{scores.checkpoints[0].run} after step {steps}"
    jacobian = f", multiplied by the Jacobian of {scores.direction.capitalize()}'s update,"
    gradient = f"gradient{'' if scores.direction == 'sgd' else jacobian}"
    rank = f" (approximated: rank {scores.probe_rank})" if scores.probe_rank is not None else ""
    return f"Computed with the weights of {model}, along the {gradient} of each set's loss{rank}."


def _find_dropped(scores: scores_folder.Scores) -> list[Notes]:
    """Of the scored data, and of each set: the rows of its source that were dropped."""
    uses: list[tuple[scores_folder.DataSet, str]] = [(scores.data, "scored")]
    uses += [(one, f"used as the trusted set {name}") for name, one in scores.sets.items()]
    lines = [
        f"{one.num_sequences:,} of {one.num_rows:,} rows of {one.path} are {use}; dropped: "
        + "; ".join(f"{number:,} {reason}" for reason, number in one.dropped.items())
        + "."
        for one, use in uses
        if one.dropped and one.num_rows is not None
    ]
    return [Notes("Dropped rows", lines)] if lines else []


def _histogram(columns: dict[str, np.ndarray], name: str, by: str) -> dict[str, Any]:
    """Number of traces with a finite utility in bins of equal width; 0 is an edge between two bins."""
    utilities = _utilities(columns, name, by)
    utilities = utilities[np.isfinite(utilities)]
    low, high = np.quantile(utilities, EDGES) if len(utilities) else (0.0, 0.0)
    low, high = min(low, 0.0), max(high, 0.0)
    width = max(high - low, 1e-30) / NUM_BINS
    first, last = int(np.floor(low / width)), max(int(np.ceil(high / width)), int(np.floor(low / width)) + 1)
    places = np.clip(np.floor(utilities / width).astype(np.int64), first, last - 1) - first
    counts = np.bincount(places, minlength=last - first).tolist()
    readout = f"{(utilities > 0).sum():,} of {len(utilities):,} traces have a positive utility"
    return {"low": first * width, "width": width, "counts": counts, "readout": readout}


def _points(columns: dict[str, np.ndarray], name: str, by: str) -> dict[str, Any]:
    """Length and utility of at most `MOST_POINTS` traces."""
    order = np.argsort(columns[scores_folder.utility_columns(name)[2]], kind="stable")
    utilities = _utilities(columns, name, by)
    order = order[np.isfinite(utilities[order]) & (columns["num_supervised_tokens"][order] > 0)]
    chosen = order[:: max(1, -(-len(order) // MOST_POINTS))]
    values = [float(f"{value:.4g}") for value in utilities[chosen]]
    return {
        "tokens": columns["num_supervised_tokens"][chosen].tolist(),
        "values": values,
        "readout": count(len(values), "trace"),
    }


def _utilities(columns: dict[str, np.ndarray], name: str, by: str) -> np.ndarray:
    """The utilities, fp64 [n]."""
    total, mean, _, _ = scores_folder.utility_columns(name)
    return columns[mean if by == "mean" else total].astype(np.float64)


def _sets_table(scores: scores_folder.Scores) -> Table:
    def correlation(value: float | None) -> str:
        return NOTHING if value is None else f"{value:+.2f}"

    head = ["", "traces of", "traces", "loss (nats)", "gradient norm"]
    head += ["rank correlation of mean utility and length", "of summed utility and length"]
    rows = []
    for name, one in scores.sets.items():
        row = [name, one.path, f"{one.num_sequences:,}", f"{one.loss:.4f}", f"{one.gradient_norm:.4g}"]
        rows.append([*row, correlation(one.length_correlation_mean), correlation(one.length_correlation_sum)])
    return Table("Trusted sets", head, rows)


def _sources_table(columns: dict[str, np.ndarray], name: str) -> Table:
    """A row for all sources together, if there are several, then one per source, the one with the most traces first."""
    mean = _utilities(columns, name, "mean")
    rows = []
    for label, members in scores_folder.group_by_source(columns["source"], MOST_SOURCES):
        chosen = members & np.isfinite(mean)
        values, tokens = mean[chosen], columns["num_supervised_tokens"][chosen]
        quartiles = np.quantile(values, [0.25, 0.5, 0.75]) if len(values) else np.full(3, np.nan)
        share = f"{(values > 0).mean():.0%}" if len(values) else NOTHING
        length = f"{tokens.mean():,.0f}" if len(values) else NOTHING
        rows.append([label, f"{len(values):,}", share, *(f"{value:.3g}" for value in quartiles), length])
    head = ["source", "traces", "positive", "lower quartile", "median", "upper quartile", "tokens a trace"]
    return Table(f"Mean utility for {name}", head, rows)
