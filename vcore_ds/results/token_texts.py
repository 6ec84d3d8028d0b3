"""What recorded tokens say: the text, kind and word of each. numpy only, with any tokenizer that is handed in."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vcore_ds.errors import UserError
from vcore_ds.grading.answers import answer_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("word", "digit", "operator", "punctuation", "LaTeX command", "white space", "special", "other")
"""Every token is of one of them; `_kind_of` and `TokenTexts.of` say which."""
BROKEN = "\ufffd"
"""How a token decodes that holds a part of a character only."""

MOST_TOKENS_OF_CHARACTER = 8
"""A character has at most 4 bytes, and an emoji of several parts may share tokens with its neighbours."""

_OPERATORS = frozenset("+-*/=<>^_|&~%·×÷±")
_LATEX = re.compile(r"\\(?:[A-Za-z]+|[^A-Za-z\s])")
_WORD = re.compile(r"\S+")
_BREAK = re.compile("\n")
_SENTENCE_ENDS = ".!?:;"
_EDGES = ".,;:!?()[]\"'“”‘’*"
"""Punctuation that is no part of a word that it stands beside."""


class RecordedTokens(Protocol):
    """The tokens of one sequence in a file of a run."""

    @property
    def token_ids(self) -> np.ndarray: ...

    @property
    def positions(self) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class SequenceTexts:
    """The tokens of one sequence, read as text. Arrays of tokens are in their order."""

    kinds: np.ndarray
    """int8 [n_i], index in `KINDS`"""
    in_answer: np.ndarray
    """bool [n_i], tokens inside `\\boxed{...}`"""
    words: list[str]
    """What stands between white space, without the punctuation at its ends."""
    word_of_token: np.ndarray
    """int64 [n_i], index in `words` of the word in which a token's first visible character stands; -1 for none"""
    sentences: np.ndarray
    """int64 [len(words)], number of the sentence that a word stands in, ascending; a line break ends one too"""


class TokenTexts:
    """Reads sequences with a tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", sequences: Sequence[RecordedTokens]) -> None:
        """Raises UserError where the sequences, at least one, hold tokens that the tokenizer does not have."""
        ids = np.unique(np.concatenate([sequence.token_ids for sequence in sequences])).tolist()
        if ids[-1] >= len(tokenizer):
            raise UserError(
                f"found token {ids[-1]} in the records, and a tokenizer of {len(tokenizer):,} tokens; expected the one "
                "that the run was trained with"
            )
        self._tokenizer = tokenizer
        # Behind a letter: some tokenizers decode the first token of a text without the space that it begins with.
        before = tokenizer.encode("a", add_special_tokens=False)
        start = len(self._decode(before))
        self._before, self._start = before, start
        self.texts: dict[int, str] = {i: self._decode([*before, i])[start:] for i in ids}
        """Text of each token in the sequences."""
        special = set(tokenizer.all_special_ids)
        self._special = special
        self._kinds = {i: KINDS.index("special" if i in special else _kind_of(text)) for i, text in self.texts.items()}

    def of(self, sequence: RecordedTokens) -> SequenceTexts:
        """Reads one sequence."""
        ids = sequence.token_ids.tolist()
        # A special token, and a turn of somebody else, separates words.
        follows = np.diff(sequence.positions, prepend=sequence.positions[0] - 1) == 1
        pieces = ["\n" if i in self._special else self.texts[i] for i in ids]
        gaps = [0 if here else 1 for here in follows.tolist()]
        text = "".join("\n" * gap + piece for gap, piece in zip(gaps, pieces, strict=True))
        ends = np.cumsum([gap + len(piece) for gap, piece in zip(gaps, pieces, strict=True)])
        starts = ends - [len(piece) for piece in pieces]
        # Where a token's first visible character stands.
        visible = starts + [len(piece) - len(piece.lstrip()) for piece in pieces]

        kinds = np.array([self._kinds[i] for i in ids], dtype=np.int8)
        commands = _within(visible, [match.span() for match in _LATEX.finditer(text)])
        kinds[commands & (visible < ends)] = KINDS.index("LaTeX command")
        in_answer = np.zeros(len(ids), dtype=np.bool_)
        for begin, end in answer_spans(text):
            in_answer |= (starts < end) & (ends > begin)

        spans = [match.span() for match in _WORD.finditer(text)]
        word_starts = np.array([begin for begin, _ in spans], dtype=np.int64)
        word_of_token = np.where(visible < ends, np.searchsorted(word_starts, visible, side="right") - 1, -1)
        breaks = [match.start() for match in _BREAK.finditer(text)]
        words = [text[begin:end] for begin, end in spans]
        ends_sentence = [0, *(word[-1] in _SENTENCE_ENDS for word in words)][: len(words)]
        sentences = np.searchsorted(breaks, word_starts) + np.cumsum(ends_sentence, dtype=np.int64)
        for number in [k for k, word in enumerate(words) if BROKEN in word]:
            own = np.flatnonzero(word_of_token == number)
            words[number] = self._decode([ids[t] for t in own]).strip()
        words = [word.strip(_EDGES) or word for word in words]
        return SequenceTexts(kinds, in_answer, words, word_of_token, sentences)

    def pieces_of(self, sequence: RecordedTokens) -> list[str]:
        """The text of each token, as a reader sees it: the first of several tokens that make up one character has the
        character, and the others are empty."""
        ids = sequence.token_ids.tolist()
        pieces = [self.texts[i] for i in ids]
        place = 0
        while place < len(ids):
            end = place + 1
            if BROKEN in pieces[place]:
                for longer in range(place + 2, min(place + MOST_TOKENS_OF_CHARACTER, len(ids)) + 1):
                    text = self._decode([*self._before, *ids[place:longer]])[self._start :]
                    if BROKEN not in text:
                        end = longer
                        pieces[place:end] = [text, *[""] * (end - place - 1)]
                        break
            place = end
        return pieces

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # as the ids are of one text
        return text


def _kind_of(text: str) -> str:
    """By the characters of the token alone, the first that fits: a letter makes it a word, then a digit, an operator,
    punctuation."""
    if not text.strip():
        return "white space"
    categories = {unicodedata.category(character) for character in text.strip()}
    if any(category[0] in "LM" for category in categories):
        return "word"
    if any(category[0] == "N" for category in categories):
        return "digit"
    if "Sm" in categories or not _OPERATORS.isdisjoint(text):
        return "operator"
    return "punctuation" if any(category[0] in "PS" and BROKEN not in text for category in categories) else "other"


def _within(places: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """bool, which of the places stand in one of the spans, which follow each other."""
    if not spans:
        return np.zeros(len(places), dtype=np.bool_)
    begins, ends = np.array(spans).T
    number = np.searchsorted(begins, places, side="right") - 1
    return (number >= 0) & (places < ends[number])
