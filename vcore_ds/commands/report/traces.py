"""Recorded tokens as a page can hold them: a byte for each measure, compressed; texts once each."""

import base64
import gzip
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vcore_ds.commands.report.read import ReportedRun
from vcore_ds.commands.report.tokens import KINDS, SOURCES, UNIFORM_TOLERANCE, TokenTexts, are_uniform
from vcore_ds.train.token_records import RecordedTokens, SequenceTokens, TokenRecord, TraceTokens

# Measures of tokens in a byte each: 256 levels that a page knows, and the place of the nearest one.


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
    """256 utilities, ascending: 0 is the 129th, and they lie closer around it.

    Args:
        utilities: of supervised tokens alone: others have none, and their zeros would make the scale too fine near 0.
    """
    sizes = np.abs(utilities[utilities != 0])
    # Levels are evenly spaced in asinh(utility / unit). A unit far below the largest utility would leave few of them
    # for large ones: with 1e-4 of it, neighbours are 8% apart at most.
    unit = max(float(np.median(sizes)), 1e-4 * float(sizes.max()), 1e-30) if len(sizes) else 1e-30

    def side(most: float, number: int) -> np.ndarray:
        return unit * np.sinh(np.linspace(0.0, np.arcsinh(max(most / unit, 1e-3)), number))

    negative = -side(float(-utilities.min(initial=0.0)), 129)[:0:-1]
    return np.concatenate([negative, side(float(utilities.max(initial=0.0)), 128)])


