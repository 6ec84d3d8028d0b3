"""Conversion of messages, calls and tools from the forms in data sets to that of chat templates."""

import json
from typing import Any

from vcore_ds.common.text import shorten

Message = dict[str, Any]
"""`role` and `content` are strings. A turn of the assistant may have `reasoning_content`, a string, and `tool_calls`,
whose arguments are objects. Further keys are for the chat template."""

TEMPLATE_FIELDS = frozenset({"role", "content", "reasoning_content", "tool_calls"})
"""Keys of a message that every rendering takes into account, or refuses."""

_EXPECTED = 'Expected {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'

CALL = "tool_call"
"""Role of a turn whose text is a call (or a list of calls) as JSON; it becomes `tool_calls` of the assistant."""

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": CALL,
    "tool_call": CALL,
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
}
"""Names of speakers in data sets, in lower case -> role for the chat template."""

_THINKING = ("reasoning_content", "thinking", "reasoning")
WEIGHTS = frozenset({"weight", "loss", "train"})
"""Keys of OpenAI, ms-swift and Axolotl that say whether a message is learned."""


def split_thinking(text: str) -> tuple[str, str] | None:
    """Split a text into (thinking, answer); None unless it is exactly one `<think>` pair and the answer after it."""
    thinking, closing, answer = text.partition("</think>")
    before, opening, thinking = thinking.partition("<think>")
    if before.strip() or not (opening and closing) or "<think>" in thinking + answer or "</think>" in answer:
        return None
    return thinking.strip("\n"), answer.lstrip("\n")


def check_messages(messages: Any) -> tuple[list[Message], list[int]]:
    """Return the messages for the chat template, and positions of the assistant's turns that are context only. Raises
    ValueError if they are no conversation."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`messages` is {describe_value(messages)}. {_EXPECTED}.")
    checked: list[Message] = []
    learned: list[bool] = []
    for i, raw in enumerate(messages, start=1):
        message, is_learned = _parse_message(raw, f"message {i}")
        if message["role"] == CALL:
            message["role"] = "assistant"
            if checked and checked[-1]["role"] == "assistant":  # text and calls of one turn, or several calls
                checked[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
                learned[-1] = learned[-1] and is_learned
                continue
        checked.append(message)
        learned.append(is_learned)
    roles = [message["role"] for message in checked]
    if "assistant" not in roles:
        raise ValueError(f"no turn of the assistant to learn from, found the roles {', '.join(roles)}.")
    return checked, [i for i, role in enumerate(roles) if role == "assistant" and not learned[i]]


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """Return the schemas of `tools` in OpenAI's form, {"type": "function", "function": {"name": ...}}, from a list of
    schemas, each with or without the outer object, as objects or JSON text, or from JSON text of a list. Raises
    ValueError."""
    tools = _parse_json(tools, "`tools`") if isinstance(tools, str) and tools.strip() else tools or []
    if not isinstance(tools, list):
        raise ValueError(f"`tools` is {describe_value(tools)}, expected a list of function schemas.")
    checked = []
    for i, tool in enumerate(tools, start=1):
        tool = _parse_json(tool, f"tool {i}") if isinstance(tool, str) else tool
        if isinstance(tool, dict) and "function" not in tool:
            tool = {"type": "function", "function": tool}
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool {i} is {describe_value(tool)}, expected a function schema with a `name`.")
        checked.append(tool)
    return checked


def _parse_message(message: Any, where: str) -> tuple[Message, bool]:
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {describe_value(message)}, expected an object with `role` and `content`.")
    # A parquet column gives every message all keys that any message has, with null where it has none.
    message = {key: value for key, value in message.items() if value is not None}
    for name, alias in (("role", "from"), ("content", "value")):
        if name not in message and alias in message:
            message[name] = message.pop(alias)
    if "role" not in message:
        raise ValueError(f"{where} has no `role`, found {', '.join(message) or 'no key at all'}.")
    if not isinstance(message["role"], str):
        raise ValueError(f"{where}: `role` is {describe_value(message['role'])}, expected a string.")
    role = message["role"] = SPEAKERS.get(message["role"].lower(), message["role"])
    is_learned = _read_weight(message, where)
    if role == CALL:
        if "content" not in message:
            raise ValueError(f"{where} has no `content`, expected a call as JSON.")
        message["tool_calls"] = message["content"]
        message["content"] = ""
    calls = _read_calls(message, where)
    if calls and role not in ("assistant", CALL):
        raise ValueError(f"{where}: found `tool_calls` in a turn of the {role}, expected them in the assistant's.")
    if role == "assistant":
        _read_thinking(message, where)
        if calls:
            message.setdefault("content", "")
    if "content" not in message:
        raise ValueError(f"{where} has no `content`, found {', '.join(message)}.")
    message["content"] = _join_parts(message["content"])
    if not isinstance(message["content"], str):
        raise ValueError(f"{where}: `content` is {describe_value(message['content'])}, expected a string.")
    return message, is_learned


def _read_weight(message: Message, where: str) -> bool:
    """Remove the keys that weight a message; return whether it may be learned."""
    weights = {key: message.pop(key) for key in list(message) if key in WEIGHTS}
    for key, value in weights.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise ValueError(f"{where}: `{key}` is {describe_value(value)}, expected 0 or 1.")
    if len(set(weights.values())) > 1:
        raise ValueError(f"{where}: {' and '.join(f'`{key}`' for key in weights)} contradict each other.")
    if any(weights.values()) and message["role"] not in ("assistant", CALL):
        raise ValueError(
            f"{where}: `{next(iter(weights))}` asks to learn a turn of the {message['role']}, but only turns of the "
            "assistant are learned; remove it or set it to 0."
        )
    return all(weights.values())


def _read_calls(message: Message, where: str) -> list[dict[str, Any]]:
    """Convert `tool_calls`, or OpenAI's older `function_call`; remove the key if there are none."""
    calls = message.pop("tool_calls", None) or message.pop("function_call", None)
    calls = _parse_json(calls, f"{where}: the call") if isinstance(calls, str) else calls
    if not calls:
        return []
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list):
        raise ValueError(f"{where}: `tool_calls` is {describe_value(calls)}, expected a list of calls.")
    message["tool_calls"] = [_parse_call(call, where) for call in calls]
    return message["tool_calls"]


