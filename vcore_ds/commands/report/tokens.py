"""Tokens that gained and lost weight: recorded tokens, aggregated by token, phrase, kind, position and source.

Means weight tokens as uniform training does. `U` is a token's weight in the uniform loss of its batch (`1 / (|B| n_i)`,
or `1 / N` with `method.normalization: token`), `W` the weight that training gave it (`q[i,t]` times the sequence's
share), both scaled so that the `U` of a record sum to 1. A group of tokens has

- relative weight `sum W / sum U`: 1 is the uniform weight;
- share of weight `sum W`, and share of tokens `sum U`, of all recorded tokens;
- mean utility `sum U s / sum U`, and mean loss `sum U l / sum U`.

All records count the same. Alpha, which scales all tokens of a batch, is left out.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from vcore_ds.common.errors import UserError
from vcore_ds.data.answers import find_answer_spans
from vcore_ds.training.token_records import MOST_PROMPT_TOKENS, SequenceTokens, TokenRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("word", "digit", "operator", "punctuation", "LaTeX command", "white space", "special", "other")
"""Each token has one of these kinds, from `_classify` and `TokenTexts.read`."""
BROKEN = "\ufffd"  # decoded text of a token that holds only part of a character

MOST_TOKENS_OF_CHARACTER = 8
"""A character has at most 4 bytes, but a multi-part emoji may share tokens with its neighbours."""

_OPERATORS = frozenset("+-*/=<>^_|&~%·×÷±")
_LATEX = re.compile(r"\\(?:[A-Za-z]+|[^A-Za-z\s])")
_ANSWERS = re.compile(r"\n(assistant|model)\Z")
_WORD = re.compile(r"\S+")
_BREAK = re.compile("\n")
_SENTENCE_ENDS = ".!?:;"
_EDGES = ".,;:!?()[]\"'“”‘’*"  # punctuation that is stripped from the ends of words


@dataclass(frozen=True, eq=False)
class SequenceTexts:
    """The text of one sequence's tokens. Arrays of tokens are in the sequence's order."""

    kinds: np.ndarray  # int8 [n_i], index in `KINDS`
    in_answer: np.ndarray  # bool [n_i], tokens inside `\boxed{...}`
    words: list[str]  # words, separated by white space, without punctuation at their ends
    word_of_token: np.ndarray
    """int64 [n_i], index in `words` of the word with the token's first visible character; -1 for none"""
    sentences: np.ndarray
    """int64 [len(words)], sentence number of each word, ascending; a line break also ends a sentence"""


class TokenSequence(Protocol):
    """Tokens of a sequence, whole or its supervised ones: `SequenceTokens` of a run, a trace of a scoring."""

    @property
    def token_ids(self) -> np.ndarray: ...

    @property
    def positions(self) -> np.ndarray: ...