def nearest(levels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """uint8, the place of the level that is nearest to each value."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values).astype(np.uint8)


def rounded(levels: Any) -> Any:
    """For JSON: four digits, which are finer than the levels."""
    if isinstance(levels, dict):
        return {step: rounded(own) for step, own in levels.items()}
    return [float(f"{value:.4g}") for value in levels]


MOST_TOKENS = 1_600_000
"""Tokens of a page, about 8 MB of it: 12 records as large as a run writes them. What is beyond is left out by whole
sequences, the same number of tokens in each record."""
MOST_FOLLOWED_TOKENS = 800_000
"""The same for followed traces, of which each is cut to as many tokens; 16 traces of 4,096 tokens in 12 records fit."""

KIND_BITS = 0b0000_0111
IN_ANSWER, AFTER_GAP = 8, 16
"""Flags of a token, beside its kind: inside `\\boxed{}`; behind tokens that were not trained on."""


def encode_traces(run: ReportedRun, most_tokens: int) -> tuple[dict[str, Any], str]:
    """What the page knows of a run's recorded tokens, of at least one: a description for JSON, and the tokens as
    base64 of gzip, see `_pack`."""
    chosen = [
        (record, sequence) for record in run.records for sequence in _within(record, most_tokens, len(run.records))
    ]
    of_record = {record.step: utilities_of(record) for record in run.records}
    description, blob = _pack(run, [(record.step, sequence) for record, sequence in chosen], of_record)
    description |= {
        "isUniform": are_uniform(run.records),
        "numRecorded": sum(record.num_tokens for record in run.records),
        "sequences": [
            {
                "step": record.step,
                "id": sequence.sequence_id - ((record.first_trusted_id or 0) if record.is_trusted(sequence) else 0),
                "source": SOURCES[record.is_trusted(sequence)],
                "tokens": len(sequence),
                "alpha": float(f"{sequence.alpha:.4g}"),
                "share": float(f"{sequence.share / sequence.uniform_share:.4g}"),
            }
            for record, sequence in chosen
        ],
    }
    return description, blob


def encode_followed(run: ReportedRun, most_tokens: int) -> tuple[dict[str, Any], str] | None:
    """The same of its followed traces, with their entropy; None where there are none."""
    found = [
        (record.step, origin, trace)
        for record in run.followed
        for origin, trace in zip(record.origins, record.traces, strict=True)
        if trace.is_finite
    ]
    if not found:
        return None
    most = max(1, most_tokens // len(found))
    chosen = [(step, trace.first(most)) for step, _, trace in found]
    of_step = {step: _together([trace.utilities for other, trace in chosen if other == step]) for step, _ in chosen}
    description, blob = _pack(run, chosen, of_step)
    weights = np.concatenate([trace.relative_weights for _, trace in chosen])
    description |= {
        "isUniform": bool(np.all(np.abs(weights - 1.0) <= UNIFORM_TOLERANCE)),
        "sequences": [
            {
                "step": step,
                "id": origin.sequence_id,
                "source": origin.source,
                "isHeldOut": origin.is_held_out,
                "tokens": len(trace),
                "wholeTokens": trace.num_supervised_tokens,
            }
            for (step, origin, _), (_, trace) in zip(found, chosen, strict=True)
        ],
    }
    return description, blob


def _pack(
    run: ReportedRun,
    chosen: Sequence[tuple[int, SequenceTokens | TraceTokens]],
    utilities_of_step: Mapping[int, np.ndarray | None],
) -> tuple[dict[str, Any], str]:
    """Texts and levels for JSON, and the tokens' bytes.

    The bytes are, for all tokens, one array after the other: place in `texts` (`bytes_text` each, little-endian), rank
    in the sequence (`bytes_rank`, from 0 for the most weighted), then one byte each: place in the levels of weight, of
    loss, of utility in the step (absent without utilities), of entropy (for followed traces), and flags.

    Args:
        chosen: sequences with their steps.
        utilities_of_step: of all tokens of a step, or None without utilities.
    """
    assert run.texts is not None
    sequences = [sequence for _, sequence in chosen]
    names: dict[str, int] = {}
    texts, flags = zip(*(_text_of(sequence, run.texts, names) for sequence in sequences), strict=True)
    weights = np.concatenate([sequence.relative_weights for sequence in sequences])
    losses = np.concatenate([sequence.losses for sequence in sequences])
    levels: dict[str, Any] = {"weight": weight_levels(weights), "loss": loss_levels(losses)}
    codes = [nearest(levels["weight"], weights), nearest(levels["loss"], losses)]
    with_utilities = {step: found for step, found in utilities_of_step.items() if found is not None}
    if len(with_utilities) == len(utilities_of_step):
        # Utilities of one step can be a hundred times those of another, so each record has levels of its own.
        levels |= {"utility": {step: utility_levels(utilities) for step, utilities in with_utilities.items()}}
        levels |= {"utilityAxis": utility_levels(np.concatenate(list(with_utilities.values())))}
        utility_codes = []
        for step, sequence in chosen:
            assert sequence.utilities is not None  # as all tokens of the step have them
            utility_codes.append(nearest(levels["utility"][step], sequence.utilities))
        codes.append(np.concatenate(utility_codes))
    entropies = [sequence.entropies for sequence in sequences if isinstance(sequence, TraceTokens)]
    if entropies:
        levels |= {"entropy": loss_levels(np.concatenate(entropies))}
        codes.append(nearest(levels["entropy"], np.concatenate(entropies)))
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
        "levels": {name: rounded(values) for name, values in levels.items()},
    }
    packed = gzip.compress(b"".join(array.tobytes() for array in arrays), compresslevel=6, mtime=0)
    return description, base64.b64encode(packed).decode()


def utilities_of(record: TokenRecord) -> np.ndarray | None:
    """Utilities of all tokens of a record; None for methods without."""
    return _together([sequence.utilities for sequence in record.sequences])


def _together(of_sequences: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """fp64; None where a sequence has none."""
    found = [utilities for utilities in of_sequences if utilities is not None]
    return np.concatenate(found).astype(np.float64) if len(found) == len(of_sequences) else None


def _within(record: TokenRecord, most_tokens: int, num_records: int) -> list[SequenceTokens]:
    """The first sequences of a record that fit into its part of `most_tokens`, at least one."""
    ends = np.cumsum([len(sequence) for sequence in record.sequences])
    return list(record.sequences[: max(1, int(np.searchsorted(ends, most_tokens // num_records, side="right")))])


def _text_of(sequence: RecordedTokens, texts: TokenTexts, names: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
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


def part_of_run(most_tokens: int, runs: Sequence[ReportedRun]) -> int:
    """How many of a page's tokens each run that has some gets."""
    return most_tokens // max(1, sum(run.texts is not None for run in runs))
