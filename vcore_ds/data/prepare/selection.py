"""Selection of the store's sequences from curated and tokenized rows, and the report on all rows."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

import numpy as np

from vcore_ds.data.conversations import NOTICES
from vcore_ds.data.messages import Dropped, Malformed
from vcore_ds.data.prepare import shards as work
from vcore_ds.data.prepare.curation import RULES, Kind, PrepareRequest
from vcore_ds.data.prepare.rows import read_chat_rows
from vcore_ds.data.prepare.shards import Curated, ShardReport
from vcore_ds.data.prepare.sources import find_shards
from vcore_ds.data.store import IN_ANSWER, SUPERVISED
from vcore_ds.data.store_checks import MANIFEST, read_manifest
from vcore_ds.data.tokenization import TokenizedSequence

_MAX_SHOWN = 10  # fields that are named in a line

_NUM_ROWS = 1000  # rows that `check` reads of each source

_MAX_LIST_BYTES = 64 * 2**20
"""Size up to which `check` reads a file that is one list; larger ones take seconds."""


def list_fields(fields: Mapping[str, int]) -> str:
    """List fields with the number of rows that have them, the most frequent ones first."""
    ordered = sorted(fields.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"`{name:.40}` {number:,}" for name, number in ordered[:_MAX_SHOWN]]
    others = [f"{len(ordered) - _MAX_SHOWN:,} others"] if len(ordered) > _MAX_SHOWN else []
    return ", ".join([*shown, *others])


def describe_reading(path: str) -> list[str]:
    """Describe a token store, or the first rows of conversations: shapes, ignored fields, faults. Raises UserError if
    `path` cannot be read."""
    if (Path(path) / MANIFEST).is_file():
        return [f"{path}: {line}" for line in read_manifest(Path(path)).get("counts", {}).get("reading", [])]
    return [f"{path}: {_describe_rows(path)}"]


def _describe_rows(source: str) -> str:
    shapes: Counter[str] = Counter()
    ignored: Counter[str] = Counter()
    for_template: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    faults: list[str] = []
    shards = find_shards([source], "train")
    if any(shard.kind == "array" and Path(shard.source).stat().st_size > _MAX_LIST_BYTES for shard in shards[:1]):
        return "a long list, which is not read here"
    for chat in islice(chain.from_iterable(map(read_chat_rows, shards)), _NUM_ROWS):
        if isinstance(chat, Malformed):
            faults.append(str(chat))
            continue
        if isinstance(chat, Dropped):
            left_out[str(chat)] += 1
            continue
        shapes[chat.shape] += 1
        ignored.update(chat.unknown)
        for_template.update(chat.unknown_fields)
    num_rows = shapes.total() + left_out.total() + len(faults)
    parts = [f"the first {num_rows:,} rows" if num_rows == _NUM_ROWS else f"{num_rows:,} rows"]
    parts += [f"format {shape} {number:,}" for shape, number in sorted(shapes.items())]
    parts += [f"ignored: {list_fields(ignored)}"] if ignored else []
    parts += [f"ignored unless the chat template reads it: {list_fields(for_template)}"] if for_template else []
    parts += [f"{rule}: {number:,} left out" for rule, number in left_out.items()]
    parts += [f"malformed: {len(faults):,}, the first: {faults[0]:.300}"] if faults else []
    return "; ".join(parts)


PAPER_MEAN_LENGTHS = {"math": 3155.01, "code": 2861.25}
"""Average CoT length of the 3,200 examples for Qwen3 (paper, section "Experiments"), in tokens."""

NOTICED = {
    "truncated": "truncated at the cutoff: their ends, with the answer and the end of the turn, are not learned",
    **NOTICES,
}
"""Observations on kept sequences: array of a block, one number per sequence -> text of its line."""


@dataclass(frozen=True)
class LengthSummary:
    """Distribution of the sequences' lengths, in tokens."""

    mean: float
    p50: int
    p95: int
    max: int

    @classmethod
    def summarize(cls, sorted_lengths: Sequence[int]) -> Self:
        """Percentiles are lengths that occur: the smallest that at least 50% (95%) of all do not exceed."""
        n = len(sorted_lengths)
        p50, p95 = (sorted_lengths[-(-n * percent // 100) - 1] for percent in (50, 95))
        return cls(round(sum(sorted_lengths) / n, 2), p50, p95, sorted_lengths[-1])


@dataclass
class PrepareReport:
    """Outcomes of all rows: `num_rows` is the sum of `num_malformed`, all `dropped`, and `num_kept`."""

    kind: Kind
    sample: int | None  # requested number of sequences; None for all
    cutoff_length: int
    overlong: str
    num_rows: int = 0
    num_malformed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # rows by rule, in the order of the rules
    shapes: dict[str, int] = field(default_factory=dict)
    num_curated: int = 0  # rows that passed all rules
    num_kept: int = 0
    noticed: dict[str, int] = field(default_factory=dict)  # kept sequences by observation, see `NOTICED`
    num_context_turns: int = 0  # turns of the assistant that the rows exclude from learning
    ignored: dict[str, int] = field(default_factory=dict)
    """kept rows by columns, and by keys of messages, that had no effect"""
    lengths: LengthSummary | None = None
    longest: int = 0  # tokens of the longest conversation, whether it was kept or not

    def count_shards(self, reports: Sequence[ShardReport]) -> None:
        dropped: Counter[str] = Counter()
        shapes: Counter[str] = Counter()
        for report in reports:
            self.num_rows += report.num_rows
            self.num_malformed += report.num_malformed
            self.num_curated += report.num_curated
            dropped.update(report.dropped)
            shapes.update(report.shapes)
        self.dropped = {rule: dropped[rule] for rule in RULES if rule in dropped}
        self.shapes = dict(sorted(shapes.items()))

    def count_outcomes(self, outcomes: Counter[int], *, num_kept: int, num_not_sampled: int) -> None:
        for outcome, rule in (
            (work.REFUSED, "refused by the chat template"),
            (work.LONG_PROMPT, "prompt alone longer than the cutoff"),
            (work.UNSUPERVISED, "no turn to learn"),
            (work.OVERLONG, f"longer than {self.cutoff_length:,} tokens"),
        ):
            if outcomes[outcome]:
                self.dropped[rule] = outcomes[outcome]
        if num_not_sampled:
            self.dropped["not in the sample"] = num_not_sampled
        self.num_kept = num_kept

    def describe_reading(self) -> list[str]:
        """Describe turns that rows exclude, and fields without effect, in a line each."""
        lines = []
        if self.num_context_turns:
            lines.append(f"turns of the assistant with weight 0, or in a prompt: {self.num_context_turns:,}")
        if self.ignored:
            lines.append(f"ignored: {list_fields(self.ignored)}")
        return lines

    def describe(self) -> str:
        rows = [("rows read", f"{self.num_rows:,}"), ("  malformed", f"{self.num_malformed:,}")]
        rows += [(f"  {rule}", f"{number:,}") for rule, number in self.dropped.items()]
        rows.append(("kept", f"{self.num_kept:,}"))
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value:>12}" for name, value in rows]
        if self.longest > self.cutoff_length:
            lines.append(f"The longest has {self.longest:,} tokens; --cutoff-length {self.longest} keeps all whole")
        if self.shapes:
            lines.append("formats: " + ", ".join(f"{shape} {number:,}" for shape, number in self.shapes.items()))
        lines += self.describe_reading()
        if self.lengths is not None:
            lines += ["", f"{'tokens per sequence':<{width}}  {'mean':>12}{'p50':>8}{'p95':>8}{'max':>8}"]
            values = self.lengths
            lines.append(
                f"{'  this store':<{width}}  {values.mean:>12,.2f}{values.p50:>8,}{values.p95:>8,}{values.max:>8,}"
            )
            if self.kind in PAPER_MEAN_LENGTHS:
                lines.append(f"{'  the paper (CoT, Qwen3)':<{width}}  {PAPER_MEAN_LENGTHS[self.kind]:>12,.2f}")
            if self.noticed:
                lines += ["", *(f"{number:,} {text}" for text, number in self.noticed.items())]
            if self.sample is not None and self.num_kept < self.sample:
                lines += ["", f"Fewer than the {self.sample:,} that were asked for: no more rows passed."]
        return "\n".join(lines)


SPARE = 2  # curated rows per row of the sample, since some turn out to be too long


@dataclass(frozen=True)
class ChosenSequence:
    """A sequence of the store, and the position of its tokens."""

    sequence_id: int
    length: int  # tokens
    block: int
    start: int  # its first token in the block


def select(request: PrepareRequest, reports: Sequence[ShardReport], folder: Path) -> list[Curated]:
    """Select curated rows to tokenize: all, in order; for a sample those with the smallest keys, twice its size."""
    rows = (row for i in range(len(reports)) for row in work.read_curated(folder, i))
    if request.sample is None:
        return list(rows)
    return nsmallest(SPARE * request.sample, rows, key=lambda row: (row.key, row.shard_number, row.number))


def read_block(folder: Path, block_number: int) -> dict[str, np.ndarray]:
    """Read a block without its tokens."""
    with np.load(folder / f"{block_number:05d}.npz") as stored:
        names = ("outcomes", "num_tokens", "faults", "lengths", "sequence_ids", "context_turns", "ignored", *NOTICED)
        return {name: stored[name] for name in names}


def choose(request: PrepareRequest, blocks: Sequence[Any], report: PrepareReport) -> list[ChosenSequence]:
    """Choose the kept sequences, of a sample the first ones; count the outcomes of the others in `report`."""
    chosen: list[ChosenSequence] = []
    for block_number, block in enumerate(blocks):
        starts = np.cumsum(block["lengths"]) - block["lengths"]
        for sequence_id, length, start in zip(block["sequence_ids"], block["lengths"], starts, strict=True):
            chosen.append(ChosenSequence(int(sequence_id), int(length), block_number, int(start)))
    chosen = chosen[: request.sample]
    outcomes = np.concatenate([block["outcomes"] for block in blocks])
    num_considered = len(outcomes)
    if len(chosen) == request.sample:  # later ones do not count
        num_considered = int(np.flatnonzero(outcomes == work.KEPT)[len(chosen) - 1]) + 1
    counts = Counter(outcomes[:num_considered].tolist())
    report.longest = int(np.concatenate([block["num_tokens"] for block in blocks])[:num_considered].max(initial=0))
    report.count_outcomes(counts, num_kept=len(chosen), num_not_sampled=report.num_curated - num_considered)

    def concatenate(name: str) -> np.ndarray:
        return np.concatenate([block[name] for block in blocks])[: len(chosen)]

    noticed = {name: int(concatenate(name).sum()) for name in NOTICED}
    report.noticed = {text: noticed[name] for name, text in NOTICED.items() if noticed[name]}
    report.num_context_turns = int(concatenate("context_turns").sum())
    report.ignored = dict(Counter(name for names in concatenate("ignored").tolist() for name in json.loads(names)))
    return chosen


def read_sequences(folder: Path, chosen: Sequence[ChosenSequence]) -> Iterator[TokenizedSequence]:
    """Read the chosen sequences from their blocks. A sample, which is out of order, keeps all blocks in memory."""
    blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    last_use = {sequence.block: i for i, sequence in enumerate(chosen)}
    for i, sequence in enumerate(chosen):
        if sequence.block not in blocks:
            with np.load(folder / f"{sequence.block:05d}.npz") as stored:
                blocks[sequence.block] = stored["ids"], stored["marks"]
        tokens = slice(sequence.start, sequence.start + sequence.length)
        ids, marks = (array[tokens] for array in blocks[sequence.block])
        yield TokenizedSequence(sequence.sequence_id, ids, (marks & SUPERVISED) > 0, (marks & IN_ANSWER) > 0)
        if last_use[sequence.block] == i:
            del blocks[sequence.block]