def _parse_call(call: Any, where: str) -> dict[str, Any]:
    call = _parse_json(call, f"{where}: the call") if isinstance(call, str) else call
    if not isinstance(call, dict):
        raise ValueError(f"{where}: a call is {describe_value(call)}, expected an object.")
    call = {key: value for key, value in call.items() if value is not None}
    if "function" not in call:
        outer = {key: call.pop(key) for key in ("id", "type") if key in call}
        call = {**outer, "function": call}
    function = call["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a call is {describe_value(call)}, expected a function with a `name`.")
    arguments = function.get("arguments")
    if arguments is None or arguments == [] or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    elif isinstance(arguments, str):
        arguments = _parse_json(arguments, f"{where}: `arguments` of the call of {function['name']:.60}")
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{where}: `arguments` of the call of {function['name']:.60} is {describe_value(arguments)}, expected an "
            "object or its JSON text."
        )
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _read_thinking(message: Message, where: str) -> None:
    """Move thinking to `reasoning_content`; remove the key if there is none."""
    thinking = {key: message.pop(key) for key in _THINKING if key in message}
    for key, value in thinking.items():
        if not isinstance(value, str):
            raise ValueError(f"{where}: `{key}` is {describe_value(value)}, expected a string.")
    texts = {value for value in thinking.values() if value.strip()}
    if len(texts) > 1:
        raise ValueError(f"{where}: {' and '.join(f'`{key}`' for key in thinking)} differ, expected one of them.")
    if texts:
        message["reasoning_content"] = texts.pop()


def _join_parts(content: Any) -> Any:
    """Join OpenAI's list of text parts; anything else is returned as it is."""
    if isinstance(content, list) and content:
        texts: list[Any] = [p.get("text") for p in content if isinstance(p, dict) and p.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(texts)
    return content


def _parse_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{what} is no JSON ({shorten(text, 60)}).") from None


def describe_value(value: Any) -> str:
    """Describe type and beginning of a value, for messages."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    kinds |= {int: "a number", float: "a number"}
    name = "an empty list" if value == [] else kinds.get(type(value), type(value).__name__)
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except RecursionError:
        text = "nested too deeply"
    return f"{name} ({shorten(text, 60)})"
