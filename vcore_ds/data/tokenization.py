"""Tokenization of conversations; the tokens that the assistant generates are marked as supervised."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.data.answers import find_answer_spans
from vcore_ds.data.conversations import RenderedConversation
from vcore_ds.data.hub import check_on_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""A folder with a tokenizer has a file that matches one of these."""


@dataclass(frozen=True, eq=False)
class TokenizedSequence:
    """One conversation as tokens."""

    sequence_id: int  # row of the conversation in its file, from 0
    input_ids: np.ndarray  # int32 [n]
    supervised: np.ndarray
    """bool [n]; supervised[t]: token t is a target, predicted from the tokens before it. supervised[0] is False."""
    in_answer: np.ndarray | None = None
    """bool [n], supervised tokens inside `\\boxed{...}`; None if not computed"""
    kept: np.ndarray | None = None
    """bool [n], the supervised tokens that carry loss; None for all of them (see `keep_random_tokens`)"""
    reference_log_probability: float | None = None
    """nats, summed over the supervised tokens, under the reference model (see `add_reference`)"""
    loss_weights: np.ndarray | None = None
    """float16 [n], factor of each token's loss, 1 on average; None if not stored (see `TokenWeights`)"""

    def __len__(self) -> int:
        return len(self.input_ids)


def load_tokenizer(path: str, key: str = "model.path") -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a folder or hub id; `key` names it in messages. Raises UserError if none can be
    loaded."""
    folder, failed = Path(path), f"{key}: {path}: no tokenizer can be loaded from there"
    if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        # For some of these folders transformers makes an empty tokenizer of the model's type.
        raise UserError(
            f"{failed}: found no tokenizer.json in this folder; copy tokenizer.json, tokenizer_config.json and "
            "chat_template.jinja into it from the model that these weights were trained from"
        )
    check_on_hub(path, "model", f"{key}: ")
    from transformers import AutoTokenizer  # takes seconds, and processes that only read data do not need it

    try:
        # Without trust_remote_code transformers asks at the terminal whether to run the tokenizer's code.
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the Rust library raises this class
        where = "" if folder.is_dir() else f" A folder of this name was not found either (looked from {Path.cwd()})"
        raise UserError(f"{failed}: {first_line(error)}{where}") from None


def tokenize_rendered(
    rendered: Sequence[RenderedConversation], tokenizer: "PreTrainedTokenizerBase"
) -> list[TokenizedSequence]:
    """Tokenize without a cutoff, and set `in_answer`; ids are places in `rendered`. A turn is supervised from the end
    of the generation prompt (`render_prompt`) up to and including the end-of-turn token, with its thinking, and the
    marker `<think>` unless the prompt ends in it. A sequence may have no supervised token."""
    # The template has written the special tokens.
    encoded = tokenizer(
        [item.text for item in rendered],
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    sequences = []
    for i, (item, ids, pairs) in enumerate(zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True)):
        offsets = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        supervised = _mark_within(item.spans, offsets)
        supervised[:1] = False
        in_answer = supervised & _mark_touching(find_answer_spans(item.text), offsets)
        sequences.append(TokenizedSequence(i, np.array(ids, dtype=np.int32), supervised, in_answer))
    return sequences


def _mark_within(spans: Sequence[tuple[int, int]], offsets: np.ndarray) -> np.ndarray:
    """Mark tokens whose character `offsets` [n, 2] are within one of the `spans`, bool [n]. A token that crosses a
    border is not marked: the model cannot generate it after the prompt. Some tokenizers give white space empty offsets;
    such tokens are marked between tokens of the span."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    supervised = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in spans:
        within = np.flatnonzero((starts >= start) & (ends <= end) & (starts < ends))
        if len(within):
            supervised[within[0] : within[-1] + 1] = True
    return supervised


def _mark_touching(spans: Sequence[tuple[int, int]], offsets: np.ndarray) -> np.ndarray:
    """Mark tokens whose character `offsets` [n, 2] overlap one of the `spans`, bool [n]."""
    touching = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in spans:
        touching |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return touching


class TokenizedSequences:
    """Base class of data sets, whose sequences are read when they are indexed by a position from 0."""

    lengths: np.ndarray
    """int32 [n], tokens of each sequence, without reading any."""
    sequence_ids: np.ndarray
    """int64 [n], the position of each sequence among all rows read, from 0."""

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def __getitem__(self, i: int) -> TokenizedSequence:
        """Read a sequence."""

    def __iter__(self) -> Iterator[TokenizedSequence]:
        return (self[i] for i in range(len(self)))
