"""Files of finished work, and the tables and the page of a scoring. Used on rank 0 alone.

    OUTPUT.unfinished/request.json           the inputs' identity
    OUTPUT.unfinished/pass_000/set.json      loss and gradient norm of the pass's trusted set
    OUTPUT.unfinished/pass_000/000000.npz    losses and utilities of some sequences; no sequence is in two files

Files are written atomically, so they survive a kill.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from vcore_ds.commands.page import (
    NOTHING,
    Block,
    Drawing,
    Page,
    PageSection,
    PageTrace,
    Table,
    encode_traces,
    format_number,
)
from vcore_ds.commands.tokens import TokenTexts
from vcore_ds.common.paths import flush, write_json, write_text
from vcore_ds.common.statistics import rank_correlation
from vcore_ds.common.text import count
from vcore_ds.data import scores_folder
from vcore_ds.data.dataset import Store
from vcore_ds.data.scores_folder import NUM_SHOWN, ScoredCheckpoint, Scores, utility_columns
from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import TokenizedSequence, load_tokenizer
from vcore_ds.models.model_identity import find_local_folder
from vcore_ds.training.token_records import write_arrays

SET = "set.json"
Columns = Mapping[str, np.ndarray]


class ScoredSequence(NamedTuple):
    """Losses and utilities of the supervised tokens of a sequence."""

    position: int
    losses: np.ndarray  # float32 [n], nats
    utilities: np.ndarray  # float32 [n]


@dataclass(frozen=True)
class ScoringPass:
    """A pass over the data along one trusted set's gradient, at one checkpoint (None: the base model)."""

    folder: Path  # of its finished work
    set_name: str
    checkpoint: ScoredCheckpoint | None

    @property
    def weight(self) -> float:
        """Factor of its utilities in the sum over checkpoints."""
        return 1.0 if self.checkpoint is None else self.checkpoint.weight

    def write_set(self, loss: float, gradient_norm: float) -> None:
        write_json(self.folder / SET, {"loss": loss, "gradient_norm": gradient_norm})

    def read_set(self) -> tuple[float, float]:
        values = json.loads((self.folder / SET).read_text(encoding="utf-8"))
        return values["loss"], values["gradient_norm"]

    def add(self, sequences: Sequence[ScoredSequence]) -> None:
        """Write another file, atomically, with at least one sequence."""
        number = sum(1 for _ in self.folder.glob("*.npz"))
        positions, losses, utilities = zip(*sequences, strict=True)
        arrays = {
            "position": np.array(positions, dtype=np.int64),
            "num_tokens": np.array([len(one) for one in losses], dtype=np.int64),
            "losses": np.concatenate(losses),
            "utilities": np.concatenate(utilities),
        }
        write_arrays(self.folder / f"{number:06d}.npz", arrays)

    def read_positions(self) -> set[int]:
        """Positions of the finished sequences; empty where `SET` is missing."""
        if not (self.folder / SET).is_file():
            return set()
        positions: set[int] = set()
        for path in self.folder.glob("*.npz"):
            with np.load(path) as stored:
                positions.update(stored["position"].tolist())
        return positions

    def read_sequences(self) -> Iterator[ScoredSequence]:
        """Read all finished sequences, with one file in memory at a time."""
        for path in sorted(self.folder.glob("*.npz")):
            with np.load(path) as stored:
                ends = np.cumsum(stored["num_tokens"])[:-1]
                parts = (np.split(stored[name], ends) for name in ("losses", "utilities"))
                yield from map(ScoredSequence, stored["position"].tolist(), *parts)


def count_rows(store: Store) -> dict[str, Any]:
    """The last fields of a `DataSet`."""
    return dict(zip(("num_rows", "dropped"), store.count_dropped_rows(), strict=True))


def write_results(
    folder: Path,
    output: Path,
    store: Store,
    sets: Mapping[str, tuple[str, TokenStore]],
    passes: Sequence[ScoringPass],
    description: Scores,
    *,
    all_tokens: bool = False,
) -> str:
    """Write the folder `output` atomically from the finished `passes` in `folder`, and return the page as text. `sets`:
    path and data by name. `description`: scores.json without the sets. `all_tokens`: also write the utilities of all
    tokens (`vcore_ds.data.scores_folder`). Raises OSError."""
    staged = folder / "result"
    shutil.rmtree(staged, ignore_errors=True)  # of an attempt that was killed just before its end
    staged.mkdir()
    columns, num_tokens = _make_columns(store, passes)
    measured, rows = {}, []
    for name, (source, trusted) in sets.items():
        passes_of_set = [one for one in passes if one.set_name == name]
        total, mean, rank, _ = (columns[column] for column in utility_columns(name))
        loss, gradient_norm = passes_of_set[-1].read_set()
        measured[name] = scores_folder.TrustedSet(
            source,
            trusted.digest,
            len(trusted),
            loss=loss,
            gradient_norm=gradient_norm,
            length_correlation_sum=rank_correlation(total, num_tokens),
            length_correlation_mean=rank_correlation(mean, num_tokens),
            **count_rows(trusted),
        )
        by_rank = np.argsort(rank).tolist()
        rows += _make_token_rows(
            store, passes_of_set, list(dict.fromkeys([*by_rank[:NUM_SHOWN], *by_rank[-NUM_SHOWN:]]))
        )
    scores = replace(description, sets=measured)
    scores_folder.write_traces(staged, columns)
    scores_folder.write_tokens(staged, rows)
    scores_folder.write_scores(staged, scores)
    if all_tokens:
        groups = _all_token_rows(folder, store, passes, num_tokens)
        scores_folder.write_token_table(
            staged / scores_folder.UTILITIES, groups, scores_folder.describe_tokens(scores.data)
        )
    page = write_page(staged)
    for path in staged.iterdir():
        flush(path)
    staged.rename(output)
    flush(output.parent)
    return page.text()


