"""`python -m tests.helpers.template_table docs/templates.md`: write the table of chat templates, with each cell checked
against `apply_chat_template` and the strings of the rows."""

import copy
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.templates import make_template_tokenizer
from vcore_ds.data.conversations import RenderedConversation, render_conversation
from vcore_ds.data.messages import Malformed
from vcore_ds.data.prepare.rows import read_chat_row

PAGE = Path(__file__).parents[2] / "docs" / "templates.md"
BEGIN, END = "<!-- templates: begin -->", "<!-- templates: end -->"
TITLE = (
    "| template | thinking is read from | one turn | two turns | calls | thinking before calls | text beside thinking "
    "| a turn ends with |"
)


class Native(NamedTuple):
    """What the model's template reads and its model generates, written down by hand."""

    title: str
    key: str  # where thinking is read; `content` for `<think>` in the content
    turn: str  # a turn with thinking {t} and answer {a}


_TAGS = "<think>\n{t}\n</think>\n\n{a}"
NATIVE = {
    "qwen3": Native("Qwen3", "reasoning_content", f"{_TAGS}<|im_end|>"),
    "qwen3_5_think": Native("Qwen3.5, thinking", "reasoning_content", "{t}\n</think>\n\n{a}<|im_end|>"),
    "qwen3_5_nothink": Native("Qwen3.5, small", "reasoning_content", "{t}\n</think>\n\n{a}<|im_end|>"),
    "qwen3_6": Native("Qwen3.6", "reasoning_content", "{t}\n</think>\n\n{a}<|im_end|>"),
    "deepseek_r1_distill": Native("DeepSeek-R1-Distill", "content", "{t}\n</think>\n\n{a}<｜end▁of▁sentence｜>"),
    "deepseek_v3": Native("DeepSeek-V3", "content", "{t}\n</think>\n\n{a}<｜end▁of▁sentence｜>"),
    "llama3_1": Native("LLaMA-3.1", "content", f"{_TAGS}<|eot_id|>"),
    "gemma2": Native("Gemma 2", "content", f"{_TAGS}<end_of_turn>"),
    "gemma4": Native("Gemma 4", "reasoning_content", "<|channel>thought\n{t}\n<channel|>{a}<turn|>"),
    "gemma4_v1": Native("Gemma 4, earlier", "reasoning_content", "<|channel>thought\n{t}\n<channel|>{a}<turn|>"),
    "mistral_nemo": Native("Mistral-Nemo", "content", f"{_TAGS}</s>"),
    "phi3": Native("Phi-3", "content", f"{_TAGS}<|end|>"),
    "phi4": Native("Phi-4-reasoning", "content", f"{_TAGS}<|im_end|>"),
    "glm4_5": Native("GLM-4.5", "reasoning_content", "\n<think>{t}</think>\n{a}<|user|>"),
    "gpt_oss": Native(
        "gpt-oss",
        "thinking",
        "<|channel|>analysis<|message|>{t}<|end|><|start|>assistant<|channel|>final<|message|>{a}<|return|>",
    ),
    "smollm2": Native("SmolLM2", "content", f"{_TAGS}<|im_end|>"),
    "nemotron_3_nano": Native("Nemotron 3 Nano", "reasoning_content", "{t}\n</think>\n{a}<|im_end|>"),
    "lfm2_5": Native("LFM2.5", "thinking", "<think>{t}</think>{a}<|im_end|>"),
}

