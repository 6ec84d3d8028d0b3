"""Encode recorded tokens for a page: one byte per measure and token, compressed; each distinct text once."""

import base64
import gzip
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vcore_ds.commands.report.read import ReportedRun
from vcore_ds.commands.report.tokens import KINDS, SOURCES, UNIFORM_TOLERANCE, TokenTexts, are_uniform
from vcore_ds.training.token_records import SequenceTokens, TokenRecord


def weight_levels(weights: np.ndarray) -> np.ndarray:
    """256 relative weights, ascending: 0, then logarithmically spaced on either side of 1, the 129th."""
    positive = weights[weights > 0]
    low = max(2.0**-14, min(1 / 1.001, positive.min(initial=1.0)))
    high = max(1.001, weights.max(initial=1.0))
    return np.concatenate([[0.0], np.geomspace(low, 1.0, 128)[:-1], np.geomspace(1.0, high, 128)])


def loss_levels(losses: np.ndarray) -> np.ndarray:
    """256 losses, ascending from 0, more densely spaced near 0."""
    return max(1e-3, float(losses.max(initial=0.0))) * np.linspace(0.0, 1.0, 256) ** 2


def utility_levels(utilities: np.ndarray) -> np.ndarray:
    """256 utilities, ascending, more densely spaced near 0, the 129th. `utilities`: utilities of supervised tokens
    only; zeros of other tokens would make the scale too fine near 0."""
    sizes = np.abs(utilities[utilities != 0])
    # Levels are evenly spaced in asinh(utility / unit). A unit far below the largest utility would leave few levels
    # for large ones: with at least 1e-4 of it, neighbours differ by 8% at most.
    unit = max(float(np.median(sizes)), 1e-4 * float(sizes.max()), 1e-30) if len(sizes) else 1e-30

    def side(most: float, number: int) -> np.ndarray:
        return unit * np.sinh(np.linspace(0.0, np.arcsinh(max(most / unit, 1e-3)), number))

    negative = -side(float(-utilities.min(initial=0.0)), 129)[:0:-1]
    return np.concatenate([negative, side(float(utilities.max(initial=0.0)), 128)])


