"""Conversations to tokens, with the tokens that the assistant would have had to generate marked as targets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from vcore_ds.data.answers import answer_spans
from vcore_ds.data.conversations import Conversation
from vcore_ds.data.rendering import RenderedConversation, check_tokenizer, render_conversation
from vcore_ds.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Conversations tokenized in one call: enough for the tokenizer's threads, while all offsets at once take gigabytes.
_CHUNK = 256


@dataclass(frozen=True, eq=False)
class TokenizedSequence:
    """One conversation as tokens."""

    sequence_id: int
    """Row of the conversation in its file, from 0."""
    input_ids: np.ndarray
    """int32 [n]"""
    supervised: np.ndarray
    """bool [n]; supervised[t]: token t is a target, predicted from the tokens before it. Token 0 never is."""
    in_answer: np.ndarray | None = None
    """bool [n], supervised tokens inside `\\boxed{...}`; None where `mark_answers` was not asked for"""
    kept: np.ndarray | None = None
    """bool [n], the supervised tokens that carry loss; None for all of them (see `keep_random_tokens`)"""
    reference_log_probability: float | None = None
    """nats, of the supervised tokens together under the reference model (see `with_reference`)"""

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class TokenizationReport:
    """What became of the conversations. Tokens are counted over the sequences that are kept."""

    cutoff_length: int
    """tokens per sequence"""
    num_read: int
    """conversations"""
    num_dropped_overlong: int
    """conversations left out because they have more than `cutoff_length` tokens"""
    num_truncated: int
    """kept sequences that lost their tokens after the first `cutoff_length`"""
    num_without_supervision: int
    """conversations left out because none of their tokens (after truncation) is a target"""
    num_unsupervised_turns: int
    """turns of the assistant that are context only: the chat template renders them differently once others follow"""
    num_tokens: int
    num_supervised_tokens: int
    min_length: int
    """tokens of the shortest sequence"""
    median_length: int
    max_length: int

    @property
    def num_kept(self) -> int:
        """sequences"""
        return self.num_read - self.num_dropped_overlong - self.num_without_supervision

    def describe(self) -> str:
        """A line on what is kept, and one for each thing that a user should know about."""
        lines = [f"{self.num_kept:,} of {self.num_read:,} conversations kept"]
        if self.num_kept:
            lines[0] += (
                f": {self.num_tokens:,} tokens, {self.num_supervised_tokens:,} of them supervised; "
                f"{self.min_length:,} to {self.max_length:,} tokens a sequence, median {self.median_length:,}"
            )
        if self.num_dropped_overlong:
            lines.append(f"{self.num_dropped_overlong:,} dropped: longer than {self.cutoff_length:,} tokens")
        if self.num_truncated:
            lines.append(f"{self.num_truncated:,} truncated to their first {self.cutoff_length:,} tokens")
        if self.num_without_supervision:
            lines.append(f"{self.num_without_supervision:,} dropped: no supervised token")
        if self.num_unsupervised_turns:
            lines.append(
                f"{self.num_unsupervised_turns:,} assistant turns not supervised: the chat template renders them "
                "differently from what the model would have generated"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Dataset:
    """The sequences of one file."""

    sequences: list[TokenizedSequence]
    report: TokenizationReport


def tokenize_conversations(
    conversations: Sequence[Conversation],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    cutoff_length: int,
    overlong: Literal["drop", "truncate"],
    mark_answers: bool = False,
) -> Dataset:
    """Render each conversation with the tokenizer's chat template and mark the tokens of its assistant turns.

    A turn is supervised from the end of the generation prompt (`render_prompt`) up to and including the end-of-turn
    token: its thinking too, with the marker `<think>` unless the generation prompt already ends in it.
    A sequence of more than `cutoff_length` tokens is dropped or truncated to its first `cutoff_length` tokens.
    `mark_answers` also finds the tokens inside `\\boxed{...}`.

    Raises `UserError` for a tokenizer without chat template or without character offsets, for a conversation
    that the template refuses, and if no sequence is left.
    """
    check_tokenizer(tokenizer)
    sequences: list[TokenizedSequence] = []
    num_dropped_overlong = num_truncated = num_without_supervision = num_unsupervised_turns = 0
    for sequence, num_turns_without_span in _tokenize(conversations, tokenizer):
        num_unsupervised_turns += num_turns_without_span
        is_overlong = len(sequence) > cutoff_length
        if is_overlong and overlong == "drop":
            num_dropped_overlong += 1
            continue
        # Copies, or each kept head would hold on to its whole sequence.
        input_ids, supervised = sequence.input_ids[:cutoff_length].copy(), sequence.supervised[:cutoff_length].copy()
        if not supervised.any():
            num_without_supervision += 1
            continue
        num_truncated += is_overlong
        assert sequence.in_answer is not None
        in_answer = sequence.in_answer[:cutoff_length].copy() if mark_answers else None
        sequences.append(TokenizedSequence(sequence.sequence_id, input_ids, supervised, in_answer))

    lengths = sorted(len(sequence) for sequence in sequences) or [0]
    report = TokenizationReport(
        cutoff_length=cutoff_length,
        num_read=len(conversations),
        num_dropped_overlong=num_dropped_overlong,
        num_truncated=num_truncated,
        num_without_supervision=num_without_supervision,
        num_unsupervised_turns=num_unsupervised_turns,
        num_tokens=sum(lengths),
        num_supervised_tokens=sum(int(sequence.supervised.sum()) for sequence in sequences),
        min_length=lengths[0],
        median_length=lengths[len(lengths) // 2],
        max_length=lengths[-1],
    )
    if not sequences:
        source = conversations[0].path if conversations else "no file"
        raise UserError(f"No sequence is left to learn from ({source}).\n{report.describe()}")
    return Dataset(sequences, report)


def tokenize_rendered(
    rendered: Sequence[RenderedConversation], tokenizer: "PreTrainedTokenizerBase"
) -> list[TokenizedSequence]:
    """Whole sequences, with `in_answer`; ids are rows from 0. A sequence may be without supervision."""
    # The template writes the special tokens itself.
    encoded = tokenizer(
        [item.text for item in rendered],
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    sequences = []
    for item, ids, pairs in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        offsets = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        supervised = _tokens_within([span for span in item.spans if span is not None], offsets)
        supervised[:1] = False
        in_answer = supervised & _tokens_touching(answer_spans(item.text), offsets)
        sequences.append(
            TokenizedSequence(item.conversation.row - 1, np.array(ids, dtype=np.int32), supervised, in_answer)
        )
    return sequences


def _tokenize(
    conversations: Sequence[Conversation], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[tuple[TokenizedSequence, int]]:
    """Whole sequences, each with the number of assistant turns that have no span."""
    for start in range(0, len(conversations), _CHUNK):
        chunk = conversations[start : start + _CHUNK]
        rendered = [render_conversation(conversation, tokenizer) for conversation in chunk]
        for item, sequence in zip(rendered, tokenize_rendered(rendered, tokenizer), strict=True):
            yield sequence, item.spans.count(None)


def _tokens_within(spans: Sequence[tuple[int, int]], offsets: np.ndarray) -> np.ndarray:
    """bool [n]: which of the tokens with character `offsets` [n, 2] lie within one of the `spans`.

    Tokens across the border of a span do not: the model never generates them after the prompt. Some tokenizers give
    white space empty offsets; such tokens count where they stand between tokens of the span.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    supervised = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in spans:
        within = np.flatnonzero((starts >= start) & (ends <= end) & (starts < ends))
        if len(within):
            supervised[within[0] : within[-1] + 1] = True
    return supervised


def _tokens_touching(spans: Sequence[tuple[int, int]], offsets: np.ndarray) -> np.ndarray:
    """bool [n]: which of the tokens with character `offsets` [n, 2] share a character with one of the `spans`."""
    touching = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in spans:
        touching |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return touching
