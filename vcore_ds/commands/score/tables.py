"""Files of finished work, the tables of a scoring, and its last lines on the screen. Used on rank 0 alone.

    OUTPUT.unfinished/request.json           the inputs' identity
    OUTPUT.unfinished/pass_000/set.json      loss and gradient norm of the pass's trusted set
    OUTPUT.unfinished/pass_000/000000.npz    losses and utilities of some sequences; no sequence is in two files

A pass is one trusted set at one checkpoint. Files are written atomically, so they survive a kill.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.commands.report.page import ranks
from vcore_ds.common.paths import flush, write_json
from vcore_ds.common.statistics import rank_correlation
from vcore_ds.common.text import align_columns, count
from vcore_ds.data import scores_folder
from vcore_ds.data.dataset import Store
from vcore_ds.data.store import TokenStore
from vcore_ds.training.token_records import write_arrays

SET = "set.json"


@dataclass(frozen=True)
class ScoredSequence:
    """Losses and utilities of the supervised tokens of a sequence."""

    position: int
    losses: np.ndarray  # float32 [n], nats
    utilities: np.ndarray  # float32 [n]


class PassFiles:
    """The files of one pass."""

    def __init__(self, folder: Path, number: int):
        self._folder = folder / f"pass_{number:03d}"
        self._folder.mkdir(exist_ok=True)

    def write_set(self, loss: float, gradient_norm: float) -> None:
        write_json(self._folder / SET, {"loss": loss, "gradient_norm": gradient_norm})

    def read_set(self) -> tuple[float, float]:
        values = json.loads((self._folder / SET).read_text(encoding="utf-8"))
        return values["loss"], values["gradient_norm"]

    def add(self, sequences: Sequence[ScoredSequence]) -> None:
        """Write another file, atomically, with at least one sequence."""
        number = sum(1 for _ in self._folder.glob("*.npz"))
        write_arrays(
            self._folder / f"{number:06d}.npz",
            {
                "position": np.array([sequence.position for sequence in sequences], dtype=np.int64),
                "num_tokens": np.array([len(sequence.losses) for sequence in sequences], dtype=np.int64),
                "losses": np.concatenate([sequence.losses for sequence in sequences]),
                "utilities": np.concatenate([sequence.utilities for sequence in sequences]),
            },
        )

    def read_positions(self) -> set[int]:
        """Positions of the finished sequences; empty where `SET` is missing."""
        if not (self._folder / SET).is_file():
            return set()
        positions: set[int] = set()
        for path in self._folder.glob("*.npz"):
            with np.load(path) as stored:
                positions.update(stored["position"].tolist())
        return positions

    def read_sequences(self) -> Iterator[ScoredSequence]:
        """Read all finished sequences, with one file in memory at a time."""
        for path in sorted(self._folder.glob("*.npz")):
            with np.load(path) as stored:
                ends = np.cumsum(stored["num_tokens"])[:-1]
                parts = (np.split(stored[name], ends) for name in ("losses", "utilities"))
                for position, losses, utilities in zip(stored["position"].tolist(), *parts, strict=True):
                    yield ScoredSequence(position, losses, utilities)


MAX_SOURCES = 12  # maximum sources in the table on the screen


@dataclass(frozen=True)
class ScoredSet:
    """A trusted set and the finished passes along its gradient."""

    path: str
    store: TokenStore
    passes: Sequence[tuple[float, PassFiles]]
    """Weight and files for each checkpoint, in ascending order of steps."""

    def read_sequences(self) -> Iterator[tuple[float, ScoredSequence]]:
        """Read the sequences of each pass with its weight; the losses of the last pass are those to keep."""
        for weight, files in self.passes:
            for sequence in files.read_sequences():
                yield weight, sequence


def write_tables(
    folder: Path,
    output: Path,
    store: Store,
    sets: Mapping[str, ScoredSet],
    description: scores_folder.Scores,
    *,
    all_tokens: bool = False,
) -> scores_folder.Scores:
    """Write the folder `output` atomically from the files of unfinished work in `folder`, and return scores.json
    (`description` with the sets). `all_tokens`: also write the utilities of all tokens (`vcore_ds.data.scores_folder`).
    Raises OSError."""
    from vcore_ds.commands.score.page import write_page

    staged = folder / "result"
    shutil.rmtree(staged, ignore_errors=True)  # of an attempt that was killed just before its end
    staged.mkdir()
    columns, num_tokens = _make_columns(store, sets)
    measured, rows = {}, []
    for name, inputs in sets.items():
        total, mean, rank, _ = (columns[column] for column in scores_folder.utility_columns(name))
        loss, gradient_norm = inputs.passes[-1][1].read_set()
        num_rows, dropped = inputs.store.count_dropped_rows()
        measured[name] = scores_folder.TrustedSet(
            inputs.path,
            inputs.store.digest,
            len(inputs.store),
            loss,
            gradient_norm,
            length_correlation_sum=rank_correlation(total, num_tokens),
            length_correlation_mean=rank_correlation(mean, num_tokens),
            num_rows=num_rows,
            dropped=dropped,
        )
        by_rank = np.argsort(rank)
        ends = [*by_rank[: scores_folder.NUM_SHOWN].tolist(), *by_rank[-scores_folder.NUM_SHOWN :].tolist()]
        rows += _make_token_rows(store, name, inputs, list(dict.fromkeys(ends)))
    scores = replace(description, sets=measured)
    scores_folder.write_traces(staged, columns)
    scores_folder.write_tokens(staged, rows)
    scores_folder.write_scores(staged, scores)
    if all_tokens:
        groups, described = _all_token_rows(folder, store, sets, num_tokens), scores_folder.describe_tokens(scores.data)
        scores_folder.write_token_table(staged / scores_folder.UTILITIES, groups, described)
    write_page(staged)
    for path in staged.iterdir():
        flush(path)
    staged.rename(output)
    flush(output.parent)
    return scores


def _make_columns(store: Store, sets: Mapping[str, ScoredSet]) -> tuple[dict[str, Any], np.ndarray]:
    """The columns of scores.parquet, and the number of supervised tokens of each sequence, int64 [n]."""
    num_sequences = len(store)
    num_tokens, loss = np.zeros(num_sequences, dtype=np.int64), np.zeros(num_sequences)
    utilities: dict[str, Any] = {}
    for name, inputs in sets.items():
        total = np.zeros(num_sequences)
        for weight, sequence in inputs.read_sequences():
            num_tokens[sequence.position] = len(sequence.losses)
            loss[sequence.position] = sequence.losses.sum(dtype=np.float64)
            total[sequence.position] += weight * sequence.utilities.sum(dtype=np.float64)
        mean = total / np.maximum(num_tokens, 1)  # 0 where only the first token is a target: nothing predicts it
        rank = 1 + ranks(mean)
        percentile = 100.0 * (num_sequences - rank) / max(1, num_sequences - 1)
        if num_sequences == 1:
            percentile[:] = 100.0
        values = (total.astype(np.float32), mean.astype(np.float32), rank, percentile.astype(np.float32))
        utilities |= dict(zip(scores_folder.utility_columns(name), values, strict=True))
    source, row = store.origins()
    columns = {
        "sequence": np.arange(num_sequences, dtype=np.int64),
        "source": source,
        "row": row,
        "num_supervised_tokens": num_tokens,
        "loss": (loss / np.maximum(num_tokens, 1)).astype(np.float32),
    }
    return columns | utilities, num_tokens


def _all_token_rows(
    folder: Path, store: Store, sets: Mapping[str, ScoredSet], num_tokens: np.ndarray
) -> Iterator[scores_folder.TokenRows]:
    """The rows of utilities.parquet, in the order of the store. Parts come in any order, so sums are kept on disk, in
    `folder`."""
    ends = np.concatenate([[0], num_tokens.cumsum()])
    totals = {}
    for number, (name, inputs) in enumerate(sets.items()):
        total = np.memmap(folder / f"tokens_{number}.f64", np.float64, "w+", shape=(max(1, int(ends[-1])),))
        for weight, sequence in inputs.read_sequences():
            start = ends[sequence.position]
            total[start : start + len(sequence.utilities)] += weight * sequence.utilities.astype(np.float64)
        totals[f"utilities.{name}"] = total
    for rows in scores_folder.split_rows(np.asarray(store.lengths)):
        sequences = [store[i] for i in rows]
        tokens = np.cumsum([0, *(len(sequence) for sequence in sequences)])
        first, last = ends[rows.start], ends[rows.stop]
        supervised = np.concatenate([sequence.supervised for sequence in sequences])
        supervised[tokens[:-1]] = False  # the first token is never predicted
        input_ids = np.concatenate([sequence.input_ids for sequence in sequences])
        values = {"input_ids": input_ids, "supervised": supervised}
        utilities = {name: scores_folder.round_to_12_bits(total[first:last]) for name, total in totals.items()}
        offsets = dict.fromkeys(values, tokens) | dict.fromkeys(utilities, ends[rows.start : rows.stop + 1] - first)
        yield scores_folder.TokenRows(np.arange(rows.start, rows.stop), offsets, values | utilities)


def _make_token_rows(store: Store, name: str, inputs: ScoredSet, shown: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of tokens.parquet for the sequences at the positions `shown`, in that order."""
    wanted = set(shown)
    losses: dict[int, np.ndarray] = {}
    utilities: dict[int, np.ndarray] = {}
    for weight, sequence in inputs.read_sequences():
        if (position := sequence.position) in wanted:
            losses[position] = sequence.losses
            utilities[position] = utilities.get(position, 0.0) + weight * sequence.utilities.astype(np.float64)
    rows = []
    for position in shown:
        tokens = store[position]
        row = {"set": name, "sequence": position, "tokens": tokens.input_ids, "losses": losses[position]}
        row["utilities"] = utilities[position].astype(np.float32)
        row["supervised"] = tokens.supervised & (np.arange(len(tokens)) > 0)  # the first token is never predicted
        rows.append(row)
    return rows


