"""Rows with functions and calls, against transformers' rendering by the chat templates of real models."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Json, List

from tests.helpers.conversations import prepare_rows
from tests.helpers.template_table import TOOLS as WEATHER
from tests.helpers.templates import decode_supervised_spans, make_template_tokenizer
from vcore_ds.data.conversations import render_conversation
from vcore_ds.data.messages import Malformed
from vcore_ds.data.prepare.rows import read_chat_row, read_chat_rows
from vcore_ds.data.prepare.sources import find_files
from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import TokenizedSequence, tokenize_rendered

NOW = {"name": "now", "description": "The time.", "parameters": {"type": "object"}}
TOOLS = [*WEATHER, {"type": "function", "function": NOW}]
ASK = {"role": "user", "content": "How warm is Paris?"}
FINAL = {"role": "assistant", "content": "It has 18 degrees."}


def make_call(name: str = "weather", arguments: Any = None, **turn: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": {"city": "Paris"} if arguments is None else arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]} | turn


def make_result(text: str = "18") -> dict[str, Any]:
    return {"role": "tool", "content": text}


CALLED = [ASK, make_call(), make_result(), FINAL]
TWICE = [ASK, make_call(tool_calls=make_call()["tool_calls"] * 2), make_result(), FINAL]


def tokenize_row(template: str, row: dict[str, Any], supervise: Any = "all") -> TokenizedSequence:
    tokenizer, row = make_template_tokenizer(template), copy.deepcopy(row)
    return tokenize_rendered([render_conversation(read_chat_row(row), tokenizer, supervise)], tokenizer)[0]


def compute_reference_ids(template: str, messages: list[dict], tools: Any = TOOLS, **options: Any) -> list[int]:
    """Token ids by transformers alone; of gpt-oss's, which prints today's date, with ours."""
    tokenizer = make_template_tokenizer(template)
    if template == "gpt_oss":
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
        text = re.sub(r"Current date: [0-9-]+", "Current date: 2024-07-26", text)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer.apply_chat_template(messages, tools=tools, return_dict=False, **options)


QWEN3_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
QWEN3_FINAL = "It has 18 degrees.<|im_end|>"
EMPTY = "<think>\n\n</think>\n\n"
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>'
LLAMA_FINAL = "It has 18 degrees.<|eot_id|>"
GPT_OSS_CALL = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
GPT_OSS_FINAL = "<|channel|>final<|message|>It has 18 degrees.<|return|>"
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = {"reasoning_content": "Look it up."}

# template, messages, the assistant's turns as the model generates them.
RENDERED: dict[str, tuple[str, list[dict[str, Any]], list[str]]] = {
    "qwen3": ("qwen3", CALLED, [QWEN3_CALL, EMPTY + QWEN3_FINAL]),
    "qwen3, two steps": (
        "qwen3",
        [SYSTEM, ASK, make_call(), make_result(), make_call("now", {}), make_result("12:00"), FINAL],
        [QWEN3_CALL, QWEN3_CALL.replace("weather", "now").replace('{"city": "Paris"}', "{}"), EMPTY + QWEN3_FINAL],
    ),
    "qwen3, thinking in both steps": (
        "qwen3",
        [ASK, make_call(**THOUGHT), make_result(), FINAL | THOUGHT],
        [f"<think>\nLook it up.\n</think>\n\n{turn}" for turn in (QWEN3_CALL, QWEN3_FINAL)],
    ),
    "qwen3, a call at the end": ("qwen3", [ASK, make_call()], [EMPTY + QWEN3_CALL]),
    "qwen3, text beside the call": (
        "qwen3",
        [ASK, make_call(content="Let me see.")],
        [f"{EMPTY}Let me see.\n{QWEN3_CALL}"],
    ),
    "qwen3, a second question": (
        "qwen3",
        [ASK, make_call(), make_result(), FINAL, ASK, make_call(), make_result(), FINAL],
        [QWEN3_CALL, QWEN3_FINAL, QWEN3_CALL, EMPTY + QWEN3_FINAL],
    ),
    "qwen3, nothing left out of a role that it does not write": (
        "qwen3",
        [{"role": "developer", "content": " "}, *CALLED],
        [QWEN3_CALL, EMPTY + QWEN3_FINAL],
    ),
    "llama3_1": ("llama3_1", CALLED, [LLAMA_CALL, LLAMA_FINAL]),
    "llama3_1, a call at the end": ("llama3_1", [SYSTEM, ASK, make_call()], [LLAMA_CALL]),
    "llama3_1, a second question": (
        "llama3_1",
        [ASK, make_call(), make_result(), FINAL, ASK, FINAL],
        [LLAMA_CALL, LLAMA_FINAL, LLAMA_FINAL],
    ),
    "gpt_oss": ("gpt_oss", [SYSTEM, ASK, make_call(), make_result(), FINAL], [GPT_OSS_CALL, GPT_OSS_FINAL]),
    "gpt_oss, thinking at the end": (
        "gpt_oss",
        [ASK, make_call(), make_result(), {**FINAL, "thinking": "So 18."}],
        [GPT_OSS_CALL, f"<|channel|>analysis<|message|>So 18.<|end|><|start|>assistant{GPT_OSS_FINAL}"],
    ),
    "gpt_oss, thinking before a call": (
        "gpt_oss",
        [ASK, make_call(thinking="Look it up.")],
        [f"<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant{GPT_OSS_CALL}"],
    ),
}


@pytest.mark.parametrize(("template", "messages", "turns"), RENDERED.values(), ids=RENDERED)
def test_tools_and_calls_are_rendered_as_by_transformers_and_calls_are_supervised(
    template: str, messages: list[dict[str, Any]], turns: list[str]
) -> None:
    sequence = tokenize_row(template, {"messages": messages, "tools": TOOLS})
    assert sequence.input_ids.tolist() == compute_reference_ids(template, messages)
    assert decode_supervised_spans(template, sequence) == turns
    # Each is predicted from the prompt that the model is given at inference.
    starts = np.flatnonzero(np.diff(sequence.supervised.astype(int)) == 1) + 1
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for start, turn in zip(starts, assistant, strict=True):
        if turn == assistant[-1] or template != "gpt_oss":
            expected = compute_reference_ids(template, messages[:turn], add_generation_prompt=True)
            assert sequence.input_ids[:start].tolist() == expected


def test_thinking_before_a_call_of_gpt_oss_is_context_of_its_answer_as_at_inference() -> None:
    """Its template drops such thinking once an answer follows, but not from the prompt of this answer."""
    messages = [ASK, make_call(thinking="Look it up."), make_result(), FINAL]
    sequence = tokenize_row("gpt_oss", {"messages": messages, "tools": TOOLS})
    prompt = compute_reference_ids("gpt_oss", messages[:-1], add_generation_prompt=True)
    assert sequence.input_ids[: len(prompt)].tolist() == prompt
    analysis = "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant"
    assert decode_supervised_spans("gpt_oss", sequence) == [analysis + GPT_OSS_CALL, GPT_OSS_FINAL]


def test_calls_before_a_later_question_lose_their_thinking_and_are_context() -> None:
    messages = [ASK, make_call(**THOUGHT), make_result(), FINAL | THOUGHT, ASK, FINAL | THOUGHT]
    sequence = tokenize_row("qwen3", {"messages": messages, "tools": TOOLS})
    assert sequence.input_ids.tolist() == compute_reference_ids("qwen3", messages)
    assert decode_supervised_spans("qwen3", sequence) == [f"<think>\nLook it up.\n</think>\n\n{QWEN3_FINAL}"]


FUNCTION = {"name": "weather", "arguments": '{"city":"Paris"}'}
OPENAI_CALL = [{"id": "1", "type": "function", "function": FUNCTION}]
OPENAI_RESULT = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "18"}]}
OTHER_FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {  # call, result, tools
    "OpenAI: arguments as text, content null": (
        {"role": "assistant", "content": None, "tool_calls": OPENAI_CALL},
        OPENAI_RESULT,
        TOOLS,
    ),
    "OpenAI's older function_call": (
        {"role": "assistant", "content": None, "function_call": FUNCTION},
        {"role": "function", "name": "weather", "content": "18"},
        TOOLS,
    ),
    "no content, bare functions": (
        {"role": "assistant", "tool_calls": [FUNCTION]},
        make_result(),
        [tool["function"] for tool in TOOLS],
    ),
    "ms-swift: turns of calls, tools as text": (
        {"role": "tool_call", "content": json.dumps(FUNCTION)},
        {**make_result(), "role": "tool_response"},
        json.dumps(TOOLS),
    ),
}


@pytest.mark.parametrize("template", ["qwen3", "llama3_1", "gpt_oss"])
@pytest.mark.parametrize(("call", "result", "tools"), OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_forms_of_calls_and_tools_are_equivalent(template: str, call: dict, result: dict, tools: Any) -> None:
    expected = tokenize_row(template, {"messages": CALLED, "tools": TOOLS})
    sequence = tokenize_row(template, {"messages": [ASK, call, result, FINAL], "tools": tools})
    np.testing.assert_array_equal(sequence.input_ids, expected.input_ids)
    np.testing.assert_array_equal(sequence.supervised, expected.supervised)


@pytest.mark.parametrize(
    "result",
    [make_result(), {"role": "user", "content": "<tool_response>\n18\n</tool_response>"}],
    ids=["tool", "user"],
)
def test_calls_as_text_are_learned_without_a_column_of_tools(result: dict[str, Any]) -> None:
    """Qwen3's template adds an empty block of thinking to the last turn alone."""
    thinking = "<think>\nLook it up.\n</think>\n\n"
    for thought, first, last in (({}, "", EMPTY), (THOUGHT, thinking, thinking)):
        call = {"role": "assistant", "content": "[weather(city='Paris')]", **thought}
        messages = [ASK, call, result, FINAL | thought]
        sequence = tokenize_row("qwen3", {"messages": messages})
        assert sequence.input_ids.tolist() == compute_reference_ids("qwen3", messages, None)
        turns = [f"{first}[weather(city='Paris')]<|im_end|>", last + QWEN3_FINAL]
        assert decode_supervised_spans("qwen3", sequence) == turns


