"""`vcore-ds prepare --show`: rows as they are learned, and what `check` says of them."""

import json
from pathlib import Path

import pytest

from tests.helpers.templates import make_template_tokenizer
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.cli import main
from vcore_ds.data.prepare.report import describe_reading

QUESTION = {"role": "user", "content": "q"}
THOUGHT = {"role": "assistant", "content": "a", "reasoning_content": "t"}
PLAIN = {"role": "assistant", "content": "b"}
CUT = {"role": "assistant", "content": "<think>\nt"}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A cut row, one with thinking, a malformed one, and two equal ones without thinking."""
    make_template_tokenizer("qwen3").save_pretrained(tmp_path / "qwen3")
    turns = [[QUESTION, CUT], [QUESTION, THOUGHT], [], [QUESTION, PLAIN], [QUESTION, PLAIN]]
    path = tmp_path / "rows.jsonl"
    row = {"id": 1, "chat_template_kwargs": {"custom_instructions": ""}}
    path.write_text("\n".join(json.dumps({"messages": messages, **row}) for messages in turns))
    return path


def test_rows_are_shown_as_they_are_learned(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["prepare", str(rows), "--tokenizer", str(rows.parent / "qwen3")]
    assert main([*command, "--show", "1"]) == 2  # as the preparation, for one malformed row of five
    refused = capsys.readouterr()
    assert "1 of 5 rows are malformed" in refused.err and f"1 row, first {rows}:3: " in refused.err
    assert main([*command, "--show", "3", "--max-malformed", "0.5"]) == 0
    assert (shown := capsys.readouterr().out).count(": learned between") == 3 and f"1 row, first {rows}:3: " in shown
    shown = refused.out
    assert f"{rows}:1: left out: unclosed thinking" in shown
    assert f"{rows}:2: learned" in shown and "up to <|im_end|>; ignored: `id`, `chat_template_kwargs.custom" in shown
    text = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦<think>\nt\n</think>\n\na<|im_end|>⟧"
    assert text in shown
    assert list(rows.parent.glob("*store*")) == []
    # The same text from the tokens of a store.
    store = rows.parent / "store"
    assert main([*command, "--output", str(store), "--max-malformed", "0.5", "--processes", "1"]) == 0
    table = capsys.readouterr().out
    assert "exact duplicates: 1" in table and "2 have an answer without thinking" in table
    command[1] = str(store)
    assert main([*command, "--show", "1"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(text)


def test_check_says_of_rows_and_of_stores_what_is_learned(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_template_tokenizer("qwen3")
    lines = "\n".join(describe_reading(str(rows), None, tokenizer))
    expected = [
        "1 dropped: unclosed thinking",
        "exact duplicates: 1",
        "1 malformed rows are left out; the first: ",
        "2 have an answer without thinking",
    ]
    assert all(text in lines for text in expected)
    assert "ignored: `chat_template_kwargs.custom_instructions` 3, `id` 3" in lines
    command = ["prepare", str(rows), "--tokenizer", str(rows.parent / "qwen3"), "--max-malformed", "0.5"]
    assert main([*command, "--output", str(rows.parent / "store"), "--processes", "1"]) == 0
    lines = "\n".join(describe_reading(str(rows.parent / "store")))
    assert all(text in lines for text in expected)


def test_of_much_data_the_beginning_is_read_and_of_long_text_the_ends_are_shown(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = {"role": "user", "content": "b" * 1000 + "m" * 50 + "e" * 1000}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    make_tokenizer(template).save_pretrained(rows.parent / "plain")
    rows.write_text((json.dumps({"messages": [question, PLAIN]}) + "\n") * 501)
    assert describe_reading(str(rows))[:2] == [f"{rows}: the first 500 rows", f"{rows}: format messages 500"]
    assert main(["prepare", str(rows), "--tokenizer", str(rows.parent / "plain"), "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "\n" + "b" * 1000 + "\n[... 50 characters ...]\n" + "e" * 1000 + "⟦b⟧" in shown


def test_other_markers_and_white_space_of_thinking_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_template_tokenizer("qwen3")
    tokenizer.save_pretrained(tmp_path / "qwen3")
    begin, end = "<|begin_of_thought|>", "<|end_of_thought|>"
    answers = ["<think>\nx\n</think>\n\none", "<think>x</think>one", "x</think>one", f"{begin}\nx\n{end}\n\none"]
    earlier = [{"role": "assistant", "content": "<think>x</think>no"}, QUESTION]  # whose thinking the template removes
    turns = [[QUESTION, {"role": "assistant", "content": text}] for text in answers]
    path, marked, spaced = tmp_path / "rows.jsonl", "1 have thinking between other markers", "2 have other white space"
    path.write_text("\n".join(json.dumps({"messages": row}) for row in [*turns, [QUESTION, *earlier, *turns[0][1:]]]))
    command = ["prepare", str(path), "--tokenizer", str(tmp_path / "qwen3")]
    reports = ["\n".join(describe_reading(str(path), None, tokenizer))]
    for words in (["--show", "1"], ["--output", str(tmp_path / "store"), "--processes", "1"]):
        assert main([*command, *words]) == 0
        reports.append(capsys.readouterr().out)
    assert all(marked in report and spaced in report for report in reports), reports


def test_a_turn_without_an_end_is_said(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A base model whose tokenizer lacks the template's end of turn."""
    tokenizer = make_tokenizer(special_tokens=["<|endoftext|>"], end="<|endoftext|>")
    tokenizer.save_pretrained(rows.parent / "base")
    lines = "\n".join(describe_reading(str(rows), None, tokenizer))
    assert "3 turns are learned without an end" in lines
    assert main(["prepare", str(rows), "--tokenizer", str(rows.parent / "base"), "--show", "1"]) == 2
    assert "up to no special token" in capsys.readouterr().out
