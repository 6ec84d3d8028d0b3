"""From losses and utilities of all tokens to the tables, and to the lines on the screen. On one process."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.common.paths import flush, write_json
from vcore_ds.common.statistics import rank_correlation
from vcore_ds.common.text import align_columns
from vcore_ds.data.scores_folder import (
    NUM_SHOWN,
    PAGE,
    Scores,
    TrustedSet,
    read_traces,
    utility_columns,
    write_scores,
    write_tokens,
    write_traces,
)
from vcore_ds.data.store import TokenStore
from vcore_ds.train.token_records import write_arrays

# Losses and utilities of all tokens, as they are computed: files that survive a kill.
#
# OUTPUT.unfinished/request.json what is scored; another request starts over OUTPUT.unfinished/pass_000/set.json loss
# and gradient norm of the pass's trusted set OUTPUT.unfinished/pass_000/000000.npz losses and utilities of some
# sequences; no sequence is in two files
#
# A pass is one trusted set at one checkpoint.


SET = "set.json"


@dataclass(frozen=True)
class ScoredSequence:
    """The supervised tokens of a sequence."""

    position: int
    """In the store."""
    losses: np.ndarray
    """float32 [n], nats"""
    utilities: np.ndarray
    """float32 [n]"""


class PassFiles:
    """The files of one pass, for rank 0 alone."""

    def __init__(self, folder: Path, number: int):
        self._folder = folder / f"pass_{number:03d}"
        self._folder.mkdir(exist_ok=True)

    def write_set(self, loss: float, gradient_norm: float) -> None:
        """Keeps what was measured while the direction was taken."""
        write_json(self._folder / SET, {"loss": loss, "gradient_norm": gradient_norm})

    def read_set(self) -> tuple[float, float]:
        """Loss in nats, and gradient norm, of the pass's trusted set."""
        found = json.loads((self._folder / SET).read_text(encoding="utf-8"))
        return found["loss"], found["gradient_norm"]

    def add(self, sequences: Sequence[ScoredSequence]) -> None:
        """Writes a further file, whole or not at all; at least one sequence."""
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

    def positions(self) -> set[int]:
        """Of the sequences whose files are there; empty where the set's own is not."""
        if not (self._folder / SET).is_file():
            return set()
        found: set[int] = set()
        for path in self._folder.glob("*.npz"):
            with np.load(path) as stored:
                found.update(stored["position"].tolist())
        return found

    def sequences(self) -> Iterator[ScoredSequence]:
        """All that were written, a file in memory at a time."""
        for path in sorted(self._folder.glob("*.npz")):
            with np.load(path) as stored:
                ends = np.cumsum(stored["num_tokens"])[:-1]
                parts = (np.split(stored[name], ends) for name in ("losses", "utilities"))
                for position, losses, utilities in zip(stored["position"].tolist(), *parts, strict=True):
                    yield ScoredSequence(position, losses, utilities)


MAX_SOURCES = 12
"""Sources in the table on the screen."""


@dataclass(frozen=True)
class SetInputs:
    """What was computed along a trusted set."""

    path: str
    store: TokenStore
    passes: Sequence[tuple[float, PassFiles]]
    """One for each checkpoint, with its weight, in the order of their steps."""


def write_result(
    folder: Path, output: Path, store: TokenStore, sets: Mapping[str, SetInputs], description: Scores
) -> Scores:
    """Writes the folder `output`, whole, from what is in `folder`, and returns scores.json.

    Args:
        folder: of the unfinished work.
        description: without the sets.

    Raises:
        OSError: the folder cannot be written.
    """
    from vcore_ds.commands.score.page import write_page

    staged = folder / "result"
    shutil.rmtree(staged, ignore_errors=True)  # that of an attempt that was killed just before its end
    staged.mkdir()
    columns, num_tokens = _columns(store, sets)
    measured, rows = {}, []
    for name, inputs in sets.items():
        of_sum, of_mean, of_rank, _ = (columns[column] for column in utility_columns(name))
        loss, gradient_norm = inputs.passes[-1][1].read_set()
        measured[name] = TrustedSet(
            inputs.path,
            inputs.store.digest,
            len(inputs.store),
            loss,
            gradient_norm,
            length_correlation_sum=rank_correlation(of_sum, num_tokens),
            length_correlation_mean=rank_correlation(of_mean, num_tokens),
            num_rows=inputs.store.dropped_rows()[0],
            dropped=inputs.store.dropped_rows()[1],
        )
        ranks = np.argsort(of_rank)
        shown = list(dict.fromkeys([*ranks[:NUM_SHOWN].tolist(), *ranks[-NUM_SHOWN:].tolist()]))
        rows += _shown_tokens(store, name, inputs, shown)
    scores = replace(description, sets=measured)
    write_traces(staged, columns)
    write_tokens(staged, rows)
    write_scores(staged, scores)
    write_page(staged)
    for path in staged.iterdir():
        flush(path)
    staged.rename(output)
    flush(output.parent)
    return scores


