"""Recorded tokens as a page can hold them: a byte for each measure, compressed; texts once each."""

import base64
import gzip
from collections.abc import Sequence
from typing import Any

import numpy as np

from vcore_ds.commands.report.read import ReportedRun
from vcore_ds.track.token_records import SequenceTokens, TokenRecord
from vcore_ds.track.token_tables import SOURCES, are_uniform
from vcore_ds.track.token_texts import KINDS, TokenTexts

MOST_TOKENS = 1_600_000
"""Tokens of a page, about 8 MB of it: 12 records as large as a run writes them. What is beyond is left out by whole
sequences, the same number of tokens in each record."""

KIND_BITS = 0b0000_0111
IN_ANSWER, AFTER_GAP = 8, 16
"""Flags of a token, beside its kind: inside `\\boxed{}`; behind tokens that were not trained on."""


def encode_traces(run: ReportedRun, most_tokens: int) -> tuple[dict[str, Any], str]:
    """What the page knows of a run's recorded tokens, of at least one: a description for JSON, and the tokens as
    base64 of gzip.

    The bytes are, for all tokens, one array after the other: place in `texts` (`bytes_text` each, little-endian), rank
    in the sequence (`bytes_rank`, from 0 for the most weighted), then one byte each: place in the levels of weight, of
    loss, and of utility in the step (absent without utilities), and flags.
    """
    assert run.texts is not None
    chosen = [
        (record, sequence) for record in run.records for sequence in _within(record, most_tokens, len(run.records))
    ]
    sequences = [sequence for _, sequence in chosen]
    names: dict[str, int] = {}
    texts, flags = zip(*(_text_of(sequence, run.texts, names) for sequence in sequences), strict=True)
    weights = np.concatenate([sequence.relative_weights for sequence in sequences])
    losses = np.concatenate([sequence.losses for sequence in sequences])
    levels: dict[str, Any] = {"weight": weight_levels(weights), "loss": loss_levels(losses)}
    codes = [nearest(levels["weight"], weights), nearest(levels["loss"], losses)]
    of_record = {record.step: utilities_of(record) for record in run.records}
    if all(utilities is not None for utilities in of_record.values()):
        # Utilities of one step can be a hundred times those of another, so each record has levels of its own.
        levels |= {"utility": {step: utility_levels(utilities) for step, utilities in of_record.items()}}
        levels |= {"utilityAxis": utility_levels(np.concatenate(list(of_record.values())))}
        codes.append(
            np.concatenate([nearest(levels["utility"][record.step], sequence.utilities) for record, sequence in chosen])
        )
    text_type = np.dtype("<u2" if len(names) <= 1 << 16 else "<u4")
    rank_type = np.dtype("<u2" if max(map(len, sequences)) <= 1 << 16 else "<u4")
    arrays = [
        np.concatenate(texts).astype(text_type),
        np.concatenate([ranks(sequence.weights) for sequence in sequences]).astype(rank_type),
        *codes,
        np.concatenate(flags),
    ]
    description = {
        "run": run.name,
        "texts": list(names),
        "kinds": KINDS,
        "bytesText": text_type.itemsize,
        "bytesRank": rank_type.itemsize,
        "levels": {name: _rounded(values) for name, values in levels.items()},
        "isUniform": are_uniform(run.records),
        "numRecorded": sum(record.num_tokens for record in run.records),
        "sequences": [
            {
                "step": record.step,
                "id": sequence.sequence_id - (record.first_trusted_id if record.is_trusted(sequence) else 0),
                "source": SOURCES[record.is_trusted(sequence)],
                "tokens": len(sequence),
                "alpha": float(f"{sequence.alpha:.4g}"),
                "share": float(f"{sequence.share / sequence.uniform_share:.4g}"),
            }
            for record, sequence in chosen
        ],
    }
    packed = gzip.compress(b"".join(array.tobytes() for array in arrays), compresslevel=6, mtime=0)
    return description, base64.b64encode(packed).decode()


def utilities_of(record: TokenRecord) -> np.ndarray | None:
    """Utilities of all tokens of a record; None for methods without."""
    utilities = [sequence.utilities for sequence in record.sequences if sequence.utilities is not None]
    return np.concatenate(utilities).astype(np.float64) if len(utilities) == len(record.sequences) else None


def _rounded(levels: Any) -> Any:
    """For JSON: four digits, which are finer than the levels."""
    if isinstance(levels, dict):
        return {step: _rounded(own) for step, own in levels.items()}
    return [float(f"{value:.4g}") for value in levels]


def _within(record: TokenRecord, most_tokens: int, num_records: int) -> list[SequenceTokens]:
    """The first sequences of a record that fit into its part of `most_tokens`, at least one."""
    ends = np.cumsum([len(sequence) for sequence in record.sequences])
    return list(record.sequences[: max(1, int(np.searchsorted(ends, most_tokens // num_records, side="right")))])


def _text_of(sequence: SequenceTokens, texts: TokenTexts, names: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Place of each token's text in `names`, which grows, and its flags."""
    read, pieces = texts.of(sequence), texts.pieces_of(sequence)
    places = np.array([names.setdefault(piece, len(names)) for piece in pieces], dtype=np.int64)
    flags = read.kinds.astype(np.uint8) & KIND_BITS
    flags |= IN_ANSWER * read.in_answer.astype(np.uint8)
    flags |= AFTER_GAP * (np.diff(sequence.positions, prepend=sequence.positions[0] - 1) != 1).astype(np.uint8)
    return places, flags


def ranks(weights: np.ndarray) -> np.ndarray:
    """Rank of each weight, from 0 for the largest; of equal ones the first comes first."""
    rank = np.empty(len(weights), dtype=np.int64)
    rank[np.argsort(-weights, kind="stable")] = np.arange(len(weights))
    return rank


def weight_levels(weights: np.ndarray) -> np.ndarray:
    """256 relative weights, ascending: 0, then evenly spaced in their logarithm on either side of 1, the 129th."""
    positive = weights[weights > 0]
    low = max(2.0**-14, min(1 / 1.001, positive.min(initial=1.0)))
    high = max(1.001, weights.max(initial=1.0))
    return np.concatenate([[0.0], np.geomspace(low, 1.0, 128)[:-1], np.geomspace(1.0, high, 128)])


def loss_levels(losses: np.ndarray) -> np.ndarray:
    """256 losses, ascending from 0, the closer the smaller they are."""
    return max(1e-3, float(losses.max(initial=0.0))) * np.linspace(0.0, 1.0, 256) ** 2


def utility_levels(utilities: np.ndarray) -> np.ndarray:
    """256 utilities, ascending: 0 is the 129th, and they lie closer around it."""
    unit = max(float(np.median(np.abs(utilities))), 1e-30)

    def side(most: float, number: int) -> np.ndarray:
        return unit * np.sinh(np.linspace(0.0, np.arcsinh(max(most / unit, 1e-3)), number))

    negative = -side(float(-utilities.min(initial=0.0)), 129)[:0:-1]
    return np.concatenate([negative, side(float(utilities.max(initial=0.0)), 128)])


def nearest(levels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """uint8, the place of the level that is nearest to each value."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values).astype(np.uint8)


def most_tokens_of_run(runs: Sequence[ReportedRun]) -> int:
    """Tokens that a page shows of each run that has some."""
    return MOST_TOKENS // max(1, sum(run.texts is not None for run in runs))
