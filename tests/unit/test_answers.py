"""The final answer in a text, the tokens a method keeps, and the reference's numbers beside the data."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.conversations import make_row, tokenize
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.common.errors import UserError
from vcore_ds.data.answers import _BOXED, _BRACE, find_answer_spans
from vcore_ds.data.batches import collate
from vcore_ds.data.dataset import add_reference, keep_random_tokens, write_reference
from vcore_ds.data.store import TokenStore, write_store


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (r"so \boxed{42}.", ["42"]),
        (r"\boxed{\frac{1}{2}} and \boxed {x^{2}}", [r"\frac{1}{2}", "x^{2}"]),
        (r"the set \boxed{\{1, 2\}}", [r"\{1, 2\}"]),
        (r"\boxed{a \boxed{b}}", [r"a \boxed{b}", "b"]),
        (r"cut off: \boxed{12", []),
        (r"\boxed{12 \} still open", []),
        ("boxed{1} is no command, \\boxed is not closed", []),
        (r"\boxed{}", [""]),
        ("\\boxed{two\nlines}", ["two\nlines"]),
    ],
)
def test_answer_spans_are_the_contents_of_boxes(text: str, answers: list[str]) -> None:
    assert [text[start:end] for start, end in find_answer_spans(text)] == answers


def test_unclosed_boxes_are_searched_in_one_pass() -> None:
    """Seconds with one pass, hours with one for each box."""
    text = "\\boxed{" * 10**6
    assert find_answer_spans(text) == []
    assert find_answer_spans(text + "a}}") == [(len(text) - 7, len(text) + 2), (len(text), len(text) + 1)]


def test_answer_spans_are_those_of_each_box_alone() -> None:
    random = np.random.default_rng(0)
    pieces = ["\\boxed{", "\\boxed {", "{", "}", "\\", "\\{", "\\}", "a", " ", "\\\\boxed{"]
    num_spans = 0
    for _ in range(2000):
        text = "".join(random.choice(pieces, 12))
        spans = find_answer_spans(text)
        assert spans == find_spans_one_by_one(text), text
        num_spans += len(spans)
    assert num_spans > 1000


def find_spans_one_by_one(text: str) -> list[tuple[int, int]]:
    spans = []
    for boxed in _BOXED.finditer(text):
        depth = 1
        for brace in _BRACE.finditer(text, boxed.end()):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                spans.append((boxed.end(), brace.start()))
                break
    return spans


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., TokenStore]:
    def make(*replies: str) -> TokenStore:
        talks = [make_row(r"Put \boxed{this} in a box", reply)["messages"] for reply in replies]
        folder = tmp_path / f"store{len(list(tmp_path.iterdir()))}"
        write_store(folder, tokenize(talks, make_tokenizer()), make_tokenizer())
        return TokenStore(folder)

    return make


def decode_masked(sequence, mask: np.ndarray) -> str:
    return make_tokenizer().decode(sequence.input_ids[mask])


def test_only_the_assistants_answer_counts(dataset) -> None:
    (sequence,) = dataset(r"It is \boxed{\frac{3}{4}}, or \boxed{0.75}.")
    assert decode_masked(sequence, sequence.in_answer) == r"\frac{3}{4}" + "0.75"
    assert not sequence.in_answer[~sequence.supervised].any()


def test_a_batch_has_the_kept_tokens_of_its_sequences(dataset) -> None:
    data = keep_random_tokens(dataset(r"word " * 30 + r"\boxed{777}", "no answer here at all"), 0.2, seed=1)
    first, second = data
    for sequence in (first, second):
        assert sequence.kept.sum() == round(0.2 * sequence.supervised.sum())
        assert not sequence.kept[~sequence.supervised].any()
    assert "777" in decode_masked(first, first.kept)

    batch = collate(list(data), pad_token_id=0)
    assert batch.num_kept_tokens().tolist() == [first.kept.sum(), second.kept.sum()]
    kept_labels = batch.labels[:, 1:][batch.supervised()][batch.kept_targets()]
    assert kept_labels.tolist() == [*first.input_ids[first.kept], *second.input_ids[second.kept]]
    again = keep_random_tokens(dataset(r"word " * 30 + r"\boxed{777}", "no answer here at all"), 0.2, seed=1)
    assert all((a.kept == b.kept).all() for a, b in zip(again, data, strict=True))


def test_without_a_mask_every_target_is_kept(dataset) -> None:
    batch = collate(list(dataset("abc", "defgh")), pad_token_id=0)
    assert torch.equal(batch.num_kept_tokens(), batch.num_supervised_tokens())
    assert batch.kept_targets().tolist() == [True] * int(batch.num_supervised_tokens().sum())


# ---- reference log-probabilities -----------------------------------------------------------------------------------


def test_reference_log_probabilities_come_back_to_their_sequences(dataset, tmp_path) -> None:
    data, path = dataset("abc", "defgh", "ij"), tmp_path / "deep" / "reference"
    write_reference(path, data, [-1.5, -2.25, -1e4], model="some/model")
    assert [p.name for p in path.parent.iterdir()] == ["reference"]  # nothing unfinished, no name changed
    with_reference = add_reference(data, str(path))
    assert [sequence.reference_log_probability for sequence in with_reference] == [-1.5, -2.25, -1e4]
    assert collate([with_reference[i] for i in (0, 1)], 0).reference_log_probability.tolist() == [-1.5, -2.25]


@pytest.mark.parametrize("replies", [("abc", "defgh"), ("abc", "defgi", "ij"), ("abc", "ij", "defgh")])
def test_a_reference_of_other_data_is_refused(dataset, tmp_path, replies: tuple[str, ...]) -> None:
    path = tmp_path / "reference.npz"
    write_reference(path, dataset("abc", "defgh", "ij"), [-1.0, -2.0, -3.0], model="m")
    with pytest.raises(UserError, match="of 3 other sequences.*vcore-ds reference"):
        add_reference(dataset(*replies), str(path))


@pytest.mark.parametrize("content", [None, b"", b"not a zip file", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_reference_is_refused(dataset, tmp_path, content: bytes | None) -> None:
    path = tmp_path / "reference.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="data.reference_log_probabilities: .*reference.npz: found no such"):
        add_reference(dataset("abc"), str(path))