class TokenTexts:
    """The texts of recorded tokens, from a tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", sequences: Sequence[TokenSequence]) -> None:
        """Raises UserError if the sequences, at least one, hold tokens that the tokenizer lacks."""
        ids = np.unique(np.concatenate([sequence.token_ids for sequence in sequences])).tolist()
        if ids[-1] >= len(tokenizer):
            raise UserError(
                f"found token {ids[-1]} in the records, and a tokenizer with {len(tokenizer):,} tokens; expected the "
                "one that the run was trained with"
            )
        self._tokenizer = tokenizer
        # Decode behind a letter: some tokenizers drop the leading space of a text's first token.
        before = tokenizer.encode("a", add_special_tokens=False)
        start = len(self._decode(before))
        self._before, self._start = before, start
        self.texts: dict[int, str] = {i: self._decode([*before, i])[start:] for i in ids}
        """Token id -> text, for the tokens in the sequences."""
        special = set(tokenizer.all_special_ids)
        self._special = special
        self._kinds = {i: KINDS.index("special" if i in special else _classify(text)) for i, text in self.texts.items()}

    def read(self, sequence: TokenSequence) -> SequenceTexts:
        ids = sequence.token_ids.tolist()
        # Special tokens separate words, and so do gaps: turns of the user, which are not recorded.
        follows = np.diff(sequence.positions, prepend=sequence.positions[0] - 1) == 1
        pieces = ["\n" if i in self._special else self.texts[i] for i in ids]
        gaps = [0 if here else 1 for here in follows.tolist()]
        text = "".join("\n" * gap + piece for gap, piece in zip(gaps, pieces, strict=True))
        ends = np.cumsum([gap + len(piece) for gap, piece in zip(gaps, pieces, strict=True)])
        starts = ends - [len(piece) for piece in pieces]
        # Position of each token's first visible character.
        visible = starts + [len(piece) - len(piece.lstrip()) for piece in pieces]

        kinds = np.array([self._kinds[i] for i in ids], dtype=np.int8)
        commands = _within(visible, [match.span() for match in _LATEX.finditer(text)])
        kinds[commands & (visible < ends)] = KINDS.index("LaTeX command")
        in_answer = np.zeros(len(ids), dtype=np.bool_)
        for begin, end in find_answer_spans(text):
            in_answer |= (starts < end) & (ends > begin)

        spans = [match.span() for match in _WORD.finditer(text)]
        word_starts = np.array([begin for begin, _ in spans], dtype=np.int64)
        word_of_token = np.where(visible < ends, np.searchsorted(word_starts, visible, side="right") - 1, -1)
        breaks = [match.start() for match in _BREAK.finditer(text)]
        words = [text[begin:end] for begin, end in spans]
        ends_sentence = [0, *(word[-1] in _SENTENCE_ENDS for word in words)][: len(words)]
        sentences = np.searchsorted(breaks, word_starts) + np.cumsum(ends_sentence, dtype=np.int64)
        for number in [k for k, word in enumerate(words) if BROKEN in word]:
            tokens = np.flatnonzero(word_of_token == number)
            words[number] = self._decode([ids[t] for t in tokens]).strip()
        words = [word.strip(_EDGES) or word for word in words]
        return SequenceTexts(kinds, in_answer, words, word_of_token, sentences)

    def read_pieces(self, sequence: TokenSequence) -> list[str]:
        """The visible text of each token. If several tokens form one character, the first has it and the others are
        empty."""
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

    def read_prompt(self, sequence: SequenceTokens) -> str:
        """The text before the first supervised token, without special tokens, blank lines and the name of the role that
        answers; empty where it was not recorded."""
        text = self._tokenizer.decode(sequence.prompt_ids.tolist(), skip_special_tokens=True)
        assert isinstance(text, str)  # decode returns a list for a batch only
        text = _ANSWERS.sub("", re.sub(r"\n\s*\n", "\n", text.strip()))
        return "… " * (len(sequence.prompt_ids) == MOST_PROMPT_TOKENS) + text

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # decode returns a list for a batch only
        return text


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


def _within(places: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Whether each place lies in one of the spans, which are disjoint and ascending, bool."""
    if not spans:
        return np.zeros(len(places), dtype=np.bool_)
    begins, ends = np.array(spans).T
    number = np.searchsorted(begins, places, side="right") - 1
    return (number >= 0) & (places < ends[number])


IN_ANSWER = "inside \\boxed{}"
SOURCES = ("training data", "trusted pool")
LONGEST_PHRASE = 4  # maximum words of a phrase; the minimum is 2
FEWEST = 5  # lower bound of `default_min_count`
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
class Extremes:
    """The most extreme of the groups that occur often enough, in descending order."""

    gained: list[Row]  # relative weight above the mean of all tokens
    lost: list[Row]
    rose: list[Row]  # relative weight increased from the first to the last third of the records
    fell: list[Row]


@dataclass(frozen=True)
class TokenTables:
    """Tables over the records of a run."""

    steps: list[int]
    first_third: list[int]  # steps of the records in the first third; empty for fewer than 2 records
    last_third: list[int]
    num_sequences: int
    num_tokens: int
    min_count: int
    relative_weight: float
    """Relative weight of all tokens: 1 if the weights are a distribution; the mean probability for dft."""
    tokens: Extremes
    phrases: Extremes
    kinds: list[Row]  # each kind that occurs, then `IN_ANSWER`, whose tokens are also counted by kind
    positions: list[Row]  # deciles of the trace
    sources: list[Row]  # empty if all sequences have the same source


def are_uniform(records: Sequence[TokenRecord]) -> bool:
    """Whether all recorded tokens have the uniform weight, up to rounding."""
    return all(
        bool(np.all(np.abs(sequence.relative_weights - 1.0) <= UNIFORM_TOLERANCE))
        for record in records
        for sequence in record.sequences
    )


