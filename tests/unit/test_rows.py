"""Rows of conversations as other trainers have them: how they are read, which turns are learned, what is ignored."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.templates import make_template_tokenizer
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.common.errors import UserError
from vcore_ds.config.data_section import DataConfig
from vcore_ds.data.cache import find_or_make_store
from vcore_ds.data.conversations import Conversation, render_conversation
from vcore_ds.data.messages import EMPTY_ANSWER, UNCLOSED_THINKING, Dropped, Malformed, read_turn
from vcore_ds.data.prepare.curation import PrepareRequest
from vcore_ds.data.prepare.pipeline import prepare
from vcore_ds.data.prepare.report import describe_reading
from vcore_ds.data.prepare.rows import read_chat_row
from vcore_ds.data.store import MANIFEST, TokenStore

QUESTION = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}

CHAT = {
    "messages": ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, "messages"),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": None}], "id": "7"},
        "ShareGPT",
    ),
    "ShareGPT of roles": (
        {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "messages": None},
        "ShareGPT",
    ),
    "TRL": ({"prompt": "q", "completion": "a"}, "prompt and completion"),
    "Alpaca": ({"instruction": "q", "input": "", "output": "a"}, "Alpaca"),
    "Alpaca without input": ({"instruction": "q", "output": "a", "input": None}, "Alpaca"),
}


@pytest.mark.parametrize(("row", "shape"), CHAT.values(), ids=CHAT.keys())
def test_chat_formats_are_recognized_by_their_keys(row: dict, shape: str) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert (read_chat_row(row).shape, read_chat_row(row).messages) == (shape, messages)


def test_chat_formats_with_system_and_history_are_read() -> None:
    alpaca = {"instruction": "do", "input": "this", "output": "a", "system": "s", "history": [["q", "b"]]}
    sharegpt = {
        "system": "s",
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "b"},
            {"from": "user", "value": "do\nthis"},
            {"from": "ASSISTANT", "value": "a"},
        ],
    }
    expected = [("system", "s"), ("user", "q"), ("assistant", "b"), ("user", "do\nthis"), ("assistant", "a")]
    for row in (alpaca, sharegpt):
        assert [(m["role"], m["content"]) for m in read_chat_row(row).messages] == expected
    thinks = {"messages": [QUESTION, {"role": "assistant", "content": "a", "reasoning_content": "t"}]}
    assert read_chat_row(thinks).messages[1]["reasoning_content"] == "t"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("text", "found str, expected an object"),
        ({"prompt": "x", "answer": None}, "found the keys prompt; expected `messages`, `conversations`"),
        ({"messages": []}, "`messages` is an empty list"),
        ({"messages": [{"role": "user"}]}, "message 1 has no `content`"),
        ({"messages": [{"role": "user", "content": "q"}]}, "no turn of the assistant"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image_url"}]}, ANSWER]},
            "message 1: `content` has a part of type image_url, expected parts of type text",
        ),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no turn of the assistant that answers something"),
        ({"conversations": "q"}, "`conversations` is str, expected a list"),
        ({"conversations": ["q"]}, "turn 1 is str"),
        ({"conversations": [{"from": "narrator", "value": "q"}]}, "turn 1 is from 'narrator', expected one of human"),
        ({"conversations": [{"from": "human", "value": 3}]}, "`content` is a number"),
        ({"instruction": "", "output": "a"}, "`instruction` is empty"),
        ({"instruction": "q", "output": ["a"]}, "`output` is list"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "`history` has an entry that is no pair"),
    ],
)
def test_malformed_chat_rows_name_what_is_wrong(row: Any, reason: str) -> None:
    with pytest.raises(Malformed) as malformed:
        read_chat_row(row)
    assert reason in malformed.value.args[0]


# Thinking: one form for all of its sources


def read_answers(*turns: dict[str, Any], **columns: Any) -> list[dict[str, Any]]:
    return read_chat_row({"messages": [QUESTION, *turns], **columns}).messages[1:]


THOUGHT = {**ANSWER, "reasoning_content": "t"}
ONE_FORM: dict[str, dict[str, Any]] = {
    "tags": {"messages": [QUESTION, {**ANSWER, "content": "<think>\nt\n</think>\n\na"}]},
    "after a prompt that opened it": {"messages": [QUESTION, {**ANSWER, "content": "t\n</think>\n\na"}]},
    "reasoning_content": {"messages": [QUESTION, THOUGHT]},
    "reasoning": {"messages": [QUESTION, {**ANSWER, "reasoning": "t"}]},
    "thinking, with tags": {"messages": [QUESTION, {**ANSWER, "thinking": "<think>\nt\n</think>\n"}]},
    "twice the same": {"messages": [QUESTION, {**THOUGHT, "thinking": "t", "content": "<think>\nt\n</think>\n\na"}]},
    "empty key beside tags": {
        "messages": [QUESTION, {**ANSWER, "reasoning": "", "content": "<think>\nt\n</think>\n\na"}]
    },
    "parts": {
        "messages": [
            QUESTION,
            {**ANSWER, "content": [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}]},
        ]
    },
    "Mistral's parts": {
        "messages": [
            QUESTION,
            {
                **ANSWER,
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "t"}]},
                    {"type": "text", "text": "a"},
                ],
            },
        ]
    },
    "Alpaca": {"instruction": "q", "output": "a", "thinking": "t"},
    "prompt and completion": {"prompt": "q", "completion": "a", "reasoning_content": "t"},
    "messages of a completion": {"prompt": [QUESTION], "completion": [ANSWER], "reasoning": "t"},
    "ShareGPT": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "<think>t</think>a"}]},
}


@pytest.mark.parametrize("row", ONE_FORM.values(), ids=ONE_FORM)
def test_thinking_of_every_source_has_one_form(row: dict[str, Any]) -> None:
    chat = read_chat_row(row)
    assert chat.messages == [QUESTION, THOUGHT] and not chat.unknown and not chat.unknown_fields


def test_variables_of_a_row_reach_its_template() -> None:
    chat = read_chat_row(
        {"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"enable_thinking": False, "x": None}}
    )
    assert chat.template_variables == {"enable_thinking": False} and not chat.unknown
    rendered = render_conversation(Conversation(1, chat.messages, **chat.options), make_template_tokenizer("qwen3"))
    assert rendered.text.endswith("<think>\n\n</think>\n\na<|im_end|>\n")
    (span,) = rendered.spans
    assert span is not None and rendered.text[slice(*span)] == "a<|im_end|>" and not rendered.notices
    rendered = render_conversation(Conversation(1, chat.messages), make_template_tokenizer("qwen3"))
    assert rendered.notices == {"without_thinking": 1}


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
    ],
)
def test_rows_without_an_answer_are_left_out_and_not_malformed(row: dict[str, Any], rule: str) -> None:
    with pytest.raises(Dropped) as dropped:
        read_chat_row(row)
    assert str(dropped.value) == rule


def test_generated_texts_are_turns_of_the_next_prompt() -> None:
    assert read_turn("t\n</think>\n\na") == read_turn("<think>\nt\n</think>\n\na") == THOUGHT
    assert read_turn("<think>\n\n</think>\n\na") == read_turn("a") == ANSWER
    assert read_turn("<think>\nt") == {**ANSWER, "content": "<think>\nt"}


def test_turns_that_are_not_learned_may_be_incomplete_and_answers_may_name_the_marker() -> None:
    cut = {**ANSWER, "content": "<think>t"}
    assert read_answers({**cut, "weight": 0}, QUESTION, ANSWER)[0] == cut
    naming = {**THOUGHT, "content": "Begin with <think>."}
    assert read_answers(naming) == [naming]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"messages": [QUESTION, {**THOUGHT, "content": "<think>u</think>a"}]},
            "message 2: found different thinking in `reasoning_content` and `content`",
        ),
        ({"instruction": "q", "output": "<think>u</think>a", "thinking": "t"}, "message 2: found different thinking"),
        (
            {"prompt": "q", "completion": [ANSWER, QUESTION, ANSWER], "thinking": "t"},
            "column `thinking` beside 2 turns",
        ),
        ({"prompt": "q", "completion": [THOUGHT], "reasoning_content": "u"}, "column `reasoning_content`"),
        ({"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"tokenize": True}}, "has `tokenize`"),
        ({"messages": [QUESTION, ANSWER], "chat_template_kwargs": 3}, "`chat_template_kwargs` is a number"),
    ],
)
def test_contradictions_are_malformed(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Malformed) as malformed:
        read_chat_row(row)
    assert reason in malformed.value.args[0]


# Turns that are learned


def test_turns_of_a_prompt_are_context_as_in_trl() -> None:
    row = {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [{"role": "assistant", "content": "b"}]}
    chat = read_chat_row(row)
    assert [message["content"] for message in chat.messages] == ["q", "a", "q", "b"]
    assert chat.context_turns == [1]


@pytest.mark.parametrize("key", ["weight", "loss", "train"])
@pytest.mark.parametrize(("value", "context"), [(0, [1]), (False, [1]), (1, []), (True, []), (0.0, [1]), (None, [])])
def test_weights_of_messages_are_read_and_kept_from_the_template(key: str, value: Any, context: list[int]) -> None:
    chat = read_chat_row({"messages": [QUESTION, {**ANSWER, key: value}, QUESTION, ANSWER]})
    assert chat.context_turns == context
    assert chat.messages == [QUESTION, ANSWER, QUESTION, ANSWER] and not chat.unknown_fields
    turns = [{"from": "human", "value": "q", key: False}, {"from": "gpt", "value": "a", key: value}] * 2
    assert read_chat_row({"conversations": turns}).context_turns == ([1, 3] if context else [])


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({**ANSWER, "weight": 0.5}, "message 2: `weight` is a number (0.5), expected 0 or 1"),
        ({**ANSWER, "train": "yes"}, "message 2: `train` is a string"),
        ({**ANSWER, "weight": 1, "loss": False}, "message 2: `weight` and `loss` contradict each other"),
        ({**QUESTION, "train": True}, "`train` asks to learn a turn of the user"),
        ({**ANSWER, "thinking": 3}, "`thinking` is a number (3), expected a string"),
        (
            {**ANSWER, "thinking": "x", "reasoning_content": "y"},
            "found different thinking in `reasoning_content` and `thinking`",
        ),
    ],
)
def test_weights_and_thinking_that_cannot_be_followed_are_refused(message: dict, reason: str) -> None:
    with pytest.raises(Malformed) as malformed:
        read_chat_row({"messages": [QUESTION, message, ANSWER]})
    assert reason in malformed.value.args[0]


Prepare = Callable[..., tuple[Path, list[str]]]


@pytest.fixture
def prepare_rows(tmp_path: Path) -> Prepare:
    """Returns the store and what was said."""
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def run(
        rows: list[dict[str, Any]], output: str = "store", tokenizer: str = "tokenizer", **request: Any
    ) -> tuple[Path, list[str]]:
        source, said = tmp_path / "rows.jsonl", []
        source.write_text("\n".join(map(json.dumps, rows)))
        made = PrepareRequest("chat", (str(source),), str(tmp_path / tokenizer), "train", **request)
        prepare(made, tmp_path / output, say=said.append)
        return tmp_path / output, said

    return run


def decode_learned(store: Path) -> list[str]:
    return [make_tokenizer().decode(sequence.input_ids[sequence.supervised]) for sequence in TokenStore(store)]


TALK = [{"messages": [QUESTION, {"role": "assistant", "content": "first"}, QUESTION, ANSWER]}]


def test_turns_with_weight_0_and_earlier_turns_are_not_learned(prepare_rows: Prepare) -> None:
    assert decode_learned(prepare_rows(TALK, "all")[0]) == ["first<|im_end|>a<|im_end|>"]
    assert decode_learned(prepare_rows(TALK, "last", supervise="last")[0]) == ["a<|im_end|>"]
    weighted = [{"messages": [*TALK[0]["messages"][:3], {**ANSWER, "weight": 0}]}, *TALK]
    store, said = prepare_rows(weighted, "weighted")
    assert decode_learned(store) == ["first<|im_end|>", "first<|im_end|>a<|im_end|>"]
    assert "\nturns of the assistant with weight 0, or in a prompt: 1\n" in said[-1]
    # Nothing of the first row is learned: its last turn has weight 0.
    store, said = prepare_rows(weighted, "both", supervise="last")
    assert decode_learned(store) == ["a<|im_end|>"] and "no turn to learn" in said[-1]


def open_store(path: Path, supervise: Any) -> Path:
    settings = DataConfig(train_path=str(path), supervise=supervise, cache_dir=str(path.parent / "cache"))
    return find_or_make_store(str(path), make_tokenizer(), settings)


def test_a_store_is_opened_with_the_supervision_that_it_was_made_with(prepare_rows: Prepare) -> None:
    store, _ = prepare_rows(TALK)
    assert open_store(store, "all") == store
    with pytest.raises(UserError, match="found a store made with --supervise all, expected last .data.supervise"):
        open_store(store, "last")
    last, _ = prepare_rows(TALK, "last", supervise="last")
    with pytest.raises(UserError, match="set data.supervise=last, or make it again"):
        open_store(last, "all")


def test_a_store_of_an_earlier_version_is_readable_and_made_again_on_demand(prepare_rows: Prepare) -> None:
    """Its manifest says nothing of how rows were read."""
    store, _ = prepare_rows(TALK)
    manifest = json.loads((store / MANIFEST).read_text())
    del manifest["filters"]["supervise"], manifest["filters"]["rows_version"]
    (store / MANIFEST).write_text(json.dumps(manifest))
    assert open_store(store, "all") == store and decode_learned(store) == ["first<|im_end|>a<|im_end|>"]
    with pytest.raises(UserError, match="filters.rows_version: nothing there, 3 here"):
        prepare_rows(TALK)


# Fields that have no effect


def test_ignored_fields_are_counted_and_those_that_the_template_reads_are_not(
    prepare_rows: Prepare, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("m.role + ", "m.role + (m.name or '') + ")
    named = {**QUESTION, "name": "Ann", "mood": "good"}
    rows = [{"messages": [named, ANSWER], "id": 1, "source": "x"}, {"messages": [QUESTION, ANSWER], "id": 2}]
    store, said = prepare_rows(rows, "plain")
    assert "\nignored: `id` 2, `messages.mood` 1, `messages.name` 1, `source` 1\n" in said[-1]
    tokenizer.save_pretrained(tmp_path / "reads_names")
    store, said = prepare_rows(rows, tokenizer="reads_names")
    line = "ignored: `id` 2, `messages.mood` 1, `source` 1"
    assert line in said[-1].splitlines() and line in TokenStore(store).describe().splitlines()
    assert "userAnn" in tokenizer.decode(TokenStore(store)[0].input_ids)
    # `check` knows no tokenizer.
    assert describe_reading(str(store)) == [f"{store}: format messages 2", f"{store}: {line}"]
    unless = "(unless the chat template reads it)"
    assert [text.partition(": ")[2] for text in describe_reading(str(tmp_path / "rows.jsonl"))] == [
        "2 rows",
        "format messages 2",
        f"ignored: `id` 2, `messages.mood` {unless} 1, `messages.name` {unless} 1, `source` 1",
    ]


def test_thinking_of_earlier_turns_is_kept_or_the_turn_is_context() -> None:
    thought = {**ANSWER, "reasoning_content": "hm"}
    messages = [QUESTION, thought, QUESTION, thought]
    rendered = render_conversation(Conversation(1, messages), make_template_tokenizer("llama3_1"))
    assert [rendered.text[slice(*span)] for span in rendered.spans] == ["<think>\nhm\n</think>\n\na<|eot_id|>"] * 2
    rendered = render_conversation(Conversation(1, messages), make_template_tokenizer("qwen3"))
    assert rendered.spans.count(None) == 1  # counted as not supervised


# Files


PEERS = {
    "TRL": {"prompt": "q", "completion": "a"},
    "TRL, messages": {"prompt": [QUESTION], "completion": [ANSWER]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "Alpaca": {"instruction": "q", "input": "", "output": "a"},
    "OpenAI": {"messages": [QUESTION, {**ANSWER, "weight": 1}]},
}


@pytest.mark.parametrize("row", PEERS.values(), ids=PEERS)
def test_files_of_other_trainers_are_read_as_they_are(row: dict[str, Any], tmp_path: Path) -> None:
    """JSON lines, a list, Parquet, a folder, and `datasets` as for the hub; a line says how each was read."""
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row))
    (tmp_path / "rows.json").write_text(json.dumps([row, row]))
    (tmp_path / "folder").mkdir()
    pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "rows.parquet")
    pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "folder" / "train-00000-of-00001.parquet")
    expected = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    for name in ("rows.jsonl", "rows.json", "rows.parquet", "folder"):
        said: list[str] = []
        request = PrepareRequest("chat", (str(tmp_path / name),), str(tmp_path / "tokenizer"), "train")
        prepare(request, tmp_path / f"{name}.store", say=said.append)
        store = TokenStore(tmp_path / f"{name}.store")
        assert [make_tokenizer().decode(sequence.input_ids) for sequence in store] == [expected] * 2
        assert f"formats: {read_chat_row(row).shape} 2" in said[-1].splitlines()