def nearest(levels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Index of the level nearest to each value, uint8."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values).astype(np.uint8)


def rounded(levels: Any) -> Any:
    """Levels for JSON, with four digits, finer than their spacing."""
    if isinstance(levels, dict):
        return {step: rounded(values) for step, values in levels.items()}
    return [float(f"{value:.4g}") for value in levels]


def index_type(num_values: int) -> np.dtype:
    """Little-endian type for indices below `num_values`."""
    return np.dtype("<u2" if num_values <= 1 << 16 else "<u4")


def pack_arrays(arrays: Sequence[np.ndarray]) -> str:
    """The bytes of the arrays, one after the other, as gzip in base64."""
    packed = gzip.compress(b"".join(array.tobytes() for array in arrays), compresslevel=6, mtime=0)
    return base64.b64encode(packed).decode()


MOST_TOKENS = 1_600_000
"""Maximum recorded tokens of a page, about 8 MB: 12 records of the size that a run writes. Beyond it, complete
sequences are omitted, with the same number of tokens kept in each record."""
MOST_FOLLOWED_TOKENS = 800_000
"""Maximum tokens of followed traces; beyond it, each is truncated. 16 traces of 4,096 tokens in 12 records fit."""

KIND_BITS = 0b0000_0111
IN_ANSWER, AFTER_GAP = 8, 16
"""Flags of a token, beside its kind: inside `\\boxed{}`; preceded by unsupervised tokens."""


def encode_traces(run: ReportedRun, most_tokens: int) -> tuple[dict[str, Any], str]:
    """Encode a run's recorded tokens, at least one: a description for JSON, and the tokens as `_encode` packs them."""
    chosen = [
        (record, sequence)
        for record in run.records
        for sequence in _select_sequences(record, most_tokens, len(run.records))
    ]
    utilities_of_step = {record.step: join_utilities(record) for record in run.records}
    description, blob = _encode(run, [(record.step, sequence) for record, sequence in chosen], utilities_of_step)
    description |= {
        "isUniform": are_uniform(run.records),
        "numRecorded": sum(record.num_tokens for record in run.records),
        "sequences": [
            prompt
            | {
                "step": record.step,
                "id": sequence.sequence_id - ((record.first_trusted_id or 0) if record.is_trusted(sequence) else 0),
                "source": SOURCES[record.is_trusted(sequence)],
                "tokens": len(sequence),
                "alpha": float(f"{sequence.alpha:.4g}"),
                "share": float(f"{sequence.share / sequence.uniform_share:.4g}"),
            }
            for prompt, (record, sequence) in zip(description.pop("sequences"), chosen, strict=True)
        ],
    }
    return description, blob


def encode_followed(run: ReportedRun, most_tokens: int) -> tuple[dict[str, Any], str] | None:
    """Encode a run's followed traces likewise, with their entropy; None if there are none."""
    followed = [(record.step, trace) for record in run.followed for trace in record.sequences if trace.is_finite]
    if not followed:
        return None
    most = max(1, most_tokens // len(followed))
    chosen = [(step, trace.truncate(most)) for step, trace in followed]
    utilities_of_step = {
        step: _concatenate([trace.utilities for other, trace in chosen if other == step]) for step, _ in chosen
    }
    description, blob = _encode(run, chosen, utilities_of_step)
    weights = np.concatenate([trace.relative_weights for _, trace in chosen])
    description |= {
        "isUniform": bool(np.all(np.abs(weights - 1.0) <= UNIFORM_TOLERANCE)),
        "sequences": [
            prompt
            | {
                "step": step,
                "id": trace.sequence_id,
                "source": trace.source,
                "isHeldOut": trace.is_held_out,
                "tokens": len(trace),
                "wholeTokens": trace.num_supervised_tokens,
            }
            for prompt, (step, trace) in zip(description.pop("sequences"), chosen, strict=True)
        ],
    }
    return description, blob


def _encode(
    run: ReportedRun,
    chosen: Sequence[tuple[int, SequenceTokens]],
    utilities_of_step: Mapping[int, np.ndarray | None],
) -> tuple[dict[str, Any], str]:
    """Texts, prompts and levels for JSON, and the packed tokens of the sequences `chosen` with their steps. The bytes
    are arrays over all tokens, one after the other: index in `texts` (`bytesText` bytes each, little-endian), rank in
    the sequence (`bytesRank`, from 0 for the largest weight), then one byte each: index in the levels of weight, of
    loss, of the step's utilities (absent without utilities), of entropy (followed traces only), and flags."""
    assert run.texts is not None
    sequences = [sequence for _, sequence in chosen]
    names: dict[str, int] = {}
    texts, flags = zip(*(_encode_text(sequence, run.texts, names) for sequence in sequences), strict=True)
    prompts = [run.texts.read_prompt(sequence) for sequence in sequences]
    distinct = list(dict.fromkeys(prompts))
    beginnings = [
        prompt or "".join(run.texts.read_pieces(sequence)[:NAME_CHARACTERS])
        for prompt, sequence in zip(prompts, sequences, strict=True)
    ]
    weights = np.concatenate([sequence.relative_weights for sequence in sequences])
    losses = np.concatenate([sequence.losses for sequence in sequences])
    levels: dict[str, Any] = {"weight": weight_levels(weights), "loss": loss_levels(losses)}
    codes = [nearest(levels["weight"], weights), nearest(levels["loss"], losses)]
    present = {step: utilities for step, utilities in utilities_of_step.items() if utilities is not None}
    if len(present) == len(utilities_of_step):
        # Separate levels for each record: utilities of one step can be a hundred times those of another.
        levels |= {"utility": {step: utility_levels(utilities) for step, utilities in present.items()}}
        levels |= {"utilityAxis": utility_levels(np.concatenate(list(present.values())))}
        utility_codes = []
        for step, sequence in chosen:
            assert sequence.utilities is not None
            utility_codes.append(nearest(levels["utility"][step], sequence.utilities))
        codes.append(np.concatenate(utility_codes))
    entropies = [sequence.entropies for sequence in sequences if sequence.entropies is not None]
    if entropies:
        levels |= {"entropy": loss_levels(np.concatenate(entropies))}
        codes.append(nearest(levels["entropy"], np.concatenate(entropies)))
    text_type, rank_type = index_type(len(names)), index_type(max(map(len, sequences)))
    arrays = [
        np.concatenate(texts).astype(text_type),
        np.concatenate([ranks(sequence.weights) for sequence in sequences]).astype(rank_type),
        *codes,
        np.concatenate(flags),
    ]
    description = {
        "run": run.name,
        "texts": list(names),
        "prompts": distinct,
        "sequences": [
            {"prompt": distinct.index(prompt), "name": name}
            for prompt, name in zip(prompts, name_by_first_words(beginnings), strict=True)
        ],
        "kinds": KINDS,
        "bytesText": text_type.itemsize,
        "bytesRank": rank_type.itemsize,
        "levels": {name: rounded(values) for name, values in levels.items()},
    }
    return description, pack_arrays(arrays)


def join_utilities(record: TokenRecord) -> np.ndarray | None:
    """Utilities of all tokens of a record, fp64; None for methods without utilities."""
    return _concatenate([sequence.utilities for sequence in record.sequences])


def _concatenate(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The arrays as one, fp64; None if one of them is None."""
    present = [array for array in arrays if array is not None]
    return np.concatenate(present).astype(np.float64) if len(present) == len(arrays) else None


def _select_sequences(record: TokenRecord, most_tokens: int, num_records: int) -> list[SequenceTokens]:
    """The first sequences of a record that fit into its share of `most_tokens`, at least one."""
    ends = np.cumsum([len(sequence) for sequence in record.sequences])
    return list(record.sequences[: max(1, int(np.searchsorted(ends, most_tokens // num_records, side="right")))])


def _encode_text(sequence: SequenceTokens, texts: TokenTexts, names: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Index of each token's text in `names`, to which new texts are added, and the flags of each token."""
    read, pieces = texts.read(sequence), texts.read_pieces(sequence)
    places = np.array([names.setdefault(piece, len(names)) for piece in pieces], dtype=np.int64)
    flags = read.kinds.astype(np.uint8) & KIND_BITS
    flags |= IN_ANSWER * read.in_answer.astype(np.uint8)
    flags |= AFTER_GAP * (np.diff(sequence.positions, prepend=sequence.positions[0] - 1) != 1).astype(np.uint8)
    return places, flags


NAME_CHARACTERS = 48  # maximum characters of a trace's name


def name_by_first_words(texts: Sequence[str]) -> list[str]:
    """Name each text by its first words, without the beginning that all share, such as a system prompt."""
    shared = os.path.commonprefix(list(texts)) if len(set(texts)) > 1 else ""  # noqa: RUF071  (of strings, not paths)
    start = shared.rfind("\n") + 1
    if len(shared) - start > NAME_CHARACTERS // 2:
        start = max(shared.rfind(" "), shared.rfind("\n")) + 1
    names = []
    for text in texts:
        role, _, rest = text.partition("\n")
        words = text[start:] if start or " " in role or not rest else rest
        names.append(textwrap.shorten(words, NAME_CHARACTERS, placeholder=" …"))
    return names


def ranks(weights: np.ndarray) -> np.ndarray:
    """Rank of each weight, from 0 for the largest; ties in their order."""
    rank = np.empty(len(weights), dtype=np.int64)
    rank[np.argsort(-weights, kind="stable")] = np.arange(len(weights))
    return rank


def tokens_per_run(most_tokens: int, runs: Sequence[ReportedRun]) -> int:
    """Share of a page's `most_tokens` for each run with recorded tokens."""
    return most_tokens // max(1, sum(run.texts is not None for run in runs))