FUNCTION_CALLS = {"role": "assistant", "function_calls": "weather(city='Paris')"}


@pytest.mark.parametrize("calls", [FUNCTION_CALLS["function_calls"], ["weather(", "city='Paris')"]])
@pytest.mark.parametrize("content", [None, "", "Let me see."])
def test_function_calls_are_learned_where_the_template_reads_them(content: str | None, calls: Any) -> None:
    """The key of OLMo's templates, also with null in a table, and as a list that the template joins."""
    tokenizer = copy.copy(make_template_tokenizer("qwen3"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}{% if m.function_calls %}"
        "{{ '<function_calls>' + (m.function_calls | join) + '</function_calls>' }}{% endif %}{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    call = {**FUNCTION_CALLS, "function_calls": calls, "content": content}
    messages = [ASK, call, {"role": "environment", "content": "18"}, FINAL]
    rendered = render_conversation(read_chat_row({"messages": messages}), tokenizer)
    assert rendered.text == tokenizer.apply_chat_template(messages, tokenize=False)
    learned = f"{content or ''}<function_calls>weather(city='Paris')</function_calls><|im_end|>"
    assert [rendered.text[slice(*span)] for span in rendered.spans] == [learned, QWEN3_FINAL]


def test_calls_in_sharegpt_and_several_calls_of_a_turn_are_read() -> None:
    now = json.dumps({"name": "now", "arguments": {}})
    texts = [("human", ASK["content"]), ("gpt", "Let me see."), ("function_call", json.dumps(FUNCTION))]
    texts += [("function_call", now), ("observation", "18"), ("observation", "12:00"), ("gpt", FINAL["content"])]
    turns = [{"from": speaker, "value": text} for speaker, text in texts]
    turn_with_two_calls = make_call(content="Let me see.")
    turn_with_two_calls["tool_calls"].extend(make_call("now", {})["tool_calls"])
    messages = [ASK, turn_with_two_calls, make_result(), make_result("12:00"), FINAL]
    sequence = tokenize_row("qwen3", {"conversations": turns, "tools": json.dumps(TOOLS)})
    assert sequence.input_ids.tolist() == compute_reference_ids("qwen3", messages)
    first, _ = decode_supervised_spans("qwen3", sequence)
    assert first.startswith("Let me see.\n<tool_call>") and first.count("<tool_call>") == 2


def test_calls_without_arguments_and_in_other_forms_are_one() -> None:
    def read(calls: Any, tools: Any = None) -> list[dict[str, Any]]:
        turn = {"role": "assistant", "tool_calls": calls, "function_calls": []}
        row = {"messages": [ASK, turn, FINAL | {"tool_calls": tools}], "tools": tools, "chat_template_kwargs": tools}
        return read_chat_row(row).messages[1]["tool_calls"]

    for arguments in (None, [], {}, "", " \n", "{}"):
        function = {"name": "now"} | ({} if arguments is None else {"arguments": arguments})
        assert read([{"id": "7", **function}]) == [{"id": "7", **make_call("now", {})["tool_calls"][0]}]
    texts, null = [json.dumps(FUNCTION)], [{"id": None, "function": FUNCTION}]
    for calls in (json.dumps([FUNCTION]), FUNCTION, texts, null, [{"type": "function", **FUNCTION}]):
        assert read(calls, " \n") == make_call()["tool_calls"]
    tools = read_chat_row({"messages": [ASK, FINAL], "tools": [json.dumps(tool) for tool in TOOLS]}).tools
    assert tools == TOOLS


def test_a_turn_of_a_call_belongs_to_the_text_before_it() -> None:
    """With its thinking, its further keys and its weight."""
    text, call = FINAL | {"content": "So."}, {"role": "tool_call", "content": json.dumps(FUNCTION), "id": 3}
    chat = read_chat_row({"messages": [ASK, text, call | THOUGHT | {"weight": 0}, make_result(), FINAL]})
    assert chat.messages[1] == make_call(content="So.", id=3) | THOUGHT and chat.context_turns == [1]
    with pytest.raises(Malformed, match="message 3: found different thinking in `text` and `call`"):
        read_chat_row({"messages": [ASK, text | {"reasoning": "No."}, call | THOUGHT]})
    thinking = make_call(content=[{"type": "thinking", "thinking": "Look it up."}])
    assert read_chat_row({"messages": [ASK, thinking]}).messages[1] == make_call() | THOUGHT


BARE = {"name": "weather", "parameters": {"type": "object"}}
LEFT_OUT = {
    "no calls in the template": ("smollm2", CALLED, TOOLS, "the call of message 2 and `tools`"),
    "no tools in the template": ("smollm2", [ASK, FINAL], TOOLS, "leaves out `tools`"),
    "calls alone": ("deepseek_r1_distill", CALLED, None, "the call of message 2"),
    "a call alone": ("smollm2", [ASK, make_call(content="Let me see.")], None, "the call of message 2"),
    "text beside a call": (
        "llama3_1",
        [ASK, make_call(content="Let me see."), make_result(), FINAL],
        TOOLS,
        "the text beside the call in message 2 (assistant)",
    ),
    "second call": ("gpt_oss", TWICE, TOOLS, "the calls of message 2"),
    "two calls": (
        "llama3_1",
        TWICE,
        TOOLS,
        "(roles user, assistant, tool, assistant): This model only supports single",
    ),
    "no description": ("gpt_oss", CALLED, [TOOLS[1], BARE], "refuses this conversation"),
    "description null": ("gpt_oss", [ASK, FINAL], [{"name": "now", "description": None}], "refuses this conversation"),
    "function_calls": ("qwen3", [ASK, FUNCTION_CALLS], None, "leaves out `function_calls` of message 2"),
    "function_calls beside text": ("llama3_1", [ASK, FINAL | FUNCTION_CALLS], None, "`function_calls` of message 2"),
    "function_calls, a list": (
        "qwen3",
        [ASK, FUNCTION_CALLS | {"function_calls": [1]}],
        None,
        "`function_calls` of message 2",
    ),
    "gemma4, text after results": ("gemma4", [ASK, make_call(content="So?"), make_result(), FINAL], TOOLS, "otherwise"),
    "role": ("qwen3", [{"role": "developer", "content": "Be brief."}, ASK, FINAL], None, "message 1 (developer)"),
}


@pytest.mark.parametrize(("template", "messages", "tools", "reason"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_rows_that_a_template_cannot_render_are_refused(
    template: str, messages: list[dict[str, Any]], tools: Any, reason: str
) -> None:
    with pytest.raises(Malformed) as error:
        tokenize_row(template, {"messages": messages, "tools": tools})
    assert str(error.value).startswith("the chat template of ") and reason in str(error.value)
    if reason == "otherwise":  # its advice: none of the last turn is learned
        row = {"messages": [*messages[:-1], messages[-1] | {"weight": 0}], "tools": tools}
        assert not tokenize_row(template, row).supervised.any()


OF_WEATHER = "`arguments` of the call of weather is"
MALFORMED = {
    "arguments": ([ASK, make_call(arguments="{city")], None, f"message 2: {OF_WEATHER} no JSON"),
    "list": ([ASK, make_call(arguments=[1])], None, f"{OF_WEATHER} a list ([1]), expected an object"),
    "no name": ([ASK, make_call(name=None)], None, "message 2: a call is an object"),
    "calls of the user": ([{**make_call(), "role": "user"}, FINAL], None, "found `tool_calls` in a turn of the user"),
    "tools": ([ASK, FINAL], "weather", "`tools` is no JSON (weather)"),
    "brackets": ([ASK, make_call(arguments="[" * 100_000), FINAL], None, f"{OF_WEATHER} no JSON"),
    "no schema": ([ASK, FINAL], [{"description": "x"}], "tool 1 is an object"),
}


@pytest.mark.parametrize(("messages", "tools", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_calls_and_tools_name_what_is_wrong(messages: Any, tools: Any, reason: str) -> None:
    with pytest.raises(Malformed) as malformed:
        read_chat_row({"messages": messages, "tools": tools})
    assert reason in malformed.value.args[0]


def test_json_columns_are_objects_as_datasets_returns_them(tmp_path: Path) -> None:
    """Of entire messages, and of a single field; a null in JSON is an argument, unlike one that a table adds."""
    rows = [
        {
            "messages": [ASK, make_call(arguments={"city": "Paris", "unit": None}), make_result(), FINAL],
            "tools": TOOLS[:1],
        },
        {"messages": [ASK, make_call("now", {}), make_result("12:00"), FINAL], "tools": TOOLS[1:]},
    ]
    texts = {key: List(Json()) for key in ("messages", "tools")}
    Dataset.from_list(rows, features=Features(texts)).to_parquet(tmp_path / "all.parquet")
    Dataset.from_list(rows, features=Features(texts)).save_to_disk(tmp_path / "arrow")
    Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(tmp_path / "some.parquet")
    expected = [read_chat_row(row) for row in rows]
    for name in ("all.parquet", "arrow", "some.parquet"):
        (file,) = find_files([str(tmp_path / name)], "train")
        assert list(read_chat_rows(file)) == expected, name


def test_tools_in_parquet_and_json_lines_are_the_same(tmp_path: Path) -> None:
    """Parquet gives every object the keys of all, with null where a row has none; in JSON a null is an argument."""
    make_template_tokenizer("qwen3").save_pretrained(tmp_path / "tokenizer")
    rows = [
        {"messages": [ASK, make_call("weather", {"city": "Paris"}), make_result(), FINAL], "tools": TOOLS},
        {"messages": [ASK, make_call("now", {"zone": "UTC"}), make_result("12:00"), FINAL], "tools": TOOLS[1:]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = []
    for source in ("rows.parquet", "rows.jsonl"):
        prepare_rows(tmp_path / source, tmp_path / f"{source}.store", tmp_path / "tokenizer")
        store = TokenStore(tmp_path / f"{source}.store")
        texts.append([make_template_tokenizer("qwen3").decode(sequence.input_ids) for sequence in store])
    assert texts[0] == texts[1] and '{"name": "now", "arguments": {"zone": "UTC"}}' in texts[0][1]
    with_null = tokenize_row("qwen3", {"messages": [ASK, make_call(arguments={"city": None}), make_result(), FINAL]})
    assert '"arguments": {"city": null}' in make_template_tokenizer("qwen3").decode(with_null.input_ids)
