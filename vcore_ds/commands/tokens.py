"""Tokens that gained and lost weight: recorded tokens, aggregated by token, phrase, kind, position and source.

`U` is a token's share of the uniform loss of its batch, `W` its share of the weighted loss, both scaled so that the `U`
of a record sum to 1; docs/reading-a-report.md defines the columns by them.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vcore_ds.common.errors import UserError
from vcore_ds.data.answers import find_answer_spans
from vcore_ds.training.token_records import MOST_PROMPT_TOKENS, SequenceTokens, TokenRecord

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KINDS = ("word", "digit", "operator", "punctuation", "LaTeX command", "white space", "special", "other")
"""Each token has one of these kinds, from `_classify` and `TokenTexts.read`."""
BROKEN = "\ufffd"  # decoded text of a token that holds only part of a character

MOST_TOKENS_OF_CHARACTER = 8
"""A character has at most 4 bytes, but a multi-part emoji may share tokens with its neighbours."""

_OPERATORS = frozenset("+-*/=<>^_|&~%·×÷±")
_LATEX = re.compile(r"\\(?:[A-Za-z]+|[^A-Za-z\s])")
_ANSWERS = re.compile(r"\n(assistant|model)\Z")
_WORD = re.compile(r"\S+")
_SENTENCE_ENDS = ".!?:;"
_EDGES = ".,;:!?()[]\"'“”‘’*"  # punctuation that is stripped from the ends of words


class TokenSequence(Protocol):
    """Tokens of a sequence, whole or its supervised ones: `SequenceTokens` of a run, a trace of a scoring."""

    @property
    def token_ids(self) -> np.ndarray: ...

    @property
    def positions(self) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class SequenceTexts:
    """The text of one sequence's tokens. Arrays of tokens are in the sequence's order."""

    kinds: np.ndarray  # int8 [n_i], index in `KINDS`
    in_answer: np.ndarray  # bool [n_i], tokens inside `\boxed{...}`
    words: list[str]  # words, separated by white space, without punctuation at their ends
    begins_sentence: list[bool]  # of each word; a line break also ends a sentence
    word_of_token: np.ndarray
    """int64 [n_i], index in `words` of the word with the token's first visible character; -1 for none"""