Turn = tuple[str, str]  # thinking and answer
ASK, AGAIN = {"role": "user", "content": "How warm is it?"}, {"role": "user", "content": "And tomorrow?"}
FIRST, SECOND = ("Look outside.", "It has 18 degrees."), ("Read the forecast.", "It will have 21.")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Temperature of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALLS = [{"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]
RESULT = {"role": "tool", "content": "18", "tool_call_id": "abcdefghi", "name": "weather"}


def _say(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


FORMS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "tags": lambda t, a: _say(f"<think>\n{t}\n</think>\n\n{a}"),
    "closing tag": lambda t, a: _say(f"{t}\n</think>\n\n{a}"),
    "reasoning_content": lambda t, a: _say(a, reasoning_content=t),
    "reasoning": lambda t, a: _say(a, reasoning=t),
    "thinking": lambda t, a: _say(a, thinking=t),
    "parts": lambda t, a: _say([{"type": "thinking", "thinking": t}, {"type": "text", "text": a}]),
    "twice the same": lambda t, a: _say(f"<think>\n{t}\n</think>\n\n{a}", reasoning_content=t),
}
"""Forms in which rows have thinking."""

BESIDE = (
    (
        "First. <think>\nLook outside.\n</think>\n\nIt has 18 degrees.",
        ("First.", "Look outside.", "It has 18 degrees."),
    ),
    (
        "<think>\nLook outside.\n</think>\n\nWarm?<think>\nNo.\n</think>\n\nIt has 18 degrees.",
        ("Look outside.", "Warm?", "No.", "It has 18 degrees."),
    ),
    (
        "<think>\nThe tag <think> is in the prompt.\n</think>\n\nIt has 18 degrees.",
        ("The tag <think> is in the prompt.", "It has 18 degrees."),
    ),
)
"""Text before a block, a second block, and a tag within thinking; what must be learned of each, in order."""


def render(name: str, row: dict[str, Any]) -> RenderedConversation | None:
    """Render a row as `vcore-ds prepare` does; None where it is refused."""
    chat = read_chat_row(copy.deepcopy(row))
    try:
        return render_conversation(chat, make_template_tokenizer(name))
    except Malformed as error:
        assert str(error).startswith("the chat template of "), error
        assert re.search("refuses this conversation|(leaves out|changes) .*message [2-4]", str(error)), error
        return None


def apply_template(name: str, messages: Sequence[dict[str, Any]], tools: Any = None, **options: Any) -> str:
    """Render by transformers alone, with thinking where the template reads it."""
    native = []
    for message in messages:
        message = dict(message)
        thinking = message.pop("t", None)
        if thinking and NATIVE[name].key == "content":
            message["content"] = f"<think>\n{thinking}\n</think>\n\n{message['content']}"
        elif thinking:
            message[NATIVE[name].key] = thinking
        native.append(message)
    text = make_template_tokenizer(name).apply_chat_template(
        native, tools=tools, tokenize=False, **({"enable_thinking": True} | options)
    )
    return re.sub(r"Current date: [0-9-]+", "Current date: 2024-07-26", text)


def read_spans(item: RenderedConversation) -> list[str]:
    return [item.text[slice(*span)] for span in item.spans]


def describe_text(name: str, item: RenderedConversation, messages: Sequence[dict[str, Any]], tools: Any = None) -> str:
    """Say whether a text is that of the template, or its last turn's was appended to the prompt; assert one of them."""
    expected = apply_template(name, messages, tools).rstrip()
    if item.text.rstrip() in (expected, expected + "<|user|>"):
        return "as rendered"
    prompt = apply_template(name, messages[:-1], tools, add_generation_prompt=True)
    assert item.text[: item.spans[-1][0]] == prompt, (name, item.text, expected)
    return "after its prompt"


def describe_turns(name: str, turns: Sequence[Turn]) -> str:
    """Render a conversation in all forms of thinking: the learned turns are those that the model generates."""
    questions = (ASK, AGAIN)
    outcomes = set()
    for form in FORMS.values():
        messages = [message for ask, turn in zip(questions, turns, strict=False) for message in (ask, form(*turn))]
        item = render(name, {"messages": messages})
        assert item is not None, name
        native = [
            message for ask, (t, a) in zip(questions, turns, strict=False) for message in (ask, {**_say(a), "t": t})
        ]
        spans = read_spans(item)
        written = [NATIVE[name].turn.format(t=t, a=a) for t, a in turns]
        learned = [turn in spans for turn in written]
        assert len(spans) == sum(learned) and learned[-1], spans
        for (thinking, answer), good in zip(turns, learned, strict=True):
            assert (item.text.count(thinking), item.text.count(answer)) == (int(good), 1), item.text
        outcome = describe_text(name, item, native)
        outcomes.add(outcome if len(turns) == 1 else f"{outcome}; {'both' if all(learned) else 'the last'} learned")
    (outcome,) = outcomes
    return outcome


def describe_calls(name: str, thinking: str = "") -> str:
    """Render a call, its result and an answer with thinking, in all forms of thinking."""
    outcomes = set()
    for form in FORMS.values():
        before = form(thinking, "") | {"tool_calls": CALLS} if thinking else _say("", tool_calls=CALLS)
        messages = [ASK, before, RESULT, form(*SECOND)]
        item = render(name, {"messages": messages, "tools": TOOLS})
        if item is None:
            outcomes.add("refused")
            continue
        *calls, answer = read_spans(item)
        native = [ASK, {**_say("", tool_calls=CALLS), "t": thinking}, RESULT, {**_say(SECOND[1]), "t": SECOND[0]}]
        describe_text(name, item, native, TOOLS)
        prompt = apply_template(name, native[:-1], TOOLS, add_generation_prompt=True)
        assert item.text[: item.spans[-1][0]] == prompt, item.text
        assert (prompt + answer).endswith(NATIVE[name].turn.format(t=SECOND[0], a=SECOND[1])), answer
        assert item.text.count(SECOND[0]) == item.text.count(SECOND[1]) == 1
        for call in calls:
            assert call.count("weather") == call.count("Paris") == 1 and call.count(thinking or "weather") == 1, call
            assert "without_end" not in item.notices
        outcomes.add("learned" if calls else "context")
    (outcome,) = outcomes
    return outcome


def describe_beside(name: str) -> str:
    """Render text that a template could drop: it is learned whole, or the row is refused."""
    outcomes = []
    for content, parts in BESIDE:
        item = render(name, {"messages": [ASK, _say(content)]})
        outcomes.append("refused" if item is None else "learned")
        if item is not None:
            (span,) = read_spans(item)
            assert "without_end" not in item.notices, name
            at = 0
            for part in parts:
                assert span.count(part) == 1, span
                at = span.index(part, at)
    return outcomes[0] if len(set(outcomes)) == 1 else ", ".join(outcomes)


def describe_template(name: str) -> str:
    """Write a template's line of the table. Raises AssertionError where a row is learned otherwise than it is."""
    native = NATIVE[name]
    key = "`<think>` in the text" if native.key == "content" else f"`{native.key}`"
    end = re.search(r"<[^<>]+>\Z", native.turn)
    assert end is not None
    cells = [
        native.title,
        key,
        describe_turns(name, [FIRST]),
        describe_turns(name, [FIRST, SECOND]),
        describe_calls(name),
        describe_calls(name, "Look it up."),
        describe_beside(name),
        f"`{end[0]}`".replace("|", "\\|"),
    ]
    return f"| {' | '.join(cells)} |"


def make_table() -> str:
    """Write the table."""
    lines = [TITLE, "|---" * TITLE.count(" | ") + "|---|", *map(describe_template, NATIVE)]
    return "\n".join(lines)


def read_table(page: Path = PAGE) -> str:
    """Read the table of the page."""
    return page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


if __name__ == "__main__":
    page = Path(sys.argv[1])
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{make_table()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
