"""Tables of recorded tokens, computed by hand; what a token's text, kind and word are."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.report.tokens import (
    KINDS,
    Row,
    TokenTables,
    TokenTexts,
    are_uniform,
    default_min_count,
    make_tables,
)
from vcore_ds.common.errors import UserError
from vcore_ds.train.token_records import SequenceTokens, TokenRecord

LETTERS = make_tokenizer(merges=[("Ġ", letter) for letter in "abcdexyz"])
"""One token per letter with the space before it."""


def sequence(
    text: str,
    relative_weights: list[float] | None = None,
    *,
    i: int = 0,
    share: float = 0.5,
    uniform_share: float = 0.5,
    utilities: list[float] | None = None,
    losses: list[float] | None = None,
    tokenizer: PreTrainedTokenizerFast = LETTERS,
    first_position: int = 3,
) -> SequenceTokens:
    """A sequence with the weights `relative_weights / n` within it."""
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    n = len(ids)
    relative = np.array([1.0] * n if relative_weights is None else relative_weights)
    return SequenceTokens(
        i,
        share,
        uniform_share,
        0.7,
        positions=np.arange(first_position, first_position + n, dtype=np.int32),
        token_ids=ids,
        losses=np.array([1.0] * n if losses is None else losses, dtype=np.float32),
        utilities=None if utilities is None else np.array(utilities, dtype=np.float32),
        weights=(relative / n).astype(np.float32),
    )


def record(step: int, *sequences: SequenceTokens, first_trusted_id: int | None = None) -> TokenRecord:
    return TokenRecord(step, first_trusted_id, len(sequences), sum(map(len, sequences)), sequences)


def tables(*records: TokenRecord, top: int = 15, min_count: int | None = 1) -> TokenTables:
    return make_tables(records, LETTERS, top=top, min_count=min_count)


def values(row: Row) -> list[float | None]:
    return [row.relative_weight, row.share_of_weight, row.share_of_tokens, row.utility, row.loss]


def by_name(rows: list[Row]) -> dict[str, Row]:
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_a_sequence_counts_by_its_share_and_not_by_its_length() -> None:
    # " a b b b": each token is 1/8 of the uniform loss; " a c": each is 1/4.
    long = sequence(" a b b b", [2.5, 0.5, 0.5, 0.5], utilities=[4, 0, 0, 1], losses=[2, 1, 1, 3])
    short = sequence(" a c", [0.5, 1.5], i=1, utilities=[2, 8], losses=[4, 1])
    found = tables(record(1, long, short))
    assert (found.num_sequences, found.num_tokens, found.steps) == (2, 6, [1])
    assert found.relative_weight == pytest.approx(1.0)
    gained, lost = by_name(found.tokens.gained), by_name(found.tokens.lost)
    assert list(gained) == ["' c'", "' a'"] and list(lost) == ["' b'"]
    # ' a': U = 1/8 + 1/4, W = 2.5/8 + 0.5/4, utility (4/8 + 2/4) / U, loss (2/8 + 4/4) / U
    assert values(gained["' a'"]) == pytest.approx([0.4375 / 0.375, 0.4375, 0.375, 1 / 0.375, 1.25 / 0.375])
    assert values(gained["' c'"]) == pytest.approx([1.5, 0.375, 0.25, 8.0, 1.0])
    assert values(lost["' b'"]) == pytest.approx([0.5, 0.1875, 0.375, 1 / 3, 5 / 3])
    assert (gained["' a'"].count, gained["' c'"].count, lost["' b'"].count) == (2, 1, 3)


def test_records_count_the_same_whatever_they_hold_of_their_batch() -> None:
    # A record that holds a tenth of its batch: shares are those of the batch.
    part = record(1, sequence(" a b", [0.5, 1.5], share=0.1, uniform_share=0.1))
    whole = record(9, sequence(" a b", [1.5, 0.5], share=1.0, uniform_share=1.0))
    found = by_name(tables(part, whole).kinds)["word"]
    assert values(found) == pytest.approx([1.0, 1.0, 1.0, None, 1.0])
    rose = tables(part, whole).tokens.rose
    assert [(row.name, row.first_third, row.last_third) for row in rose] == [("' a'", 0.5, 1.5)]
    assert [row.name for row in tables(part, whole).tokens.fell] == ["' b'"]
    assert (tables(part, whole).first_third, tables(part, whole).last_third) == ([1], [9])
    assert tables(part).first_third == [] and tables(part).tokens.rose == []
    seven_records = tables(*(record(step, sequence(" a b", [0.5, 1.5])) for step in range(1, 8)))
    assert (seven_records.first_third, seven_records.last_third) == ([1, 2], [6, 7])


def test_the_factor_of_a_sequence_is_part_of_its_weight() -> None:
    found = tables(
        record(1, sequence(" a", share=0.8, i=2), sequence(" b", share=0.2, i=5), first_trusted_id=5),
    )
    assert [(row.name, row.relative_weight) for row in found.sources] == [
        ("training data", pytest.approx(1.6)),
        ("trusted pool", pytest.approx(0.4)),
    ]
    assert [row.count for row in found.sources] == [1, 1]
    assert tables(record(1, sequence(" a"), first_trusted_id=5)).sources == []
    assert not are_uniform([record(1, sequence(" a", share=0.8))])
    assert are_uniform([record(1, sequence(" a b c d"))])


def test_where_weights_are_no_distribution_gained_means_above_the_mean() -> None:
    found = tables(record(1, sequence(" a b", [0.8, 0.4])))  # as dft's, the probabilities
    assert found.relative_weight == pytest.approx(0.6)
    assert [row.name for row in found.tokens.gained] == ["' a'"]
    assert found.tokens.gained[0].share_of_weight == pytest.approx(2 / 3)
    assert [row.name for row in found.tokens.lost] == ["' b'"]


def test_rare_tokens_are_left_out_and_lists_are_cut() -> None:
    text = " a" * 3 + " b" * 2 + " c" * 4
    weights = [1.2] * 3 + [2.0] * 2 + [0.6] * 4
    found = tables(record(1, sequence(text, weights)), min_count=3)
    assert [row.name for row in found.tokens.gained] == ["' a'"] and [row.name for row in found.tokens.lost] == ["' c'"]
    assert found.min_count == 3
    assert [row.name for row in tables(record(1, sequence(text, weights)), top=1).tokens.gained] == ["' b'"]
    assert [default_min_count(n) for n in (10, 30_000, 1_500_000)] == [5, 6, 300]


def test_positions_are_deciles_of_the_trace() -> None:
    found = tables(record(1, sequence(" a" * 20, [2.0, 2.0, *[0.5] * 6, *[1.0] * 12])))
    assert [row.name for row in found.positions] == [f"{10 * k} to {10 * k + 10}%" for k in range(10)]
    assert [row.relative_weight for row in found.positions] == pytest.approx([2.0] + [0.5] * 3 + [1.0] * 6)
    assert [row.count for row in found.positions] == [2] * 10
    assert [row.name for row in tables(record(1, sequence(" a b", [1.5, 0.5]))).positions] == ["0 to 10%", "50 to 60%"]


def test_phrases_are_of_words_and_not_of_their_tokens() -> None:
    # Words: ab, c, ab, c, d; "ab" is two tokens.
    found = tables(record(1, sequence(" ab c ab c d", [2, 1, 3, 1, 0, 1, 0])), min_count=2)
    (phrase,) = [*found.phrases.gained, *found.phrases.lost]
    assert (phrase.name, phrase.count) == ("ab c", 2)
    assert phrase.relative_weight == pytest.approx((2 + 1 + 3 + 1 + 0 + 1) / 6)
    assert phrase.share_of_tokens == pytest.approx(6 / 7)
    uniform = tables(record(1, sequence(" ab c ab c d"))).phrases
    assert uniform.gained == uniform.lost == []


def phrases_of(*texts: str, min_count: int = 1) -> set[str]:
    """All phrases of texts that gained weight at the cost of one without phrases."""
    made = [sequence(text, share=0.8, i=i) for i, text in enumerate(texts)]
    found = tables(record(1, *made, sequence(" z", share=0.1, i=len(texts))), top=100, min_count=min_count).phrases
    assert found.lost == []
    return {row.name for row in found.gained}


def test_a_phrase_that_only_occurs_within_a_longer_one_is_left_out() -> None:
    assert phrases_of(" a b c d") == {"a b c d"}
    assert phrases_of(" a b c d", " a b x") == {"a b c d", "a b", "a b x"}
    assert phrases_of(" a b c d", " a b x", min_count=2) == {"a b"}
    assert phrases_of(" a b c d e") == {"a b c d", "b c d e"}


def test_a_phrase_does_not_cross_a_line_a_sentence_or_a_sequence() -> None:
    assert phrases_of(" a b\n c d") == {"a b", "c d"}
    assert phrases_of(" a b. c d") == {"a b", "c d"}
    assert phrases_of(" a (b, c) d") == {"a b c d"}
    assert phrases_of(" a b", " c d") == {"a b", "c d"}
    assert phrases_of(" a b<|im_end|> c d") == {"a b", "c d"}
    assert phrases_of(" a") == set()


def test_turns_apart_are_no_phrase() -> None:
    ids = LETTERS(" a b c d")["input_ids"]
    whole = sequence(" a b c d", [2.0, 1.5, 0.3, 0.2])
    apart = SequenceTokens(
        0,
        0.5,
        0.5,
        1.0,
        positions=np.array([3, 4, 9, 10], dtype=np.int32),
        token_ids=whole.token_ids,
        losses=whole.losses,
        utilities=None,
        weights=whole.weights,
    )
    assert len(ids) == 4
    found = tables(record(1, apart)).phrases
    assert [row.name for row in found.gained] == ["a b"] and [row.name for row in found.lost] == ["c d"]


# ---- texts -----------------------------------------------------------------------------------------------------------


def kinds(text: str, tokenizer: PreTrainedTokenizerFast = LETTERS) -> list[tuple[str, str]]:
    """(token, kind) of a text."""
    one = sequence(text, tokenizer=tokenizer)
    texts = TokenTexts(tokenizer, [one])
    read = texts.read(one)
    return [(texts.texts[i], KINDS[kind]) for i, kind in zip(one.token_ids.tolist(), read.kinds, strict=True)]


def test_the_kinds_of_tokens() -> None:
    found = kinds(" a7+,\n<|im_end|>")
    assert [kind for _, kind in found] == ["word", "digit", "operator", "punctuation", "white space", "special"]
    assert found[0][0] == " a"
    assert {kind for _, kind in kinds("∈", make_tokenizer(merges=[("â", "Ī"), ("âĪ", "Ī")]))} == {"operator"}
    assert [kind for _, kind in kinds("é")] == ["other", "other"]  # halves of a character
    latex = "".join(kind[0] for _, kind in kinds(r"\frac{a}\{"))
    assert latex == "L" * 5 + "p" + "w" + "p" + "LL"


def test_what_is_inside_a_box() -> None:
    one = sequence(r"a \boxed{7+{b}} c \boxed{d")
    texts = TokenTexts(LETTERS, [one])
    inside = [texts.texts[i] for i, ok in zip(one.token_ids.tolist(), texts.read(one).in_answer, strict=True) if ok]
    assert "".join(inside) == "7+{b}"
    row = by_name(tables(record(1, one)).kinds)[r"inside \boxed{}"]
    assert row.count == 5
    assert sum(r.count for r in tables(record(1, one)).kinds) == len(one) + 5  # of a kind too


def test_a_word_of_broken_characters_is_whole() -> None:
    one = sequence(" é (à)")
    read = TokenTexts(LETTERS, [one]).read(one)
    assert read.words[0] == "é" and len(read.words) == 2
    assert read.word_of_token.tolist()[:3] == [-1, 0, 0]


def test_a_tokenizer_that_strips_the_first_space() -> None:
    pieces = ["▁the", "▁a", "▁", "ory", "a", "e"]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "a")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([0, 3]) == "theory"
    ids = np.array([0, 3, 0], dtype=np.int32)
    numbers = dict.fromkeys(("losses", "utilities", "weights"), np.ones(3, np.float32))
    one = SequenceTokens(0, 1.0, 1.0, 1.0, positions=np.arange(3, dtype=np.int32), token_ids=ids, **numbers)
    texts = TokenTexts(tokenizer, [one])
    assert texts.texts == {0: " the", 3: "ory"}
    assert texts.read(one).words == ["theory", "the"]


def test_a_tokenizer_without_the_recorded_tokens_is_refused() -> None:
    one = sequence(" a<|im_end|>")
    with pytest.raises(UserError, match=r"found token \d+ in the records, and a tokenizer with \d+ tokens"):
        make_tables([record(1, one)], make_tokenizer(special_tokens=["<|im_end|>"], pad=None))
