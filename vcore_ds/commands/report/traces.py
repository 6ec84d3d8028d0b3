"""Encode traces for a page: one byte per measure and token, compressed; each distinct text once."""

import base64
import gzip
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vcore_ds.commands.report.read import ReportedRun
from vcore_ds.commands.report.tokens import KINDS, SOURCES, UNIFORM_TOLERANCE, TokenSequence, TokenTexts
from vcore_ds.common.statistics import rank_correlation
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


def ranks(values: np.ndarray) -> np.ndarray:
    """Rank of each value, from 0 for the largest; ties in their order."""
    rank = np.empty(len(values), dtype=np.int64)
    rank[np.argsort(-values, kind="stable")] = np.arange(len(values))
    return rank


MOST_TOKENS = 1_600_000
"""Maximum recorded tokens of a page, about 8 MB: 12 records of the size that a run writes. Beyond it, complete
sequences are omitted, with the same number of tokens kept in each record."""
MOST_FOLLOWED_TOKENS = 800_000
"""Maximum tokens of followed traces; beyond it, each is truncated. 16 traces of 4,096 tokens in 12 records fit."""

KIND_BITS = 0b0000_0111
IN_ANSWER, AFTER_GAP, PROMPT = 8, 16, 32
"""Flags of a token, beside its kind: inside `\\boxed{}`; preceded by unsupervised tokens; unsupervised itself."""


@dataclass(frozen=True, eq=False)
class PageTrace:
    """A trace as a page shows it."""

    group: int | str  # optimizer step, or end of a ranking: traces are selected by it
    source: str
    id: int
    title: str
    facts: Sequence[str]  # beside the title
    tokens: TokenSequence
    measures: dict[str, np.ndarray]
    """Keys of `LEVELS`: those that are known. Tokens are ranked by the first, which is also shown first."""
    supervised: np.ndarray  # bool [n]; the others belong to the prompt, and their measures say nothing
    num_tokens: int  # of the full trace
    prompt: str = ""
    note: str = ""


def encode_recorded(run: ReportedRun, most_tokens: int) -> tuple[dict[str, Any], str]:
    """Encode a run's recorded tokens, at least one, up to `most_tokens`, and their rank correlation with losses."""
    assert run.texts is not None
    chosen = []
    for record in run.records:
        for sequence in _select_sequences(record, most_tokens, len(run.records)):
            is_trusted = record.is_trusted(sequence)
            number = sequence.sequence_id - ((record.first_trusted_id or 0) if is_trusted else 0)
            facts = [f"{len(sequence):,} tokens", f"alpha {sequence.alpha:.4g}"]
            if (share := f"{sequence.share / sequence.uniform_share:.4g}") != "1":
                facts.append(f"{share}× the uniform share of the batch")
            chosen.append(_page_trace(run.texts, record.step, SOURCES[is_trusted], number, facts, sequence))
    description, blob = encode_traces(run.name, run.texts, chosen)
    description["numRecorded"] = sum(record.num_tokens for record in run.records)
    return description | {"spearman": correlate_with_losses(run)}, blob


