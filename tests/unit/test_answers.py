"""The final answer in a text, which answers are equal, the tokens a method keeps, and the reference's numbers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.conversations import make_row, tokenize
from tests.helpers.templates import WORDS
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.common.errors import UserError
from vcore_ds.data.answers import _BOXED, _BRACE, AnswerChecker, Kind, final_answer, find_answer_spans, is_right
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


# ---- forms of answers: expected, in the last box, and whether that is right -----------------------------------------

# fmt: off
BOXED = {
    "signs": [
        ("7", "−7", False), ("-7", "−7", True), ("−7", "-7", True), ("-7", "7", False), ("-7", "– 7", True),
        ("7", "+7", True), ("x-1", "x − 1", True), ("(-1, 2)", "(−1,2)", True), ("(-1, 2)", "(1,2)", False),
    ],
    "powers of ten": [
        ("100000", "1e5", True), ("1e5", "100000", True), ("5", "1e5", False), ("0.0015", "1.5E-3", True),
        (r"1.5 \times 10^{-3}", "1.5e-3", True), ("300000", "3×10⁵", True), ("0.001", "10^{-3}", True),
        ("2e", "2e", True), ("2e^3", "2e^{3}", True), ("2000", "2e^{3}", False),
    ],
    "fractions": [
        (r"\frac{1}{2}", "½", True), ("0.5", "½", True), ("1/2", r"\dfrac12", True), ("1/2", "2/4", True),
        ("1/2", r"$\frac{1}{2}$", True), ("3/4", "3⁄4", True), ("2/3", "0.67", False), ("3:2", "3/2", True),
        ("3.5", ".35", False), (".5", "0.5", True), ("5.0", "5", True), ("024", "24", True), ("5", "5.", True),
    ],
    "mixed numbers": [
        ("7/2", "3 1/2", True), ("1/2", "3 1/2", False), ("3.5", "3½", True), ("31/2", "3½", False),
        ("-7/2", "-3 1/2", True), ("-5/2", "-3 1/2", False), ("5/4", "1 1/4", True), ("1 1/4", "5/4", True),
        (r"3\frac{1}{2}", "3.5", True), ("3.5", r"3 \frac12", True), ("3/2", r"3\frac{1}{2}", False),
    ],
    "thousands": [
        ("1234", "1,234", True), ("1234", "1{,}234", True), ("1234", r"1\,234", True), ("234", r"1\,234", False),
        (r"1\,234", "1234", True), ("1234", r"1,\!234", True), ("1,234,567.5", "1234567.5", True),
        ("1234567", "1\u202f234\u202f567", True), ("(1, 234)", "(1,234)", True), (r"\{1,234\}", "1234", False),
        ("1, 234", "1234", False), ("100, 200", "100, 200", True), ("1.5", "1,5", False),
        (r"\begin{pmatrix} 1 \\ 234 \end{pmatrix}", r"\begin{pmatrix}1\\ 234\end{pmatrix}", True),
    ],
    "currency": [
        ("5", r"\$5", True), ("$5", "5", True), (r"\$1,234.50", "1234.5", True), ("5", "€5", True),
        ("5", "5 dollars", True), ("5", r"5\text{ dollars}", True), ("5", r"\$6", False),
    ],
    "units": [
        ("12", r"12 \text{ cm}", True), (r"12\text{ cm}", "12", True), ("12", r"12\ \mathrm{cm}^2", True),
        ("12", "12 cm", True), ("12", r"12\text{ m/s}", True), (r"12\text{ cm}", r"13\text{ cm}", False),
        ("30", r"30^\circ", True), (r"30^\circ", "30°", True), ("10:30", r"10:30 \text{ a.m.}", True),
    ],
    "percentages": [
        (r"50\%", r"50\%", True), ("0.5", r"50\%", True), ("50", r"50\%", True), (r"50\%", "50", True),
        (r"50\%", "0.5", True), ("50", "50 percent", True), (r"5\%", r"50\%", False), (r"0.5\%", r"50\%", False),
    ],
    "sets": [
        (r"\{1, 2\}", r"\{2, 1\}", True), (r"\{1, 2\}", r"\left\{2, 1\right\}", True),
        (r"\{1, 2\}", r"\{1, 3\}", False), (r"\{1, 2\}", r"\{1\}", False), (r"\{1, 2\}", "1, 2", True),
        ("1, 2", r"1 \text{ and } 2", True), ("1, 2", "x = 1, x = 2", True), ("1", "1, 2", False),
        (r"\emptyset", r"\varnothing", True), (r"\emptyset", "∅", True), ("2, -2", "±2", True),
    ],
    "intervals": [
        ("(1, 2)", "(2,1)", False), ("(1,2]", r"\left(1, 2\right]", True), ("(1,2]", "[1, 2]", False),
        (r"[1,\infty)", "[1, ∞)", True), ("(1,2)", r"x \in (1,2)", True), ("1 < x < 2", "(1,2)", True),
        (r"(0,1)\cup(2,3)", "(2,3) ∪ (0,1)", True), (r"(0,1)\cup(2,3)", "(0,1) ∪ (2,4)", False),
        (r"[1,\infty)", "x > 1", False), (r"-\infty", r"\infty", False),
    ],
    "functions": [
        ("120", "5!", True), ("5!", "120", True), ("5", "5!", False), (r"\frac{10!}{3!}", "604800", True),
        (r"\binom{5}{2}", "10", True), (r"2\sqrt{3}", "2√3", True), (r"\sqrt{12}", r"2\sqrt3", True),
        (r"2\pi", "2π", True), ("x^2", "x²", True), ("3+4i", "4i + 3", True), (r"\log_2 8", "3", True),
    ],
    "text": [
        ("x=5", "5", True), ("5", "x=5", True), (r"\text{Yes}", "yes", True), ("Monday", r"\text{Monday}", True),
        ("Monday", r"\text{Tuesday}", False), ("5", r"\text{The answer is }5", True),
    ],
    "boxes": [
        ("5", r"\boxed{5}", True), ("5", r"x = \boxed{5}", True), (r"\boxed{5}", "5", True),
        ("5", r"4}, no: \boxed{5", True), ("4", r"4}, no: \boxed{5", False), ("5", r"5} in \boxed{", True),
        (r"\boxed{4}, no: \boxed{5}", "4", False),
    ],
}
LETTERS = {  # by what the box has; without a letter it stays as it is
    "B": "B", "(B)": "B", "B. Paris": "B", r"\text{(B) Paris}": "B", r"\textbf{(B)}\ 42": "B", r"\text{B}: 42": "B",
    "B) Vitamin C": "B", "B – Paris": "B", "option B": "B", r"\text{The answer is B.}": "B", "C. B is wrong": "C",
    "$B$": "B", "b": "b", "A and B": "A and B", "(A), (B)": "(A), (B)", "A circle": "A circle", "AB": "AB",
}
NUMBERS = {  # without a box
    "so it is −7.": "-7", "about 1e5 of them": r"1\times 10^{5}", "It is 3½.": r"3\frac{1}{2}", "It is ½.": "1/2",
    "it is -3 1/2": r"-3\frac{1}{2}", r"it is 1\,234": "1234", "She has $18.": "18", "That is 50%.": "50%",
    r"It is \frac{1}{2}.": r"\frac{1}{2}", "from 10-12": "12", ".5": ".5", "it is 3 5/2": "3 5/2",
}
PROGRAM, CUT = "```cpp\nint main() {}\n```\n", "```cpp\nint main() { cut"
PROGRAMS = {
    PROGRAM + "It prints\n```\n42\n```": "int main() {}",
    PROGRAM + "It prints\n```text\nf(x)\n```": "int main() {}",
    "```\nint main() {}\n```\nOutput:\n```\n42\n```\n": "int main() {}",
    "Input\n```\n1 2\n```\n" + PROGRAM: "int main() {}",
    PROGRAM + "A better one:\n" + CUT: "int main() {}",
    CUT + "\n" + PROGRAM: "int main() {}",
    "1. First\n   " + CUT: None,
}
CUT_OFF = [r"<think>is it \boxed{5}? Let", "<think>2 + 3 = 5, or", "<think>\n" + PROGRAM, r"</think>\boxed{5}<think>5"]
# fmt: on


@pytest.fixture(scope="module")
def checker():
    checker = AnswerChecker(5)
    yield checker
    checker.close()


@pytest.mark.parametrize(("expected", "box", "right"), [form for forms in BOXED.values() for form in forms])
def test_forms_of_answers(expected: str, box: str, right: bool, checker: AnswerChecker) -> None:
    assert is_right(final_answer(rf"So \boxed{{{box}}}.", "math"), expected, "math", checker) == right


@pytest.mark.parametrize(("box", "letter"), LETTERS.items())
def test_the_letter_of_a_choice_may_have_text_beside_it(box: str, letter: str) -> None:
    assert final_answer(rf"\boxed{{A}}, no: \boxed{{{box}}}", "choice") == letter


@pytest.mark.parametrize(
    ("output", "kind", "answer"),
    [
        *((output, "number", answer) for output, answer in NUMBERS.items()),
        *((output, "code", answer) for output, answer in PROGRAMS.items()),
        *((output, kind, None) for output in CUT_OFF for kind in ("math", "number", "choice", "code")),
        (r"<think>is it \boxed{4}?</think>\boxed{5}", "math", "5"),
        (r"<think>so \boxed{5}</think>The answer is 5.", "math", "5"),
    ],
)
def test_answers_without_a_box_programs_and_thinking_that_is_cut_off(
    output: str, kind: Kind, answer: str | None
) -> None:
    assert final_answer(output, kind) == answer


@pytest.mark.parametrize(
    ("expected", "box", "verdict"),
    [
        (r"[1,\infty)", r"x \ge 1", False),  # an inequality is not accepted for an interval
        (r"12\text{ cm}", r"12\text{ m}", True),  # units are dropped, not compared
        ("720", "3!!", True),  # (3!)!
        ("1/3", r"0.\overline{3}", False),
        ("half", "1/2", False),
    ],
)
def test_what_is_left_to_math_verify(expected: str, box: str, verdict: bool, checker: AnswerChecker) -> None:
    """As docs/evaluation.md says."""
    assert is_right(box, expected, "math", checker) == verdict


def test_long_outputs_are_searched_in_one_pass() -> None:
    """Milliseconds; minutes where a pattern goes back over digits or spaces that it has read."""
    for filling in ("1", " ", "1 ", "-", "1,", "\\"):
        text = filling * (200_000 // len(filling))
        for kind in ("number", "math", "choice", "code"):
            final_answer(text, kind)
            final_answer(rf"\boxed{{{text}x}}", kind)


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
    # A token across the border of the box is one of the answer's.
    tokenizer = make_tokenizer(merges=[("{", "x")], word_pattern=WORDS)
    (crossing,) = tokenize([make_row("q", r"It is \boxed{x}.")["messages"]], tokenizer)
    assert tokenizer.decode(crossing.input_ids[crossing.in_answer]) == "{x"


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
    one, two = keep_random_tokens(dataset("no answer here at all", "no answer here at all"), 0.2, seed=1)
    assert (one.kept != two.kept).any() and (
        one.kept != keep_random_tokens(dataset("no answer here at all"), 0.2, 2)[0].kept
    ).any()


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
    with pytest.raises(UserError, match="data.reference_log_probabilities: .*reference.npz: "):
        add_reference(dataset("abc"), str(path))