def describe(output: Path, scores: scores_folder.Scores) -> str:
    """The lines at the end: for each set and source the number of traces, mean utility and share of positive ones."""
    lines = []
    for name, trusted in scores.sets.items():
        mean_column = scores_folder.utility_columns(name)[1]
        columns = scores_folder.read_traces(output, ["source", mean_column])
        mean = columns[mean_column].astype(np.float64)
        lines += ["", f"Along {name} ({count(trusted.num_sequences, 'trace')}, loss {trusted.loss:.4f} nats):"]
        table = [("source", "traces", "mean utility", "positive")]
        for label, members in scores_folder.group_by_source(columns["source"], MAX_SOURCES):
            values = mean[members]
            table.append((label, f"{len(values):,}", f"{values.mean():.3g}", f"{(values > 0).mean():.0%}"))
        lines += [f"  {line}" for line in align_columns(table)]
        if (num_sources := len(set(columns["source"]))) > MAX_SOURCES:
            lines.append(f"  and {num_sources - MAX_SOURCES:,} more sources")
        correlations = [
            "none" if value is None else f"{value:+.2f}"
            for value in (trusted.length_correlation_sum, trusted.length_correlation_mean)
        ]
        lines.append(f"  rank correlation with the number of tokens: sum {correlations[0]}, mean {correlations[1]}")
    return "\n".join([*lines, "", f"Scores: {output} (open {scores_folder.PAGE} in a browser)"])