class TokenTexts:
    """The texts of recorded tokens, from a tokenizer."""

    def __init__(self, tokenizer: "Tokenizer", sequences: Sequence[TokenSequence]) -> None:
        """`tokenizer`: of the library tokenizers, which is imported in a hundredth of the time of transformers. Raises
        UserError if the sequences, at least one, hold tokens that it lacks."""
        ids, size = np.unique(np.concatenate([one.token_ids for one in sequences])).tolist(), tokenizer.get_vocab_size()
        if ids[-1] >= size:
            raise UserError(
                f"found token {ids[-1]} in the records, and a tokenizer with {size:,} tokens; expected the one that "
                "the run was trained with"
            )
        self._tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        # Decode behind a letter: some tokenizers drop the leading space of a text's first token.
        self._before: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
        self._start = len(self._decode(self._before))
        self.texts: dict[int, str] = {i: self._decode_behind([i]) for i in ids}
        """Token id -> text, for the tokens in the sequences."""
        kinds = {i: "special" if i in self._special else _classify(text) for i, text in self.texts.items()}
        self._kinds = {i: KINDS.index(kind) for i, kind in kinds.items()}

    def read(self, sequence: TokenSequence) -> SequenceTexts:
        ids = sequence.token_ids.tolist()
        # Special tokens separate words, and so do gaps: turns of the user, which are not recorded.
        gaps = (np.diff(sequence.positions, prepend=sequence.positions[0] - 1) != 1).tolist()
        pieces = ["\n" if i in self._special else self.texts[i] for i in ids]
        text = "".join("\n" * gap + piece for gap, piece in zip(gaps, pieces, strict=True))
        ends = np.cumsum([gap + len(piece) for gap, piece in zip(gaps, pieces, strict=True)])
        starts = ends - [len(piece) for piece in pieces]
        # Position of each token's first visible character, in tokens that have one.
        visible = starts + [len(piece) - len(piece.lstrip()) for piece in pieces]
        is_visible = visible < ends

        kinds = np.array([self._kinds[i] for i in ids], dtype=np.int8)
        is_command = np.zeros(len(text) + 1, dtype=np.bool_)  # of each character
        for match in _LATEX.finditer(text):
            is_command[match.start() : match.end()] = True
        kinds[is_command[visible] & is_visible] = KINDS.index("LaTeX command")
        in_answer = np.zeros(len(ids), dtype=np.bool_)
        for begin, end in find_answer_spans(text):
            in_answer |= (starts < end) & (ends > begin)

        matches = list(_WORD.finditer(text))
        words = [match.group() for match in matches]
        word = np.searchsorted([match.start() for match in matches], visible, side="right") - 1
        word_of_token = np.where(is_visible, word, -1)
        begins_sentence = [True] * bool(words)
        for before, after in pairwise(matches):
            begins_sentence.append(before.group()[-1] in _SENTENCE_ENDS or "\n" in text[before.end() : after.start()])
        for number in [k for k, word in enumerate(words) if BROKEN in word]:
            words[number] = self._decode([ids[t] for t in np.flatnonzero(word_of_token == number)]).strip()
        words = [word.strip(_EDGES) or word for word in words]
        return SequenceTexts(kinds, in_answer, words, begins_sentence, word_of_token)

    def read_pieces(self, sequence: TokenSequence) -> list[str]:
        """The visible text of each token. If several tokens form one character, the first has it and the others are
        empty."""
        ids = sequence.token_ids.tolist()
        pieces = [self.texts[i] for i in ids]
        for place in range(len(ids)):
            if BROKEN not in pieces[place]:
                continue
            for end in range(place + 2, min(place + MOST_TOKENS_OF_CHARACTER, len(ids)) + 1):
                text = self._decode_behind(ids[place:end])
                if BROKEN not in text:
                    pieces[place:end] = [text, *[""] * (end - place - 1)]
                    break
        return pieces

    def read_prompt(self, sequence: SequenceTokens) -> str:
        """The text before the first supervised token, without special tokens, blank lines and the name of the role that
        answers; empty where it was not recorded."""
        text = self._tokenizer.decode(sequence.prompt_ids.tolist(), skip_special_tokens=True)
        text = _ANSWERS.sub("", re.sub(r"\n\s*\n", "\n", text.strip()))
        return "… " * (len(sequence.prompt_ids) == MOST_PROMPT_TOKENS) + text

    def _decode_behind(self, ids: list[int]) -> str:
        return self._decode([*self._before, *ids])[self._start :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _classify(text: str) -> str:
    """The kind of a token by its characters: a word if it has a letter, else a digit, an operator, punctuation."""
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


KIND, POSITION, SOURCE = "kind of token", "position in the trace", "source of the sequence"
IN_ANSWER = "inside \\boxed{}"
SOURCES = ("training data", "trusted pool")
LONGEST_PHRASE = 4  # maximum words of a phrase; the minimum is 2
UNIFORM_TOLERANCE = 1e-4  # rounding error of a relative weight of 1


@dataclass(frozen=True)
class Row:
    """Statistics of a group of tokens."""

    name: str
    count: int
    relative_weight: float
    share_of_weight: float
    share_of_tokens: float
    utility: float | None  # None for methods without utilities
    loss: float  # nats
    first_third: float | None
    """Relative weight in the first third of the records; None if the third, or the group in it, is empty."""
    last_third: float | None


@dataclass(frozen=True)
class TokenTables:
    """Tables over the records of a run."""

    num_in_third: int  # records in the first and in the last third; 0 for a single record
    min_count: int
    relative_weight: float
    """Relative weight of all tokens: 1 if the weights are a distribution; the mean probability for dft."""
    extremes: dict[str, list[Row]]
    """By title, such as `Tokens that gained most weight`: those that occur often enough, the most extreme first."""
    groups: dict[str, list[Row]]
    """`KIND`, with `IN_ANSWER`, whose tokens are also counted by kind; `POSITION`; `SOURCE`, if there are several."""

    @property
    def is_uniform(self) -> bool:
        """Whether every kind of token and every position has its uniform weight, as in plain SFT."""
        rows = [row for rows in (*self.extremes.values(), *self.groups.values()) for row in rows]
        return all(abs(row.relative_weight - 1.0) <= UNIFORM_TOLERANCE for row in rows)


def make_tables(
    records: Sequence[TokenRecord], texts: TokenTexts, *, top: int = 15, min_count: int | None = None
) -> TokenTables:
    """Make the tables of a run's records, at least one. `top`: maximum length of the lists; `min_count`: minimum
    occurrences in them, None for 1 in 5,000 tokens, at least 5, since the weight of a rarer one depends on single
    occurrences."""
    flat = [(record, sequence) for record in records for sequence in record.sequences]
    read = [texts.read(sequence) for _, sequence in flat]
    num_in_third = max(1, len(records) // 3) if len(records) > 1 else 0
    sums = _sum_terms(records, num_in_third)
    least = max(5, len(sums.third) // 5000) if min_count is None else min_count
    overall = float(sums.totals[1] / sums.totals[0])

    ids, token = np.unique(np.concatenate([sequence.token_ids for _, sequence in flat]), return_inverse=True)
    kinds, in_answer = (np.concatenate([getattr(one, name) for one in read]) for name in ("kinds", "in_answer"))
    deciles = np.concatenate([10 * np.arange(len(sequence)) // len(sequence) for _, sequence in flat])
    is_trusted = np.repeat([record.is_trusted(one) for record, one in flat], [len(one) for _, one in flat])

    def name_token(group: int) -> str:
        text = texts.texts[int(ids[group])]
        return repr(text) + (f" (token {ids[group]})" if BROKEN in text else "")

    answers = sums.rows(in_answer, ("outside", IN_ANSWER).__getitem__)
    sources = sums.rows(is_trusted, SOURCES.__getitem__)
    phrases = _list_phrases(read, sums, least)
    return TokenTables(
        num_in_third=num_in_third,
        min_count=least,
        relative_weight=overall,
        extremes=_find_extremes("Tokens", sums.rows(token, name_token, least), overall, top)
        | _find_extremes("Phrases", phrases, overall, top),
        groups={
            KIND: sums.rows(kinds, KINDS.__getitem__) + [row for row in answers if row.name == IN_ANSWER],
            POSITION: sums.rows(deciles, lambda decile: f"{10 * decile} to {10 * decile + 10}%"),
            **({SOURCE: sources} if len(sources) > 1 else {}),
        },
    )


@dataclass(frozen=True, eq=False)
class _Sums:
    """Tokens, or phrases, with the terms that the tables sum over them."""

    terms: np.ndarray  # fp64 [4, N]: U, W, U times utility (NaN without), U times loss
    third: np.ndarray  # int64 [N], 0 in the first third of the records, 2 in the last, else 1
    totals: np.ndarray  # [4], sums over all recorded tokens

    def rows(self, group: np.ndarray, name_of: Callable[[int], str], least: int = 1) -> list[Row]:
        """A row per group (`group` `[N]`: its number for each token or phrase) with at least `least` members, in
        ascending order; a third of the records needs a third of them."""
        cell = group.astype(np.int64) * 3 + self.third
        size = 3 * (int(group.max(initial=-1)) + 1)
        counts, u, w, us, ul = (np.bincount(cell, term, minlength=size).reshape(-1, 3) for term in (None, *self.terms))

        def relative_weight(g: int, third: int) -> float | None:
            return float(w[g, third] / u[g, third]) if 3 * counts[g, third] >= least and counts[g, third] else None

        return [
            Row(
                name=name_of(g),
                count=int(counts[g].sum()),
                relative_weight=float(w[g].sum() / u[g].sum()),
                share_of_weight=float(w[g].sum() / self.totals[1]),
                share_of_tokens=float(u[g].sum() / self.totals[0]),
                utility=None if np.isnan(us[g].sum()) else float(us[g].sum() / u[g].sum()),
                loss=float(ul[g].sum() / u[g].sum()),
                first_third=relative_weight(g, 0),
                last_third=relative_weight(g, 2),
            )
            for g in np.flatnonzero(counts.sum(1) >= least).tolist()
        ]


def _sum_terms(records: Sequence[TokenRecord], num_in_third: int) -> _Sums:
    """The terms of all recorded tokens."""
    terms, thirds = [], []
    for place, record in enumerate(records):
        columns = []
        for sequence in record.sequences:
            u = np.full(len(sequence), sequence.uniform_share / len(sequence))
            utilities = np.nan if sequence.utilities is None else sequence.utilities
            columns.append(np.stack([u, u * sequence.relative_weights, u * utilities, u * sequence.losses]))
        joined = np.concatenate(columns, axis=1)
        terms.append(joined / joined[0].sum())
        third = 0 if place < num_in_third else 2 if place >= len(records) - num_in_third else 1
        thirds.append(np.full(record.num_tokens, third))
    flat = np.concatenate(terms, axis=1)
    return _Sums(flat, np.concatenate(thirds), flat.sum(1))


def _find_extremes(name: str, rows: Sequence[Row], overall: float, top: int) -> dict[str, list[Row]]:
    by_weight = sorted(rows, key=lambda row: row.relative_weight)
    gained = [row for row in reversed(by_weight) if row.relative_weight > overall * (1 + UNIFORM_TOLERANCE)]
    lost = [row for row in by_weight if row.relative_weight < overall * (1 - UNIFORM_TOLERANCE)]
    return {f"{name} that gained most weight": gained[:top], f"{name} that lost most weight": lost[:top]}


def _list_phrases(read: Sequence[SequenceTexts], sums: _Sums, least: int) -> list[Row]:
    """Phrases of 2 to `LONGEST_PHRASE` words within a sentence that occur at least `least` times, except those that
    occur only within one longer phrase."""
    word_of_token = np.concatenate([one.word_of_token for one in read])
    inside = word_of_token >= 0
    starts = np.cumsum([0, *(len(one.words) for one in read)])[:-1]  # number of the first word of each sequence
    word_of_token += np.repeat(starts, [len(one.kinds) for one in read])
    # Words that have tokens: one within another's token has none.
    places, first_token, place = np.unique(word_of_token[inside], return_index=True, return_inverse=True)
    values = np.array([np.bincount(place, term, minlength=len(places)) for term in sums.terms[:, inside]])
    third = sums.third[inside][first_token]
    sentence = np.cumsum([begins for one in read for begins in one.begins_sentence])[places]
    number_of: dict[str, int] = {}
    numbers = [number_of.setdefault(word, len(number_of)) for one in read for word in one.words]
    word, names = np.array(numbers, dtype=np.int64)[places], list(number_of)

    # For each length: phrase code at each place (-1 across sentences), summed values, an example place and the count
    # of each code.
    by_length: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    code, summed = word, values
    for n in range(2, LONGEST_PHRASE + 1):
        num_places = max(0, len(word) - n + 1)
        within = sentence[:num_places] == sentence[n - 1 :][:num_places]
        summed = summed[:, :num_places] + values[:, n - 1 :][:, :num_places]
        keys = code[:num_places] * len(names) + word[n - 1 :][:num_places]
        code = np.full(num_places, -1, dtype=np.int64)
        _, example, code[within], counts = np.unique(
            keys[within], return_index=True, return_inverse=True, return_counts=True
        )
        by_length.append((code, summed, np.flatnonzero(within)[example], counts))

    rows = []
    for n, (code, summed, example, counts) in enumerate(by_length, start=2):
        is_listed = counts >= least
        if n < LONGEST_PHRASE:
            _, _, longer_example, longer_counts = by_length[n - 1]
            for shift in (0, 1):
                shorter = code[longer_example + shift]
                is_listed[shorter[counts[shorter] == longer_counts]] = False
        chosen = np.flatnonzero(np.append(is_listed, False)[code])  # a code of -1 is the appended one

        def name_phrase(g: int, n: int = n, example: np.ndarray = example) -> str:
            return " ".join(names[i] for i in word[example[g] : example[g] + n])

        rows += _Sums(summed[:, chosen], third[chosen], sums.totals).rows(code[chosen], name_phrase, least)
    return rows