def _make_columns(store: Store, passes: Sequence[ScoringPass]) -> tuple[dict[str, Any], np.ndarray]:
    """The columns of scores.parquet, and the number of supervised tokens of each sequence, int64 [n]. Losses are those
    of the last checkpoint."""
    from scipy.stats import rankdata

    num_sequences = len(store)
    num_tokens, loss = np.zeros(num_sequences, dtype=np.int64), np.zeros(num_sequences)
    totals = {one.set_name: np.zeros(num_sequences) for one in passes}
    for one in passes:
        for position, losses, utilities in one.read_sequences():
            num_tokens[position] = len(losses)
            loss[position] = losses.sum(dtype=np.float64)
            totals[one.set_name][position] += one.weight * utilities.sum(dtype=np.float64)
    source, row = store.origins()
    columns: dict[str, Any] = {
        "sequence": np.arange(num_sequences, dtype=np.int64),
        "source": source,
        "row": row,
        "num_supervised_tokens": num_tokens,
        "loss": (loss / np.maximum(num_tokens, 1)).astype(np.float32),
    }
    for name, total in totals.items():
        mean = total / np.maximum(num_tokens, 1)  # 0 where only the first token is a target: nothing predicts it
        rank = rankdata(-mean, "ordinal")
        percentile = 100.0 * (num_sequences - rank) / max(1, num_sequences - 1)
        if num_sequences == 1:
            percentile[:] = 100.0
        values = (total.astype(np.float32), mean.astype(np.float32), rank, percentile.astype(np.float32))
        columns |= dict(zip(utility_columns(name), values, strict=True))
    return columns, num_tokens


def _all_token_rows(
    folder: Path, store: Store, passes: Sequence[ScoringPass], num_tokens: np.ndarray
) -> Iterator[scores_folder.TokenRows]:
    """The rows of utilities.parquet, in the order of the store. Parts come in any order, so sums are kept on disk, in
    `folder`."""
    ends = np.concatenate([[0], num_tokens.cumsum()])
    totals: dict[str, np.ndarray] = {}
    for number, one in enumerate(passes):
        key, shape = f"utilities.{one.set_name}", max(1, int(ends[-1]))
        if key not in totals:
            totals[key] = np.memmap(folder / f"tokens_{number}.f64", np.float64, "w+", shape=shape)
        for position, _, utilities in one.read_sequences():
            totals[key][ends[position] : ends[position + 1]] += one.weight * utilities.astype(np.float64)
    for rows in scores_folder.split_rows(np.asarray(store.lengths)):
        sequences = [store[i] for i in rows]
        tokens = np.cumsum([0, *(len(sequence) for sequence in sequences)])
        first, last = ends[rows.start], ends[rows.stop]
        values = {
            "input_ids": np.concatenate([sequence.input_ids for sequence in sequences]),
            "supervised": np.concatenate([_predicted(sequence) for sequence in sequences]),
        }
        sums = {name: scores_folder.round_to_12_bits(total[first:last]) for name, total in totals.items()}
        offsets = dict.fromkeys(values, tokens) | dict.fromkeys(sums, ends[rows.start : rows.stop + 1] - first)
        yield scores_folder.TokenRows(np.arange(rows.start, rows.stop), offsets, values | sums)


def _predicted(sequence: TokenizedSequence) -> np.ndarray:
    """Which tokens are supervised, but for the first: nothing predicts it."""
    return sequence.supervised & (np.arange(len(sequence)) > 0)


