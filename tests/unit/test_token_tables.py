"""Tables of recorded tokens, computed by hand; the text, kind and word of a token."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.tokens import KIND, KINDS, POSITION, SOURCE, Row, TokenTables, TokenTexts, make_tables
from vcore_ds.common.errors import UserError
from vcore_ds.training.token_records import SequenceTokens, TokenRecord

LETTERS = make_tokenizer(merges=[("Ġ", letter) for letter in "abcdexyz"])
"""One token per letter with the space before it."""


def make_sequence(
    text: str,
    relative_weights: list[float] | None = None,
    *,
    i: int = 0,
    share: float = 0.5,
    uniform_share: float = 0.5,
    utilities: list[float] | None = None,
    losses: list[float] | None = None,
    positions: list[int] | None = None,
    tokenizer: PreTrainedTokenizerFast = LETTERS,
) -> SequenceTokens:
    """A sequence with the weights `relative_weights / n` within it."""
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    n = len(ids)
    return SequenceTokens(
        i,
        share,
        uniform_share,
        0.7,
        positions=np.array(positions or range(3, 3 + n), dtype=np.int32),
        token_ids=ids,
        losses=np.array(losses or [1.0] * n, dtype=np.float32),
        utilities=None if utilities is None else np.array(utilities, dtype=np.float32),
        weights=(np.array([1.0] * n if relative_weights is None else relative_weights) / n).astype(np.float32),
    )


def make_record(step: int, *sequences: SequenceTokens, first_trusted_id: int | None = None) -> TokenRecord:
    return TokenRecord(step, first_trusted_id, len(sequences), sum(map(len, sequences)), sequences)


def tabulate(*records: TokenRecord, top: int = 15, min_count: int | None = 1) -> TokenTables:
    texts = TokenTexts(LETTERS.backend_tokenizer, [sequence for record in records for sequence in record.sequences])
    return make_tables(records, texts, top=top, min_count=min_count)


def find_extremes(tables: TokenTables, name: str = "Tokens") -> list[list[Row]]:
    """Those that gained, and those that lost."""
    return [tables.extremes[f"{name} that {end} most weight"] for end in ("gained", "lost")]


def list_names(rows: list[Row]) -> list[str]:
    return [row.name for row in rows]


def read_values(row: Row) -> list[float | None]:
    return [row.relative_weight, row.share_of_weight, row.share_of_tokens, row.utility, row.loss]


def index_by_name(rows: list[Row]) -> dict[str, Row]:
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_a_sequence_counts_by_its_share_and_not_by_its_length() -> None:
    # " a b b b": each token is 1/8 of the uniform loss; " a c": each is 1/4.
    long = make_sequence(" a b b b", [2.5, 0.5, 0.5, 0.5], utilities=[4, 0, 0, 1], losses=[2, 1, 1, 3])
    short = make_sequence(" a c", [0.5, 1.5], i=1, utilities=[2, 8], losses=[4, 1])
    result = tabulate(make_record(1, long, short))
    assert result.relative_weight == pytest.approx(1.0)
    gained, lost = map(index_by_name, find_extremes(result))
    assert list(gained) == ["' c'", "' a'"] and list(lost) == ["' b'"]
    # ' a': U = 1/8 + 1/4, W = 2.5/8 + 0.5/4, utility (4/8 + 2/4) / U, loss (2/8 + 4/4) / U
    assert read_values(gained["' a'"]) == pytest.approx([0.4375 / 0.375, 0.4375, 0.375, 1 / 0.375, 1.25 / 0.375])
    assert read_values(gained["' c'"]) == pytest.approx([1.5, 0.375, 0.25, 8.0, 1.0])
    assert read_values(lost["' b'"]) == pytest.approx([0.5, 0.1875, 0.375, 1 / 3, 5 / 3])
    assert (gained["' a'"].count, gained["' c'"].count, lost["' b'"].count) == (2, 1, 3)


def test_records_of_different_shares_of_a_batch_count_equally() -> None:
    # A record that holds a tenth of its batch: shares are those of the batch.
    part = make_record(1, make_sequence(" a b", [0.5, 1.5], share=0.1, uniform_share=0.1))
    full = make_record(9, make_sequence(" a b", [1.5, 0.5], share=1.0, uniform_share=1.0))
    tables = tabulate(part, full)
    assert read_values(index_by_name(tables.groups[KIND])["word"]) == pytest.approx([1.0, 1.0, 1.0, None, 1.0])
    assert (tables.num_in_third, tabulate(part).num_in_third) == (1, 0)


def test_thirds_of_the_records_have_weights_of_their_own() -> None:
    weights = ([0.5, 1.5], [0.5, 1.5], [1.0, 1.0], [1.0, 1.0], [1.2, 0.8], [1.5, 0.5], [1.7, 0.3])
    records = [make_record(step, make_sequence(" a b", relative)) for step, relative in enumerate(weights, start=1)]
    assert tabulate(*records).num_in_third == 2
    (a,), _ = find_extremes(tabulate(*records))
    assert (a.name, a.first_third, a.last_third) == ("' a'", pytest.approx(0.5), pytest.approx(1.6))
    (alone,), _ = find_extremes(tabulate(records[0]))
    assert (alone.name, alone.first_third, alone.last_third) == ("' b'", None, None)


def test_the_factor_of_a_sequence_is_part_of_its_weight() -> None:
    result = tabulate(
        make_record(1, make_sequence(" a", share=0.8, i=2), make_sequence(" b", share=0.2, i=5), first_trusted_id=5)
    )
    assert [(row.name, row.relative_weight) for row in result.groups[SOURCE]] == [
        ("training data", pytest.approx(1.6)),
        ("trusted pool", pytest.approx(0.4)),
    ]
    assert [row.count for row in result.groups[SOURCE]] == [1, 1]
    assert tabulate(make_record(1, make_sequence(" a"), first_trusted_id=5)).groups.keys() == {KIND, POSITION}


def test_with_uniform_weights_nothing_gains_or_loses() -> None:
    assert find_extremes(tabulate(make_record(1, make_sequence(" a b c d", losses=[1, 2, 3, 4])))) == [[], []]


def test_where_weights_are_no_distribution_gained_means_above_the_mean() -> None:
    result = tabulate(make_record(1, make_sequence(" a b", [0.8, 0.4])))  # as dft's, the probabilities
    assert result.relative_weight == pytest.approx(0.6)
    gained, lost = find_extremes(result)
    assert list_names(gained) == ["' a'"] and gained[0].share_of_weight == pytest.approx(2 / 3)
    assert list_names(lost) == ["' b'"]


def test_rare_tokens_are_left_out_and_lists_are_cut() -> None:
    text = " a" * 3 + " b" * 2 + " c" * 4
    weights = [1.2] * 3 + [2.0] * 2 + [0.6] * 4
    result = tabulate(make_record(1, make_sequence(text, weights)), min_count=3)
    assert [list_names(rows) for rows in find_extremes(result)] == [["' a'"], ["' c'"]] and result.min_count == 3
    gained, _ = find_extremes(tabulate(make_record(1, make_sequence(text, weights)), top=1))
    assert list_names(gained) == ["' b'"]
    defaults = [tabulate(make_record(1, make_sequence(" a" * n)), min_count=None).min_count for n in (10, 30_000)]
    assert defaults == [5, 6]


def test_positions_are_deciles_of_the_trace() -> None:
    result = tabulate(make_record(1, make_sequence(" a" * 20, [2.0, 2.0, *[0.5] * 6, *[1.0] * 12])))
    assert list_names(result.groups[POSITION]) == [f"{10 * k} to {10 * k + 10}%" for k in range(10)]
    assert [row.relative_weight for row in result.groups[POSITION]] == pytest.approx([2.0] + [0.5] * 3 + [1.0] * 6)
    assert [row.count for row in result.groups[POSITION]] == [2] * 10
    few = tabulate(make_record(1, make_sequence(" a b", [1.5, 0.5])))
    assert list_names(few.groups[POSITION]) == ["0 to 10%", "50 to 60%"]


def test_phrases_consist_of_words_not_tokens() -> None:
    # Words: ab, c, ab, c, d; "ab" is two tokens.
    result = tabulate(make_record(1, make_sequence(" ab c ab c d", [2, 1, 3, 1, 0, 1, 0])), min_count=2)
    (phrase,), _ = find_extremes(result, "Phrases")
    assert (phrase.name, phrase.count) == ("ab c", 2)
    assert phrase.relative_weight == pytest.approx((2 + 1 + 3 + 1 + 0 + 1) / 6)
    assert phrase.share_of_tokens == pytest.approx(6 / 7)
    assert find_extremes(tabulate(make_record(1, make_sequence(" ab c ab c d"))), "Phrases") == [[], []]


def find_phrases(*texts: str, min_count: int = 1) -> set[str]:
    """All phrases of texts that gained weight at the cost of one without phrases."""
    made = [make_sequence(text, share=0.8, i=i) for i, text in enumerate(texts)]
    record = make_record(1, *made, make_sequence(" z", share=0.1, i=len(texts)))
    gained, lost = find_extremes(tabulate(record, top=100, min_count=min_count), "Phrases")
    assert lost == []
    return set(list_names(gained))


def test_a_phrase_that_only_occurs_within_a_longer_one_is_left_out() -> None:
    assert find_phrases(" a b c d") == {"a b c d"}
    assert find_phrases(" a b c d", " a b x") == {"a b c d", "a b", "a b x"}
    assert find_phrases(" a b c d", " a b x", min_count=2) == {"a b"}
    assert find_phrases(" a b c d e") == {"a b c d", "b c d e"}


def test_a_phrase_does_not_cross_a_line_a_sentence_or_a_sequence() -> None:
    assert find_phrases(" a b\n c d") == {"a b", "c d"}
    assert find_phrases(" a b. c d") == {"a b", "c d"}
    assert find_phrases(" a (b, c) d") == {"a b c d"}
    assert find_phrases(" a b", " c d") == {"a b", "c d"}
    assert find_phrases(" a b<|im_end|> c d") == {"a b", "c d"}
    assert find_phrases(" a") == set()


def test_a_phrase_does_not_cross_turns() -> None:
    apart = make_sequence(" a b c d", [2.0, 1.5, 0.3, 0.2], positions=[3, 4, 9, 10])
    extremes = find_extremes(tabulate(make_record(1, apart)), "Phrases")
    assert [list_names(rows) for rows in extremes] == [["a b"], ["c d"]]


# ---- texts -----------------------------------------------------------------------------------------------------------


def find_kinds(text: str, tokenizer: PreTrainedTokenizerFast = LETTERS) -> list[tuple[str, str]]:
    """(token, kind) of a text."""
    recorded = make_sequence(text, tokenizer=tokenizer)
    texts = TokenTexts(tokenizer.backend_tokenizer, [recorded])
    read = texts.read(recorded)
    return [(texts.texts[i], KINDS[kind]) for i, kind in zip(recorded.token_ids.tolist(), read.kinds, strict=True)]


def test_tokens_are_sorted_into_kinds() -> None:
    tokens_and_kinds = find_kinds(" a7+,\n<|im_end|>")
    expected = ["word", "digit", "operator", "punctuation", "white space", "special"]
    assert [kind for _, kind in tokens_and_kinds] == expected
    assert tokens_and_kinds[0][0] == " a"
    assert {kind for _, kind in find_kinds("∈", make_tokenizer(merges=[("â", "Ī"), ("âĪ", "Ī")]))} == {"operator"}
    assert [kind for _, kind in find_kinds("é")] == ["other", "other"]  # halves of a character
    latex = "".join(kind[0] for _, kind in find_kinds(r"\frac{a}\{"))
    assert latex == "L" * 5 + "p" + "w" + "p" + "LL"


def test_tokens_inside_a_box_are_counted_separately() -> None:
    recorded = make_sequence(r"a \boxed{7+{b}} c \boxed{d")
    texts = TokenTexts(LETTERS.backend_tokenizer, [recorded])
    inside = [
        texts.texts[i] for i, ok in zip(recorded.token_ids.tolist(), texts.read(recorded).in_answer, strict=True) if ok
    ]
    assert "".join(inside) == "7+{b}"
    kinds = tabulate(make_record(1, recorded)).groups[KIND]
    assert index_by_name(kinds)[r"inside \boxed{}"].count == 5
    assert sum(row.count for row in kinds) == len(recorded) + 5  # of a kind too


def test_a_word_of_split_characters_is_one_word() -> None:
    recorded = make_sequence(" é (à)")
    read = TokenTexts(LETTERS.backend_tokenizer, [recorded]).read(recorded)
    assert read.words[0] == "é" and len(read.words) == 2
    assert read.word_of_token.tolist()[:3] == [-1, 0, 0]


def test_the_first_space_is_restored_for_tokenizers_that_strip_it() -> None:
    pieces = ["▁the", "▁a", "▁", "ory", "a", "e"]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "a")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([0, 3]) == "theory"
    ids = np.array([0, 3, 0], dtype=np.int32)
    numbers = dict.fromkeys(("losses", "utilities", "weights"), np.ones(3, np.float32))
    recorded = SequenceTokens(0, 1.0, 1.0, 1.0, positions=np.arange(3, dtype=np.int32), token_ids=ids, **numbers)
    texts = TokenTexts(tokenizer.backend_tokenizer, [recorded])
    assert texts.texts == {0: " the", 3: "ory"}
    assert texts.read(recorded).words == ["theory", "the"]


def test_a_tokenizer_without_the_recorded_tokens_is_refused() -> None:
    recorded = make_sequence(" a<|im_end|>")
    with pytest.raises(UserError, match=r"found token \d+ in the records, and a tokenizer with \d+ tokens"):
        TokenTexts(make_tokenizer(special_tokens=["<|im_end|>"], pad=None).backend_tokenizer, [recorded])
