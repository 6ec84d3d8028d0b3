"""Rows of conversations as other trainers have them: how they are read, which turns are learned, what is ignored."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.conversations import decode_learned, decode_texts, prepare_rows, write_lines
from tests.helpers.templates import make_template_tokenizer
from tests.helpers.tokenizer import CHATML, make_tokenizer
from vcore_ds.common.errors import UserError
from vcore_ds.config.data_section import MANIFEST, DataConfig
from vcore_ds.data.cache import find_or_make_store
from vcore_ds.data.conversations import Conversation, render_conversation
from vcore_ds.data.messages import EMPTY_ANSWER, UNCLOSED_THINKING, Dropped, Malformed, read_turn
from vcore_ds.data.prepare.report import describe_reading
from vcore_ds.data.prepare.rows import read_chat_row
from vcore_ds.data.store import TokenStore

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": None}]

SHAPES = {
    "messages": ({"messages": [QUESTION, ANSWER]}, "messages"),
    "OpenAI's weights": ({"messages": [QUESTION, {**ANSWER, "weight": 1}]}, "messages"),
    "ShareGPT": ({"conversations": SHAREGPT}, "ShareGPT"),
    "ShareGPT of roles": ({"conversations": [QUESTION, ANSWER], "messages": None}, "ShareGPT"),
    "TRL": ({"prompt": "q", "completion": "a"}, "prompt and completion"),
    "TRL, messages": ({"prompt": [QUESTION], "completion": [ANSWER]}, "prompt and completion"),
    "Alpaca": ({"instruction": "q", "input": "", "output": "a"}, "Alpaca"),
    "Alpaca without input": ({"instruction": "q", "output": "a", "input": None}, "Alpaca"),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("row", "shape"), SHAPES.values(), ids=SHAPES)
def test_files_of_other_trainers_are_read_as_they_are(
    row: dict[str, Any], shape: str, tmp_path: Path, tokenizer: Path
) -> None:
    """Recognized by their keys; in JSON lines, a list, Parquet and a folder as of the hub; a line says the format."""
    assert (read_chat_row(row).shape, read_chat_row(row).messages) == (shape, [QUESTION, ANSWER])
    write_lines(tmp_path / "rows.jsonl", [row, row])
    (tmp_path / "rows.json").write_text(json.dumps([row, row]))
    (tmp_path / "folder").mkdir()
    for name in ("rows.parquet", "folder/train-00000-of-00001.parquet"):
        pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / name)
    for name in ("rows.jsonl", "rows.json", "rows.parquet", "folder"):
        report = prepare_rows(tmp_path / name, tmp_path / f"{name}.store", tokenizer)
        expected = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        assert decode_texts(tmp_path / f"{name}.store") == [expected] * 2
        assert report is not None and f"formats: {shape} 2" in report.describe().splitlines()


def test_chat_formats_with_system_and_history_are_read() -> None:
    alpaca = {"instruction": "do", "input": "this", "output": "a", "system": "s", "history": [["q", "b"]]}
    turns = [("human", "q"), ("gpt", "b"), ("user", "do\nthis"), ("ASSISTANT", "a")]
    sharegpt = {"system": "s", "conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
    expected = [("system", "s"), ("user", "q"), ("assistant", "b"), ("user", "do\nthis"), ("assistant", "a")]
    for row in (alpaca, sharegpt):
        assert [(m["role"], m["content"]) for m in read_chat_row(row).messages] == expected


TEXT_PART = {"type": "text", "text": "a"}
IMAGE = [{"type": "text", "text": "q"}, {"type": "image_url"}]
THOUGHT = {**ANSWER, "reasoning_content": "t"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("text", "found str, expected an object"),
        ({"prompt": "x", "answer": None}, "found the keys prompt; expected `messages`, `conversations`"),
        ({"question": "x", "answer": "y"}, "data.columns (prepare --columns)"),
        ({"messages": "hello"}, '`messages` is a string ("hello")'),
        ({"messages": []}, "`messages` is an empty list"),
        ({"messages": ["hello"]}, "message 1 is a string"),
        ({"messages": [{"content": "x"}]}, "message 1: `role` is missing among content"),
        ({"messages": [{"role": "user"}]}, "message 1 has no `content`"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 has no `content`"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "message 1: `content` is a list"),
        ({"messages": [QUESTION]}, "no turn of the assistant"),
        ({"messages": [{"role": "user", "content": IMAGE}, ANSWER]}, "message 1: `content` is a list"),
        ({"messages": [ANSWER]}, "no turn of the assistant that answers something"),
        ({"conversations": "q"}, "`messages` is a string"),
        ({"conversations": ["q"]}, "turn 1 is from None"),
        ({"conversations": [{"from": "narrator", "value": "q"}]}, "turn 1 is from 'narrator', expected one of human"),
        ({"conversations": [{"from": "human", "value": 3}]}, "`content` is a number"),
        ({"prompt": 3, "completion": "a"}, "`prompt` or `completion` is neither a text nor a list"),
        ({"instruction": "", "output": "a"}, "`instruction` is empty"),
        ({"instruction": "q", "output": ["a"]}, "`output` is list"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "`history` is no list of pairs"),
        ({"instruction": "q", "output": "a", "history": [["q", "a", "q"]]}, "`history` is no list of pairs"),
        ({"instruction": "q", "output": "a", "history": 3}, "`history` is no list of pairs"),
        # Thinking and variables
        (
            {"messages": [QUESTION, {**THOUGHT, "content": "<think>u</think>a"}]},
            "message 2: found different thinking in `reasoning_content` and `content`",
        ),
        ({"messages": [QUESTION, {**THOUGHT, "thinking": "x"}]}, "different thinking in `reasoning_content` and `thin"),
        ({"messages": [QUESTION, {**ANSWER, "thinking": 3}]}, "`thinking` is a number (3), expected a string"),
        ({"instruction": "q", "output": "<think>u</think>a", "thinking": "t"}, "message 2: found different thinking"),
        ({"prompt": "q", "completion": [ANSWER, QUESTION, ANSWER], "thinking": "t"}, "column `thinking` beside 2 turn"),
        ({"prompt": "q", "completion": [THOUGHT], "reasoning_content": "u"}, "column `reasoning_content`"),
        ({"messages": [QUESTION, ANSWER], "chat_template_kwargs": 3}, "`chat_template_kwargs` is a number"),
        (
            {
                "messages": [
                    QUESTION,
                    {**ANSWER, "content": [{"type": "reasoning", "encrypted_content": "x"}, TEXT_PART]},
                ]
            },
            "message 2: thinking is a list",
        ),
        (
            {"messages": [QUESTION, {**ANSWER, "reasoning_details": [{"data": "x"}]}]},
            "message 2: `reasoning_details` is",
        ),
        # Weights
        ({"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}, "message 2: `weight` is a number (0.5), expected 0 or 1"),
        ({"messages": [QUESTION, {**ANSWER, "train": "yes"}]}, "message 2: `train` is a string"),
        (
            {"messages": [QUESTION, {**ANSWER, "train_detail": []}]},
            "message 2: `train_detail` leaves out parts of a turn",
        ),
        ({"messages": [QUESTION, {**ANSWER, "training_detail": []}]}, "message 2: `training_detail` leaves out"),
        ({"messages": [QUESTION, ANSWER], "loss_mask": [0, 0]}, "column `loss_mask` is a list"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 1, "loss": False}]}, "`weight` and `loss` contradict each other"),
        ({"messages": [{**QUESTION, "train": True}, ANSWER]}, "`train` asks to learn a turn of the user"),
    ],
)
def test_malformed_rows_name_what_is_wrong(row: Any, reason: str) -> None:
    with pytest.raises(Malformed) as malformed:
        read_chat_row(row)
    assert reason in malformed.value.args[0]


# Thinking: one form for all of its sources


def read_answers(*turns: dict[str, Any], **columns: Any) -> list[dict[str, Any]]:
    return read_chat_row({"messages": [QUESTION, *turns], **columns}).messages[1:]


TAGGED = "<think>\nt\n</think>\n\na"
THOUGHT_PARTS = "t", [{"type": "text", "text": "t"}]
ONE_FORM: dict[str, dict[str, Any]] = {
    "tags": {"messages": [QUESTION, {**ANSWER, "content": TAGGED}]},
    "after a prompt that opened it": {"messages": [QUESTION, {**ANSWER, "content": "t\n</think>\n\na"}]},
    "reasoning_content": {"messages": [QUESTION, THOUGHT]},
    "reasoning": {"messages": [QUESTION, {**ANSWER, "reasoning": "t"}]},
    "thinking, with tags": {"messages": [QUESTION, {**ANSWER, "thinking": "<think>\nt\n</think>\n"}]},
    "twice the same": {"messages": [QUESTION, {**THOUGHT, "thinking": "t", "content": TAGGED}]},
    "twice, up to white space": {"messages": [QUESTION, {**THOUGHT, "thinking": "t\n"}]},
    "empty system message": {"system": " ", "messages": [QUESTION, THOUGHT]},
    "empty key beside tags": {"messages": [QUESTION, {**ANSWER, "reasoning": "", "content": TAGGED}]},
    **{
        f"parts of {type(part).__name__}": {
            "messages": [QUESTION, {**ANSWER, "content": [{"type": "thinking", "thinking": part}, TEXT_PART]}]
        }
        for part in THOUGHT_PARTS  # Mistral's are lists
    },
    "OpenAI's parts": {
        "messages": [
            {**QUESTION, "content": [{"type": "input_text", "text": "q"}]},
            {
                **ANSWER,
                "content": [
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], "content": []},
                    {"type": "output_text", "text": "a"},
                ],
            },
        ]
    },
    "OpenRouter's": {
        "messages": [
            QUESTION,
            {**ANSWER, "reasoning_details": [{"type": "reasoning.text", "text": "t"}, {"type": "reasoning.encrypted"}]},
        ]
    },
    "a column beside ShareGPT's turns": {
        "prompt": "q",
        "completion": [{"from": "gpt", "value": "a"}],
        "reasoning": "t",
    },
    "Alpaca": {"instruction": "q", "output": "a", "thinking": "t"},
    "prompt and completion": {"prompt": "q", "completion": "a", "reasoning_content": "t"},
    "messages of a completion": {"prompt": [QUESTION], "completion": [ANSWER], "reasoning": "t"},
    "ShareGPT": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "<think>t</think>a"}]},
}


@pytest.mark.parametrize("row", ONE_FORM.values(), ids=ONE_FORM)
def test_thinking_of_every_source_has_one_form(row: dict[str, Any]) -> None:
    chat = read_chat_row(row)
    assert chat.messages == [QUESTION, THOUGHT] and not chat.unknown and not chat.unknown_keys


def test_summaries_of_thinking_are_paragraphs() -> None:
    summaries = [{"type": "summary_text", "text": text} for text in ("t", "u")]
    part = {"type": "reasoning", "summary": summaries, "encrypted_content": None}
    row = {"messages": [QUESTION, {**ANSWER, "content": [part, TEXT_PART]}]}
    assert read_chat_row(row).messages[1]["reasoning_content"] == "t\n\nu" and read_chat_row(row).unknown == []


def test_variables_of_a_row_reach_its_template() -> None:
    variables = {"enable_thinking": False, "x": None}
    chat = read_chat_row({"messages": [QUESTION, ANSWER], "chat_template_kwargs": variables})
    assert chat.template_variables == {"enable_thinking": False} and not chat.unknown
    rendered = render_conversation(chat, make_template_tokenizer("qwen3"))
    assert rendered.text.endswith("<think>\n\n</think>\n\na<|im_end|>\n")
    (span,) = rendered.spans
    assert rendered.text[slice(*span)] == "a<|im_end|>" and not rendered.notices
    for template in ("qwen3", "gemma4"):  # with and without an empty block
        rendered = render_conversation(Conversation(chat.messages), make_template_tokenizer(template))
        assert rendered.notices == {"without_thinking": 1}
    # Thinking is not learned after a prompt that does not ask for it; without a switch there is one prompt.
    thought = read_chat_row({"messages": [QUESTION, THOUGHT], "chat_template_kwargs": variables})
    for template, num_learned in (("gemma4", 0), ("llama3_1", 1)):
        assert len(render_conversation(thought, make_template_tokenizer(template)).spans) == num_learned
    for name in ("tokenize", "date_string", "continue_final_message"):  # no variables of a template
        reserved = Conversation(chat.messages, template_variables={name: True})
        with pytest.raises(Malformed, match=name):
            render_conversation(reserved, make_template_tokenizer("qwen3"))


def test_text_around_thinking_stays_in_the_answer() -> None:
    for text, thinking, answer in [
        ("First. <think>t</think>a", None, "First. <think>t</think>a"),
        ("<think>t</think>b<think>u</think>a", "t", "b<think>u</think>a"),
        ("<think>the tag <think> opens</think>a", "the tag <think> opens", "a"),
        ("<think>\n\n</think>\n\na", None, "a"),
    ]:
        (message,) = read_answers({**ANSWER, "content": text})
        assert (message.get("reasoning_content"), message["content"]) == (thinking, answer)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"messages": [QUESTION, {**ANSWER, "content": "<think>\nt"}]}, UNCLOSED_THINKING),
        ({"messages": [QUESTION, {**ANSWER, "content": "<think>t</think>a <think>u"}]}, UNCLOSED_THINKING),
        ({"messages": [QUESTION, {**ANSWER, "content": "<think>t"}, QUESTION, ANSWER]}, UNCLOSED_THINKING),
        ({"messages": [QUESTION, {**ANSWER, "content": "<think>t</think>\n"}]}, EMPTY_ANSWER),
        ({"messages": [QUESTION, {**THOUGHT, "content": ""}]}, EMPTY_ANSWER),
        ({"messages": [QUESTION, {**ANSWER, "content": " "}]}, EMPTY_ANSWER),
        ({"instruction": "q", "output": "", "thinking": "t"}, EMPTY_ANSWER),
        ({"prompt": "q", "completion": "t</think>"}, EMPTY_ANSWER),
        ({"messages": [QUESTION, ANSWER], "train": False}, "`train` of the row is false"),
        ({"messages": [QUESTION, ANSWER], "weight": 0}, "`weight` of the row is 0"),
        ({"messages": [QUESTION, ANSWER], "mask": True}, "`mask` of the row is true"),
    ],
)
def test_rows_without_an_answer_are_left_out_and_not_malformed(row: dict[str, Any], rule: str) -> None:
    with pytest.raises(Dropped) as dropped:
        read_chat_row(row)
    assert str(dropped.value) == rule


def test_generated_texts_are_turns_of_the_next_prompt() -> None:
    assert read_turn("t\n</think>\n\na") == read_turn(TAGGED) == THOUGHT
    assert read_turn("<think>\n\n</think>\n\na") == read_turn("a") == ANSWER
    assert read_turn("<think>\nt") == {**ANSWER, "content": "<think>\nt"}


def test_turns_that_are_not_learned_may_be_incomplete_and_answers_may_name_the_marker() -> None:
    cut = {**ANSWER, "content": "<think>t"}
    assert read_answers({**cut, "weight": 0}, QUESTION, ANSWER)[0] == cut
    empty = {**ANSWER, "content": " "}
    assert read_answers({**empty, "weight": 0}, QUESTION, ANSWER)[0] == empty
    naming = {**THOUGHT, "content": "Begin with <think>."}
    assert read_answers(naming) == [naming]


# Turns that are learned


def test_turns_of_a_prompt_are_context_as_in_trl() -> None:
    row = {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [{"role": "assistant", "content": "b"}]}
    chat = read_chat_row(row)
    assert [message["content"] for message in chat.messages] == ["q", "a", "q", "b"]
    assert chat.context_turns == [1]
    row["prompt"] = [QUESTION, {**ANSWER, "weight": 1}, QUESTION]  # which the row wants to learn
    assert read_chat_row(row).context_turns == []


@pytest.mark.parametrize("key", ["weight", "loss", "loss_mask", "loss_scale", "train", "training", "trainable"])
@pytest.mark.parametrize(("value", "context"), [(0, [1]), (False, [1]), (1, []), (True, []), (0.0, [1]), (None, [])])
def test_weights_of_messages_are_read_and_kept_from_the_template(key: str, value: Any, context: list[int]) -> None:
    chat = read_chat_row({"messages": [QUESTION, {**ANSWER, key: value}, QUESTION, ANSWER]})
    assert chat.context_turns == context
    assert chat.messages == [QUESTION, ANSWER, QUESTION, ANSWER] and not chat.unknown_keys
    turns = [{"from": "human", "value": "q", key: False}, {"from": "gpt", "value": "a", key: value}] * 2
    assert read_chat_row({"conversations": turns}).context_turns == ([1, 3] if context else [])


@pytest.mark.parametrize("key", ["mask", "masked"])
def test_masked_turns_are_not_learned(key: str) -> None:
    turns = [QUESTION, {**ANSWER, key: True}, QUESTION, {**ANSWER, key: False}]
    assert read_chat_row({"messages": turns}).context_turns == [1]
    with pytest.raises(Malformed, match=f"message 2: `{key}` is a number \\(1\\)"):
        read_chat_row({"messages": [QUESTION, {**ANSWER, key: 1}]})


Prepare = Callable[..., Path]


@pytest.fixture
def prepare(tmp_path: Path, tokenizer: Path) -> Prepare:
    """Makes a store of rows; what was said is `prepare.said`."""

    def prepare(rows: list[dict[str, Any]], output: str = "store", model: Path = tokenizer, **request: Any) -> Path:
        prepare.said = []
        source = write_lines(tmp_path / "rows.jsonl", rows)
        prepare_rows(source, tmp_path / output, model, said=prepare.said, **request)
        return tmp_path / output

    return prepare


TALK = [{"messages": [QUESTION, {"role": "assistant", "content": "first"}, QUESTION, ANSWER]}]


def test_turns_with_weight_0_and_earlier_turns_are_not_learned(prepare: Prepare) -> None:
    assert decode_learned(prepare(TALK, "all")) == ["first<|im_end|>a<|im_end|>"]
    assert decode_learned(prepare(TALK, "last", supervise="last")) == ["a<|im_end|>"]
    weighted = [{"messages": [*TALK[0]["messages"][:3], {**ANSWER, "weight": 0}]}, *TALK]
    assert decode_learned(prepare(weighted, "weighted")) == ["first<|im_end|>", "first<|im_end|>a<|im_end|>"]
    assert "\nturns of the assistant with weight 0, or in a prompt: 1\n" in prepare.said[-1]
    # Nothing of the first row is learned: its last turn has weight 0.
    assert decode_learned(prepare(weighted, "both", supervise="last")) == ["a<|im_end|>"]
    assert "no turn to learn" in prepare.said[-1]


def open_store(path: Path, supervise: Any) -> Path:
    settings = DataConfig(train_path=str(path), supervise=supervise, cache_dir=str(path.parent / "cache"))
    return find_or_make_store(str(path), make_tokenizer(), settings)


def test_a_store_is_opened_with_the_supervision_that_it_was_made_with(prepare: Prepare) -> None:
    store, last = prepare(TALK), prepare(TALK, "last", supervise="last")
    assert open_store(store, "all") == store
    for path, supervise, made_with in ((store, "last", "all"), (last, "all", "last")):
        with pytest.raises(UserError, match=f"found a store made with --supervise {made_with}, expected {supervise} "):
            open_store(path, supervise)
    # The manifest of an earlier version says nothing of how rows were read.
    manifest = json.loads((store / MANIFEST).read_text())
    del manifest["filters"]["supervise"], manifest["filters"]["rows_version"]
    (store / MANIFEST).write_text(json.dumps(manifest))
    assert open_store(store, "all") == store and decode_learned(store) == ["first<|im_end|>a<|im_end|>"]
    with pytest.raises(UserError, match="filters.rows_version: nothing there, 4 here"):
        prepare(TALK)


# Fields that have no effect


def test_ignored_fields_are_counted_and_those_that_the_template_reads_are_not(prepare: Prepare, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("m.role + ", "m.role + (m.name or '') + ")
    tokenizer.save_pretrained(tmp_path / "reads_names")
    named = {**QUESTION, "name": "Ann", "mood": "good"}
    rows = [{"messages": [named, ANSWER], "id": 1, "source": "x"}, {"messages": [QUESTION, ANSWER], "source": "y"}]
    prepare(rows, "plain")
    assert "\nignored: `source` 2, `id` 1, `messages.mood` 1, `messages.name` 1\n" in prepare.said[-1]
    store = prepare(rows, model=tmp_path / "reads_names")
    line = "ignored: `source` 2, `id` 1, `messages.mood` 1"
    assert line in prepare.said[-1].splitlines() and line in TokenStore(store).describe().splitlines()
    assert "userAnn" in tokenizer.decode(TokenStore(store)[0].input_ids)
    needs_name = make_tokenizer("{{ raise_exception('no name') if not messages[0].name }}" + CHATML)
    assert render_conversation(Conversation([named, ANSWER]), needs_name).ignored == ["messages.mood"]
    # `check` may know no tokenizer, and thus not what the template ignores.
    assert describe_reading(str(store)) == [f"{store}: format messages 2", f"{store}: {line}"]
    lines = [text.partition(": ")[2] for text in describe_reading(str(tmp_path / "rows.jsonl"))]
    assert lines == ["2 rows", "format messages 2", "ignored: `source` 2, `id` 1"]


def test_fields_within_a_row_are_read_or_counted(prepare: Prepare) -> None:
    """Variables that the template does not mention, also empty ones, keys of parts, and a second list of functions."""
    variables = {"custom_instructions": "Be brief.", "xml_tools": [], "enable_thinking": False, "unset": None}
    part = {"type": "text", "text": "a", "annotations": []}
    functions = {"tools": [], "functions": [{"name": "f", "description": "x"}], "weight": 1, "loss": 0.0}
    prepare([{"messages": [QUESTION, {**ANSWER, "content": [part]}], "chat_template_kwargs": variables}])
    names = "custom_instructions", "enable_thinking", "xml_tools"
    ignored = [
        f"`{name}` 1" for name in (*(f"chat_template_kwargs.{n}" for n in names), "messages.content.annotations")
    ]
    assert f"\nignored: {', '.join(ignored)}\n" in prepare.said[-1]
    chat = read_chat_row({"messages": [QUESTION, ANSWER], **functions})
    assert chat.tools and chat.unknown == ["loss"]
    assert read_chat_row({"messages": [QUESTION, ANSWER], **functions, "tools": [{"name": "g"}]}).unknown == [
        "functions",
        "loss",
    ]