def encode_followed(run: ReportedRun, most_tokens: int) -> tuple[dict[str, Any], str] | None:
    """Encode a run's followed traces, with their entropy; None if there are none. Traces are truncated to equal shares
    of `most_tokens`."""
    assert run.texts is not None
    followed = [(record.step, trace) for record in run.followed for trace in record.sequences if trace.is_finite]
    if not followed:
        return None
    chosen = []
    for step, whole in followed:
        trace, total = whole.truncate(max(1, most_tokens // len(followed))), whole.num_supervised_tokens or len(whole)
        shown = f"all of {total:,}" if len(trace) == total else f"the first {len(trace):,} of {total:,}"
        note = f"{'Held out, not trained on' if trace.is_held_out else 'Training data'}: {shown} tokens"
        facts = [f"{len(trace):,} tokens"]
        chosen.append(_page_trace(run.texts, step, trace.source, trace.sequence_id, facts, trace, note))
    return encode_traces(run.name, run.texts, chosen)


def _page_trace(
    texts: TokenTexts, step: int, source: str, number: int, facts: Sequence[str], tokens: SequenceTokens, note: str = ""
) -> PageTrace:
    known: dict[str, np.ndarray | None] = {"weight": tokens.relative_weights, "loss": tokens.losses}
    known |= {"utility": tokens.utilities, "entropy": tokens.entropies}
    measures = {name: values for name, values in known.items() if values is not None}
    title, prompt = f"Step {step}, {source} {number}", texts.read_prompt(tokens)
    supervised, num_tokens = np.ones(len(tokens), dtype=np.bool_), tokens.num_supervised_tokens or len(tokens)
    return PageTrace(step, source, number, title, facts, tokens, measures, supervised, num_tokens, prompt, note)


LEVELS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "weight": weight_levels,
    "loss": loss_levels,
    "utility": utility_levels,
    "entropy": loss_levels,
}


def encode_traces(
    name: str, texts: TokenTexts, traces: Sequence[PageTrace], *, has_one_scale: bool = False
) -> tuple[dict[str, Any], str]:
    """Encode traces, at least one, all with the same measures: a description for JSON, and the tokens as gzip in
    base64. The bytes are arrays over all tokens, one after the other: index in `texts` and rank in the trace (4 bytes
    each, little-endian), then one byte each: index in the levels of each of `measures`, and flags. `has_one_scale`:
    whether utilities have the same levels in all groups; those of one step can be a hundred times another's."""
    number_of: dict[str, int] = {}
    pieces = [texts.read_pieces(trace.tokens) for trace in traces]
    places = np.array([number_of.setdefault(piece, len(number_of)) for trace in pieces for piece in trace])
    prompts = list(dict.fromkeys(trace.prompt for trace in traces))
    beginnings = [trace.prompt or "".join(parts[:NAME_CHARACTERS]) for trace, parts in zip(traces, pieces, strict=True)]
    groups = list(dict.fromkeys(trace.group for trace in traces))
    first, *_ = measures = [name for name in traces[0].measures if all(name in trace.measures for trace in traces)]
    levels: dict[str, Any] = {}
    codes = []
    for measure in measures:
        values = [trace.measures[measure] for trace in traces]
        is_shared = has_one_scale or measure != "utility"
        members = [[trace for trace in traces if is_shared or trace.group == group] for group in groups]
        own = {group: LEVELS[measure](_join(measure, some)) for group, some in zip(groups, members, strict=True)}
        codes += [nearest(own[trace.group], part) for trace, part in zip(traces, values, strict=True)]
        by_group = {group: _rounded(numbers) for group, numbers in own.items()}
        levels[measure] = by_group if measure == "utility" else by_group[groups[0]]
    description = {
        "run": name,
        "measures": measures,
        "groups": [[group, str(group)] for group in groups],
        "isUniform": first == "weight" and bool(np.all(np.abs(_join(first, traces) - 1.0) <= UNIFORM_TOLERANCE)),
        "kinds": KINDS,
        "texts": list(number_of),
        "prompts": prompts,
        "levels": levels,
        "utilityAxis": _rounded(utility_levels(_join("utility", traces))) if "utility" in measures else [],
        "sequences": [
            {
                "group": trace.group,
                "source": trace.source,
                "id": trace.id,
                "name": words,
                "title": trace.title,
                "facts": trace.facts,
                "note": trace.note,
                "prompt": prompts.index(trace.prompt),
                "tokens": len(trace.tokens.token_ids),
                "supervised": int(trace.supervised.sum()),
                "wholeTokens": trace.num_tokens,
            }
            for trace, words in zip(traces, name_by_first_words(beginnings), strict=True)
        ],
    }
    order = [ranks(np.where(trace.supervised, trace.measures[first], -np.inf)) for trace in traces]
    flags = [_find_flags(trace, texts) for trace in traces]
    arrays = [places.astype("<u4"), np.concatenate(order).astype("<u4"), *codes, *flags]
    packed = gzip.compress(b"".join(array.tobytes() for array in arrays), compresslevel=6, mtime=0)
    return description, base64.b64encode(packed).decode()


def _join(measure: str, traces: Sequence[PageTrace]) -> np.ndarray:
    """A measure of the supervised tokens of all traces, fp64."""
    return np.concatenate([trace.measures[measure][trace.supervised] for trace in traces]).astype(np.float64)


def _rounded(levels: np.ndarray) -> list[float]:
    """Levels for JSON, with four digits, finer than their spacing."""
    return [float(f"{value:.4g}") for value in levels]


def _find_flags(trace: PageTrace, texts: TokenTexts) -> np.ndarray:
    read, positions = texts.read(trace.tokens), trace.tokens.positions
    flags = read.kinds.astype(np.uint8) & KIND_BITS
    flags |= IN_ANSWER * read.in_answer.astype(np.uint8)
    flags |= AFTER_GAP * (np.diff(positions, prepend=positions[0] - 1) != 1).astype(np.uint8)
    return flags | PROMPT * (~trace.supervised).astype(np.uint8)


def join_utilities(record: TokenRecord) -> np.ndarray | None:
    """Utilities of all tokens of a record, fp64; None for methods without utilities."""
    present = [sequence.utilities for sequence in record.sequences if sequence.utilities is not None]
    return np.concatenate(present).astype(np.float64) if len(present) == len(record.sequences) else None


def weight_range(runs: Sequence[ReportedRun]) -> float:
    """Range of the colour scale of weights, as a power of 2. It holds 98% of the recorded tokens of all runs together,
    so that a colour means the same in each."""
    weights = [sequence.relative_weights for run in runs for record in run.records for sequence in record.sequences]
    if not weights:
        return 1.0
    positive = np.concatenate(weights)
    powers = np.abs(np.log2(positive[positive > 0]))
    return max(0.02, float(np.quantile(powers, 0.98))) if len(powers) else 1.0


def correlate_with_losses(run: ReportedRun) -> float | None:
    """Rank correlation of utility and loss over the tokens of a record: mean over the records where it is defined."""
    correlations = []
    for record in run.records:
        losses = np.concatenate([sequence.losses for sequence in record.sequences])
        if (utilities := join_utilities(record)) is not None:
            correlations.append(rank_correlation(utilities, losses))
    defined = [correlation for correlation in correlations if correlation is not None]
    return float(np.mean(defined)) if defined else None


def _select_sequences(record: TokenRecord, most_tokens: int, num_records: int) -> list[SequenceTokens]:
    """The first sequences of a record that fit into its share of `most_tokens`, at least one."""
    ends = np.cumsum([len(sequence) for sequence in record.sequences])
    return list(record.sequences[: max(1, int(np.searchsorted(ends, most_tokens // num_records, side="right")))])


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