def _make_token_rows(store: Store, passes: Sequence[ScoringPass], shown: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of tokens.parquet for a set and the sequences at the positions `shown`, in that order."""
    losses: dict[int, np.ndarray] = {}
    utilities: dict[int, np.ndarray] = dict.fromkeys(shown, np.zeros(()))
    for one in passes:
        for position, *values in one.read_sequences():
            if position in utilities:
                losses[position] = values[0]
                utilities[position] = utilities[position] + one.weight * values[1].astype(np.float64)
    return [
        {
            "set": passes[0].set_name,
            "sequence": i,
            "tokens": store[i].input_ids,
            "supervised": _predicted(store[i]),
            "utilities": utilities[i].astype(np.float32),
            "losses": losses[i],
        }
        for i in shown
    ]


# ---- the page --------------------------------------------------------------------------------------------------------

MOST_TOKENS = 20_000  # of a trace on the page, whose rest is left out
ENDS = ("the highest mean utility", "the lowest mean utility")
NUM_BINS = 40
EDGES = (0.005, 0.995)
"""Quantiles that limit a histogram's bins; traces beyond them are counted in the outer bins."""
NUM_LISTED, NUM_LISTED_TOKENS = 3, 24  # traces at each end that the screen shows, with their first learned tokens
MOST_SOURCES = 40  # maximum rows of the table of sources: those with the most traces
ABOUT_HISTOGRAMS = (
    "Number of traces by utility: the mean over a trace's tokens, and their sum. The 0.5% highest and the 0.5% lowest "
    "are counted in the outermost bars. Point at a bar, or select the plot and press the arrow keys."
)


class ShownTokens(NamedTuple):
    """The first tokens of a trace, including the prompt."""

    token_ids: np.ndarray
    positions: np.ndarray

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> "ShownTokens":
        """Those of a row of tokens.parquet."""
        ids = np.array(row["tokens"][:MOST_TOKENS], dtype=np.int32)
        return ShownTokens(ids, np.arange(len(ids)))


def encode_scored(
    name: str, columns: Columns, shown: Sequence[Mapping[str, Any]], texts: TokenTexts
) -> tuple[dict[str, Any], str]:
    """Encode the shown traces of a set for the page: the best, the best first, then the worst, the worst first."""
    total, mean, rank, _ = (columns[column] for column in utility_columns(name))
    rows = sorted((row for row in shown if row["set"] == name), key=lambda row: rank[row["sequence"]])
    traces = []
    for end, some in zip(ENDS, (rows[:NUM_SHOWN], rows[-NUM_SHOWN:][::-1]), strict=True):
        for row in some:
            place, num_tokens, tokens = row["sequence"], len(row["tokens"]), ShownTokens.from_row(row)
            supervised = np.array(row["supervised"][:MOST_TOKENS], dtype=np.bool_)
            measures = {"utility": np.zeros(len(supervised)), "loss": np.zeros(len(supervised))}
            for key, values in zip(("utilities", "losses"), measures.values(), strict=True):
                values[supervised] = row[key][: int(supervised.sum())]
            facts = [
                f"rank {rank[place]:,} of {len(rank):,}",
                f"mean {format_number(mean[place])}",
                f"sum {format_number(total[place])}",
                f"loss {columns['loss'][place]:.4g} nats",
            ]
            if num_tokens > MOST_TOKENS:
                facts.append(f"the first {MOST_TOKENS:,} of {num_tokens:,} tokens")
            source, number = str(columns["source"][place]), int(columns["row"][place])
            title = f"{source}, row {number:,}"
            traces.append(PageTrace(end, source, number, title, facts, tokens, measures, supervised, num_tokens))
    return encode_traces(name, texts, traces, has_one_scale=True)


def write_page(folder: Path) -> Page:
    """Write scores.html from the other files of the folder. Raises UserError where one of them is missing or damaged,
    or the model's tokenizer; OSError where the page cannot be written."""
    scores, shown = scores_folder.read_scores(folder), scores_folder.read_tokens(folder)
    names = [column for name in scores.sets for column in utility_columns(name)]
    columns = scores_folder.read_traces(folder, ["source", "row", "num_supervised_tokens", "loss", *names])
    tokenizer = load_tokenizer(str(find_local_folder(scores.model)))
    texts = TokenTexts(tokenizer.backend_tokenizer, list(map(ShownTokens.from_row, shown)))
    encoded = [encode_scored(name, columns, shown, texts) for name in scores.sets]
    histograms = [
        {"key": f"{by}-{name}", "section": f"{by} over the tokens", "title": name, "note": "", **_histogram(utilities)}
        for by, place in (("Mean", 1), ("Sum", 0))
        for name in scores.sets
        for utilities in [columns[utility_columns(name)[place]].astype(np.float64)]
    ]
    data = {"histograms": histograms, "scores": [description for description, _ in encoded]}
    num_sources = len(np.unique(columns["source"].astype(str)))
    fewer = [f"The {MOST_SOURCES} sources with the most traces, of {num_sources}."] * (num_sources > MOST_SOURCES)
    sources = [_sources_table(columns, name) for name in scores.sets]
    ends = [_ends_table(name, columns, shown, tokenizer) for name in scores.sets]
    drawn: list[Block] = [ABOUT_HISTOGRAMS, Drawing("histograms")]
    sections = [
        PageSection("sets", "", "", [_sets_table(scores)]),
        PageSection("distribution", "Distribution of the utility", "Distribution", drawn, in_text=False),
        PageSection("sources", "By source", "Sources", [*fewer, sources]),
        PageSection("ends", "The best and the worst traces", "", ends),
        PageSection("traces", "Their tokens", "Traces", [Drawing("viewer")], in_text=False),
    ]
    rank = f" (approximated: rank {scores.probe_rank})" if scores.probe_rank is not None else ""
    jacobian = f" times the Jacobian of {scores.direction.capitalize()}'s update" * (scores.direction != "sgd")
    left_out = ", ".join(f"{number:,} {reason}" for reason, number in scores.data.dropped.items())
    summary = (
        f"The influence of {count(scores.data.num_sequences, 'trace')} on {count(len(scores.sets), 'trusted set')} "
        f"(the target or validation set of LESS), with the weights of {scores.weights}, along the gradient of each "
        f"set's loss{jacobian}{rank}. A utility is positive where learning the trace lowers the set's loss."
        f"{f' Rows that were left out: {left_out}.' * bool(left_out)}"
    )
    blobs = {f"scores-{place}": blob for place, (_, blob) in enumerate(encoded)}
    page = Page(f"Scores of {Path(scores.data.path).name}", summary, sections, data, blobs)
    write_text(folder / scores_folder.PAGE, page.html())
    return page


def _histogram(utilities: np.ndarray) -> dict[str, Any]:
    """Number of traces in bins of equal width; 0 is an edge between two bins."""
    low, high = np.quantile(utilities, EDGES)
    low, high = min(low, 0.0), max(high, 0.0)
    width = max(high - low, 1e-30) / NUM_BINS
    first, last = int(np.floor(low / width)), max(int(np.ceil(high / width)), int(np.floor(low / width)) + 1)
    places = np.clip(np.floor(utilities / width).astype(np.int64), first, last - 1) - first
    counts = np.bincount(places, minlength=last - first).tolist()
    readout = f"{(utilities > 0).sum():,} of {len(utilities):,} traces have a positive utility"
    return {"low": first * width, "width": width, "counts": counts, "readout": readout}


def _sets_table(scores: Scores) -> Table:
    head = ["", "traces of", "traces", "loss (nats)", "gradient norm"]
    head += ["rank correlation of mean utility and length", "of summed utility and length"]
    rows = []
    for name, one in scores.sets.items():
        correlations = (one.length_correlation_mean, one.length_correlation_sum)
        shown = [NOTHING if value is None else f"{value:+.2f}" for value in correlations]
        rows.append([name, one.path, f"{one.num_sequences:,}", f"{one.loss:.4f}", f"{one.gradient_norm:.4g}", *shown])
    return Table("Trusted sets", head, rows)


def _ends_table(
    name: str, columns: Columns, shown: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> Table:
    """The first and the last traces by mean utility, with the beginning of what is learned of them."""
    _, mean, rank, _ = (columns[column] for column in utility_columns(name))
    by_rank = {int(rank[row["sequence"]]): row for row in shown if row["set"] == name}
    ordered = sorted(by_rank)
    rows = []
    for place in dict.fromkeys([*ordered[:NUM_LISTED], *ordered[-NUM_LISTED:]]):
        row = by_rank[place]
        i, learned = row["sequence"], np.array(row["tokens"])[np.array(row["supervised"], dtype=np.bool_)]
        text = " ".join(str(tokenizer.decode(learned[:NUM_LISTED_TOKENS])).split())
        where = f"{Path(str(columns['source'][i])).name}, row {int(columns['row'][i]):,}"
        rows.append([f"{place:,}", where, f"{mean[i]:.3g}", text])
    return Table(f"By mean utility for {name}", ["rank", "trace", "mean utility", "what is learned"], rows)


def _sources_table(columns: Columns, name: str) -> Table:
    """A row for all sources together, if there are several, then one per source, the one with the most traces first."""
    mean = columns[utility_columns(name)[1]].astype(np.float64)
    rows = []
    for label, members in scores_folder.group_by_source(columns["source"], MOST_SOURCES):
        values, tokens = mean[members], columns["num_supervised_tokens"][members]
        quartiles = [f"{value:.3g}" for value in np.quantile(values, [0.25, 0.5, 0.75])]
        rows.append([label, f"{len(values):,}", f"{(values > 0).mean():.0%}", *quartiles, f"{tokens.mean():,.0f}"])
    head = ["source", "traces", "positive", "lower quartile", "median", "upper quartile", "tokens a trace"]
    return Table(f"Mean utility for {name}", head, rows)