def default_min_count(num_tokens: int) -> int:
    """1 in 5,000 of the recorded tokens, at least 5: the weight of a rarer token depends on single occurrences."""
    return max(FEWEST, num_tokens // 5000)


def make_tables(
    records: Sequence[TokenRecord], tokenizer: "PreTrainedTokenizerBase", *, top: int = 15, min_count: int | None = None
) -> TokenTables:
    """Make the tables of a run's records, at least one. `top`: maximum length of the lists; `min_count`: minimum
    occurrences in them, None for `default_min_count`. Raises UserError where the tokenizer lacks recorded tokens."""
    flat = [(record, sequence) for record in records for sequence in record.sequences]
    texts = TokenTexts(tokenizer, [sequence for _, sequence in flat])
    read = [texts.read(sequence) for _, sequence in flat]
    sums = _Sums.from_records(records)
    least = default_min_count(len(sums.part)) if min_count is None else min_count
    overall = sums.weight / sums.uniform

    ids, token = np.unique(np.concatenate([sequence.token_ids for _, sequence in flat]), return_inverse=True)
    kinds = np.concatenate([one.kinds for one in read]).astype(np.int64)
    in_answer = np.concatenate([one.in_answer for one in read]).astype(np.int64)
    deciles = np.concatenate([10 * np.arange(len(sequence)) // len(sequence) for _, sequence in flat])
    is_trusted = [[record.is_trusted(sequence)] * len(sequence) for record, sequence in flat]

    def name_of(group: int) -> str:
        text = texts.texts[int(ids[group])]
        return repr(text) + (f" (token {ids[group]})" if BROKEN in text else "")

    answers = sums.rows(in_answer, ("outside", IN_ANSWER).__getitem__)
    sources = sums.rows(np.concatenate(is_trusted).astype(np.int64), SOURCES.__getitem__)
    first, last = _thirds(len(records))
    return TokenTables(
        steps=[record.step for record in records],
        first_third=[records[place].step for place in first],
        last_third=[records[place].step for place in last],
        num_sequences=len(flat),
        num_tokens=len(sums.part),
        min_count=least,
        relative_weight=overall,
        tokens=_extremes(sums.rows(token, name_of, least), overall, top),
        phrases=_extremes(_phrases(read, sums, least), overall, top),
        kinds=sums.rows(kinds, KINDS.__getitem__) + [row for row in answers if row.name == IN_ANSWER],
        positions=sums.rows(deciles, lambda decile: f"{10 * decile} to {10 * decile + 10}%"),
        sources=sources if len(sources) > 1 else [],
    )


@dataclass(frozen=True, eq=False)
class _Sums:
    """Tokens, or phrases, with the terms that the tables sum over them."""

    values: np.ndarray  # fp64 [N, 4]: U, W, U times utility, U times loss
    part: np.ndarray  # int64 [N], 0 in the first third of the records, 2 in the last, else 1
    uniform: float  # sum of U over all recorded tokens
    weight: float  # sum of W over all recorded tokens
    has_utilities: bool

    @classmethod
    def from_records(cls, records: Sequence[TokenRecord]) -> Self:
        first, last = _thirds(len(records))
        values, parts = [], []
        for place, record in enumerate(records):
            columns = []
            for sequence in record.sequences:
                u = np.full(len(sequence), sequence.uniform_share / len(sequence))
                utilities = np.zeros(len(sequence)) if sequence.utilities is None else sequence.utilities
                columns.append(np.stack([u, u * sequence.relative_weights, u * utilities, u * sequence.losses], axis=1))
            columns_of_record = np.concatenate(columns)
            values.append(columns_of_record / columns_of_record[:, 0].sum())
            parts.append(np.full(len(columns_of_record), 0 if place in first else 2 if place in last else 1))
        flat = np.concatenate(values)
        has_utilities = all(sequence.utilities is not None for record in records for sequence in record.sequences)
        uniform, weight = flat[:, :2].sum(0).tolist()
        return cls(flat, np.concatenate(parts), uniform, weight, has_utilities)

    def rows(self, group: np.ndarray, name_of: Callable[[int], str], least: int = 1) -> list[Row]:
        """A row per group (`group` int64 `[N]`: its number for each token or phrase) with at least `least` members, in
        ascending order; a third of the records needs a third of them."""
        counts = np.bincount(group * 3 + self.part, minlength=3 * (group.max(initial=-1) + 1)).reshape(-1, 3)
        u, w, us, ul = (
            np.bincount(group * 3 + self.part, column, minlength=counts.size).reshape(-1, 3) for column in self.values.T
        )

        def third(g: int, part: int) -> float | None:
            return float(w[g, part] / u[g, part]) if 3 * counts[g, part] >= least and counts[g, part] else None

        return [
            Row(
                name=name_of(g),
                count=int(counts[g].sum()),
                relative_weight=float(w[g].sum() / u[g].sum()),
                share_of_weight=float(w[g].sum() / self.weight),
                share_of_tokens=float(u[g].sum() / self.uniform),
                utility=float(us[g].sum() / u[g].sum()) if self.has_utilities else None,
                loss=float(ul[g].sum() / u[g].sum()),
                first_third=third(g, 0),
                last_third=third(g, 2),
            )
            for g in np.flatnonzero(counts.sum(1) >= least).tolist()
        ]


def _thirds(num_records: int) -> tuple[range, range]:
    """Indices of the first and of the last third of the records; empty for a single record."""
    n = max(1, num_records // 3) if num_records > 1 else 0
    return range(n), range(num_records - n, num_records)


def _extremes(rows: Sequence[Row], overall: float, top: int) -> Extremes:
    by_weight = sorted(rows, key=lambda row: row.relative_weight)
    moved = sorted(
        (
            (row.last_third - row.first_third, row)
            for row in rows
            if row.first_third is not None and row.last_third is not None
        ),
        key=lambda pair: pair[0],
    )
    few = max(1, top // 3)
    return Extremes(
        gained=[row for row in reversed(by_weight) if row.relative_weight > overall * (1 + UNIFORM_TOLERANCE)][:top],
        lost=[row for row in by_weight if row.relative_weight < overall * (1 - UNIFORM_TOLERANCE)][:top],
        rose=[row for change, row in reversed(moved) if change > 0][:few],
        fell=[row for change, row in moved if change < 0][:few],
    )


def _phrases(read: Sequence[SequenceTexts], sums: _Sums, least: int) -> list[Row]:
    """Phrases of 2 to `LONGEST_PHRASE` words within a sentence that occur at least `least` times, except those that
    occur only within one longer phrase."""
    number_of: dict[str, int] = {}
    word_of_token, words, sentences = [], [], []
    num_words = num_sentences = 0
    for one in read:
        word_of_token.append(np.where(one.word_of_token < 0, -1, one.word_of_token + num_words))
        words += [number_of.setdefault(word, len(number_of)) for word in one.words]
        sentences.append(one.sentences + num_sentences)
        num_words += len(one.words)
        num_sentences += len(one.words) and int(one.sentences[-1]) + 1
    token_word = np.concatenate(word_of_token)
    inside = token_word >= 0
    columns = [np.bincount(token_word[inside], column, minlength=num_words) for column in sums.values[inside].T]
    part = np.zeros(num_words, dtype=np.int64)
    part[token_word[inside]] = sums.part[inside]
    has_tokens = np.bincount(token_word[inside], minlength=num_words) > 0  # False for a word within another's token
    word, sentence = np.array(words, dtype=np.int64)[has_tokens], np.concatenate(sentences)[has_tokens]
    values, part = np.stack(columns, axis=1)[has_tokens], part[has_tokens]
    names = list(number_of)

    # For each length: phrase code at each place (-1 across sentences), summed values, an example place and the count
    # of each code.
    by_length: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    code, phrase_values = word, values
    for n in range(2, LONGEST_PHRASE + 1):
        num_places = max(0, len(word) - n + 1)
        within = sentence[:num_places] == sentence[n - 1 :][:num_places]
        phrase_values = phrase_values[:num_places] + values[n - 1 :][:num_places]
        keys = code[:num_places] * len(names) + word[n - 1 :][:num_places]
        code = np.full(num_places, -1, dtype=np.int64)
        _, example, code[within], counts = np.unique(
            keys[within], return_index=True, return_inverse=True, return_counts=True
        )
        by_length.append((code, phrase_values, np.flatnonzero(within)[example], counts))

    rows = []
    for n, (code, phrase_values, example, counts) in enumerate(by_length, start=2):
        wanted = counts >= least
        if n < LONGEST_PHRASE:
            _, _, longer_example, longer_counts = by_length[n - 1]
            for shift in (0, 1):
                shorter = code[longer_example + shift]
                wanted[shorter[counts[shorter] == longer_counts]] = False
        places = np.flatnonzero((code >= 0) & wanted[code]) if len(counts) else np.empty(0, dtype=np.int64)

        def name_of(g: int, n: int = n, example: np.ndarray = example) -> str:
            return " ".join(names[i] for i in word[example[g] : example[g] + n])

        phrases = _Sums(phrase_values[places], part[places], sums.uniform, sums.weight, sums.has_utilities)
        rows += phrases.rows(code[places], name_of, least)
    return rows
