"""Which of the curated and tokenized rows make up the store."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.data.prepare import shards as work
from vcore_ds.data.prepare.report import NOTICED, PrepareReport
from vcore_ds.data.prepare.request import PrepareRequest
from vcore_ds.data.prepare.shards import Curated, ShardReport
from vcore_ds.data.store import IN_ANSWER, SUPERVISED
from vcore_ds.data.tokenization import TokenizedSequence

SPARE = 2
"""curated rows kept for each one of the sample, since some turn out too long"""


@dataclass(frozen=True)
class ChosenSequence:
    """A sequence of the store, and where its tokens are."""

    sequence_id: int
    length: int
    """tokens"""
    block: int
    start: int
    """its first token in the block"""


def select(request: PrepareRequest, reports: Sequence[ShardReport], folder: Path) -> list[Curated]:
    """Curated rows that may be in the store: for a sample by key, twice as many as it needs; else all, in order."""
    rows = (row for i in range(len(reports)) for row in work.read_curated(folder, i))
    if request.sample is None:
        return list(rows)
    return nsmallest(SPARE * request.sample, rows, key=lambda row: (row.key, row.shard_number, row.number))


def read_block(folder: Path, block_number: int) -> dict[str, np.ndarray]:
    """All but the tokens."""
    with np.load(folder / f"{block_number:05d}.npz") as stored:
        names = ("outcomes", "faults", "lengths", "sequence_ids", *NOTICED)
        return {name: stored[name] for name in names}


def choose(request: PrepareRequest, blocks: Sequence[Any], report: PrepareReport) -> list[ChosenSequence]:
    """The kept sequences, of a sample the first ones; counts what became of the others."""
    chosen: list[ChosenSequence] = []
    for block_number, block in enumerate(blocks):
        starts = np.cumsum(block["lengths"]) - block["lengths"]
        for sequence_id, length, start in zip(block["sequence_ids"], block["lengths"], starts, strict=True):
            chosen.append(ChosenSequence(int(sequence_id), int(length), block_number, int(start)))
    chosen = chosen[: request.sample]
    outcomes = np.concatenate([block["outcomes"] for block in blocks])
    num_looked_at = len(outcomes)
    if len(chosen) == request.sample:  # up to the last one of the sample
        num_looked_at = int(np.flatnonzero(outcomes == work.KEPT)[len(chosen) - 1]) + 1
    counts = Counter(outcomes[:num_looked_at].tolist())
    report.count_outcomes(counts, num_kept=len(chosen), num_not_sampled=report.num_curated - num_looked_at)
    noticed = {what: int(np.concatenate([block[what] for block in blocks])[: len(chosen)].sum()) for what in NOTICED}
    report.noticed = {text: noticed[what] for what, text in NOTICED.items() if noticed[what]}
    return chosen


def read_sequences(folder: Path, chosen: Sequence[ChosenSequence]) -> Iterator[TokenizedSequence]:
    """From the blocks; of those of a sample, which are out of order, all are kept in memory."""
    blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    last_use = {sequence.block: i for i, sequence in enumerate(chosen)}
    for i, sequence in enumerate(chosen):
        if sequence.block not in blocks:
            with np.load(folder / f"{sequence.block:05d}.npz") as stored:
                blocks[sequence.block] = stored["ids"], stored["marks"]
        own = slice(sequence.start, sequence.start + sequence.length)
        ids, marks = (array[own] for array in blocks[sequence.block])
        yield TokenizedSequence(sequence.sequence_id, ids, (marks & SUPERVISED) > 0, (marks & IN_ANSWER) > 0)
        if last_use[sequence.block] == i:
            del blocks[sequence.block]