def _columns(store: TokenStore, sets: Mapping[str, SetInputs]) -> tuple[dict[str, Any], np.ndarray]:
    """The columns of scores.parquet, and the number of supervised tokens of each sequence, int64 [n]."""
    num_sequences = len(store)
    num_tokens, loss = np.zeros(num_sequences, dtype=np.int64), np.zeros(num_sequences)
    utilities: dict[str, Any] = {}
    for name, inputs in sets.items():
        total = np.zeros(num_sequences)
        for weight, files in inputs.passes:
            for sequence in files.sequences():  # losses are those of the last pass: at the last checkpoint
                num_tokens[sequence.position] = len(sequence.losses)
                loss[sequence.position] = sequence.losses.sum(dtype=np.float64)
                total[sequence.position] += weight * sequence.utilities.sum(dtype=np.float64)
        mean = total / np.maximum(num_tokens, 1)  # a sequence whose only target is its first token has no loss
        order = np.argsort(-mean, kind="stable")
        rank = np.empty(num_sequences, dtype=np.int64)
        rank[order] = np.arange(1, num_sequences + 1)
        percentile = 100.0 * (num_sequences - rank) / max(1, num_sequences - 1)
        if num_sequences == 1:
            percentile[:] = 100.0
        values = (total.astype(np.float32), mean.astype(np.float32), rank, percentile.astype(np.float32))
        utilities |= dict(zip(utility_columns(name), values, strict=True))
    source, row = store.origins()
    columns = {
        "sequence": np.arange(num_sequences, dtype=np.int64),
        "source": source,
        "row": row,
        "num_supervised_tokens": num_tokens,
        "loss": (loss / np.maximum(num_tokens, 1)).astype(np.float32),
    }
    return columns | utilities, num_tokens


def _shown_tokens(store: TokenStore, name: str, inputs: SetInputs, shown: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of tokens.parquet for the sequences at the positions `shown`, in that order."""
    wanted = set(shown)
    losses: dict[int, np.ndarray] = {}
    utilities: dict[int, np.ndarray] = {}
    for weight, files in inputs.passes:
        for sequence in files.sequences():
            if sequence.position in wanted:
                losses[sequence.position] = sequence.losses
                weighted = weight * sequence.utilities.astype(np.float64)
                utilities[sequence.position] = utilities.get(sequence.position, 0.0) + weighted
    rows = []
    for position in shown:
        tokens = store[position]
        supervised = tokens.supervised.copy()
        supervised[0] = False  # nothing stands before it to predict it
        rows.append(
            {
                "set": name,
                "sequence": position,
                "tokens": tokens.input_ids,
                "supervised": supervised,
                "utilities": utilities[position].astype(np.float32),
                "losses": losses[position],
            }
        )
    return rows


def describe(output: Path, scores: Scores) -> str:
    """The lines at the end: by set and source how many traces, their mean utility and how many have a positive one."""
    lines = []
    for name, trusted in scores.sets.items():
        of_mean = utility_columns(name)[1]
        columns = read_traces(output, ["source", of_mean])
        mean = columns[of_mean].astype(np.float64)
        sources, index = np.unique(columns["source"].astype(str), return_inverse=True)
        lines += ["", f"Along {name} ({trusted.num_sequences:,} traces, loss {trusted.loss:.4f} nats):"]
        table = [("source", "traces", "mean utility", "positive")]
        by_size = np.argsort(-np.bincount(index), kind="stable")[:MAX_SOURCES]
        for label, chosen in [("all", np.ones(len(mean), dtype=bool))] * (len(sources) > 1) + [
            (str(sources[i]), index == i) for i in by_size
        ]:
            found = mean[chosen]
            table.append((label, f"{len(found):,}", f"{found.mean():.3g}", f"{(found > 0).mean():.0%}"))
        lines += [f"  {line}" for line in align_columns(table)]
        if len(sources) > MAX_SOURCES:
            lines.append(f"  and {len(sources) - MAX_SOURCES:,} more sources")
        correlations = [
            "none" if value is None else f"{value:+.2f}"
            for value in (trusted.length_correlation_sum, trusted.length_correlation_mean)
        ]
        lines.append(
            f"  rank correlation with a trace's number of tokens: sum {correlations[0]}, mean {correlations[1]}"
        )
    return "\n".join([*lines, "", f"Scores: {output} ({PAGE} shows them)"])
