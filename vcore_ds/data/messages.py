"""Conversion of messages, calls and tools from the forms in data sets to that of chat templates."""

import json
import re
from typing import Any

from vcore_ds.common.text import shorten

Message = dict[str, Any]
"""`role` and `content` are strings. A turn of the assistant may have `reasoning_content`, its thinking, which is then
not in `content` and not empty, `tool_calls`, whose arguments are objects, and `function_calls`, calls in a form that
only some templates read. Further keys are for the chat template."""

TEMPLATE_FIELDS = frozenset({"role", "content", "reasoning_content", "tool_calls", "function_calls"})
"""Keys of a message that every rendering takes into account, or refuses."""

CALLS = frozenset({"tool_calls", "function_calls"})  # keys of a turn of the assistant that has calls

_EXPECTED = 'Expected {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'

CALL = "tool_call"
"""Role of a turn whose text is a call (or a list of calls) as JSON; it becomes `tool_calls` of the assistant."""

SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "assistant"), "assistant"),
    "system": "system",
    **dict.fromkeys(("function_call", "tool_call"), CALL),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "function_response"), "tool"),
}
"""Names of speakers in data sets, in lower case -> role for the chat template."""

THINKING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message, and columns beside a completion, that have the assistant's thinking."""

_OPENING, _CLOSING = "<think>", "</think>"
_TAGGED = re.compile(r"\A\s*<think>\n*(.*?)\n*</think>\s*\Z", re.DOTALL)
WEIGHTS = frozenset("weight loss loss_mask loss_scale train training trainable mask masked".split())
"""Keys of OpenAI, ms-swift, Axolotl, torchtune and others that say whether a message is learned."""
MASKS = frozenset({"mask", "masked"})  # true: not learned; a number may mean either
_DETAILS = frozenset({"train_detail", "training_detail"})  # Axolotl's, for parts of a message
_TEXTS = frozenset({"text", "input_text", "output_text"})  # types of parts of a content
_PART_KEYS = ("thinking", "text", "content", "summary")  # of a part of thinking, whose first one is read
RESULTS = frozenset({"tool", "environment", "ipython"})  # roles of turns with the result of a call

UNCLOSED_THINKING = "unclosed thinking (cut off)"
EMPTY_ANSWER = "empty answer"


class Malformed(Exception):
    """The row has a wrong form; `args[0]` says what was found and expected."""


class Dropped(Exception):
    """A rule leaves out the row, which is well formed; `args[0]` is the rule."""


def split_thinking(text: str) -> tuple[str, str]:
    """Split an assistant's text into (thinking, answer) at its first `</think>`; the thinking may be empty. The opening
    `<think>` may be missing, since outputs of thinking models begin after the one in the prompt. If other text comes
    before `<think>`, everything is the answer. Raises Dropped if a `<think>` is never closed."""
    thinking, closing, answer = text.partition(_CLOSING)
    before, opening, inside = thinking.partition(_OPENING)
    if text.rpartition(_CLOSING)[2].count(_OPENING):
        raise Dropped(UNCLOSED_THINKING)
    if not closing or (opening and before.strip()):
        return "", text
    return (inside if opening else thinking).strip("\n"), answer.lstrip("\n")


def read_turn(text: str) -> Message:
    """Read a generated text as a turn of the assistant; thinking that was cut off is its content."""
    try:
        thinking, answer = split_thinking(text)
    except Dropped:
        thinking, answer = "", text
    turn = {"role": "assistant", "content": answer}
    return turn | {"reasoning_content": thinking} if thinking.strip() else turn


def check_messages(messages: Any) -> tuple[list[Message], list[int]]:
    """Return the messages in the form of `Message`, and positions of the assistant's turns that are context only.
    Raises Malformed if they are no conversation, and Dropped if a turn that is learned has no answer."""
    if not isinstance(messages, list) or not messages:
        raise Malformed(f"`messages` is {describe_value(messages)}. {_EXPECTED}.")
    checked: list[Message] = []
    learned: list[bool] = []
    for i, raw in enumerate(messages, start=1):
        message, is_learned = _parse_message(raw, f"message {i}")
        if message["role"] == CALL:
            message["role"] = "assistant"
            if checked and checked[-1]["role"] == "assistant":  # text and calls of one turn, or several calls
                checked[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
                checked[-1] = {**message, **checked[-1]}
                given = {"text": checked[-1].get("reasoning_content", ""), "call": message.get("reasoning_content", "")}
                _merge_thinking(checked[-1], given, f"message {i}")
                learned[-1] = learned[-1] and is_learned
                continue
        checked.append(message)
        learned.append(is_learned)
    roles = [message["role"] for message in checked]
    if "assistant" not in roles:
        raise Malformed(f"no turn of the assistant to learn from, found the roles {', '.join(roles)}.")
    context = [i for i, role in enumerate(roles) if role == "assistant" and not learned[i]]
    for i, message in enumerate(checked):
        if message["role"] == "assistant":
            _separate_thinking(message, f"message {i + 1}", is_learned=i not in context)
    return checked, context


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """Return the schemas of `tools` in OpenAI's form, {"type": "function", "function": {"name": ...}}, from a list of
    schemas, each with or without the outer object, as objects or JSON text, or from JSON text of a list. Raises
    Malformed."""
    tools = _parse_text(tools, "`tools`", [])
    if not isinstance(tools, list):
        raise Malformed(f"`tools` is {describe_value(tools)}, expected a list of function schemas.")
    checked = []
    for i, tool in enumerate(tools, start=1):
        tool = _parse_json(tool, f"tool {i}") if isinstance(tool, str) else tool
        if isinstance(tool, dict) and "function" not in tool:
            tool = {"type": "function", "function": tool}
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Malformed(f"tool {i} is {describe_value(tool)}, expected a function schema with a `name`.")
        checked.append(tool)
    return checked


def check_template_variables(variables: Any) -> dict[str, Any]:
    """Return the variables that a row's `chat_template_kwargs`, an object or its JSON text, give to the chat template.
    Raises Malformed."""
    variables = _parse_text(variables, "`chat_template_kwargs`", {})
    if not isinstance(variables, dict):
        raise Malformed(f"`chat_template_kwargs` is {describe_value(variables)}, expected an object.")
    return {name: value for name, value in variables.items() if value is not None}


def _parse_message(message: Any, where: str) -> tuple[Message, bool]:
    if not isinstance(message, dict):
        raise Malformed(f"{where} is {describe_value(message)}, expected an object with `role` and `content`.")
    # A parquet column gives every message all keys that any message has, with null where it has none.
    message = {key: value for key, value in message.items() if value is not None}
    for name, alias in (("role", "from"), ("content", "value")):
        if name not in message and alias in message:
            message[name] = message.pop(alias)
    if not isinstance(message.get("role"), str):
        found = (
            describe_value(message["role"]) if "role" in message else f"missing among {', '.join(message) or 'no key'}"
        )
        raise Malformed(f"{where}: `role` is {found}, expected a string.")
    role = message["role"] = SPEAKERS.get(message["role"].lower(), message["role"])
    is_learned = _read_weight(message, where)
    if not message.get("function_calls", True):
        del message["function_calls"]
    if role == CALL:
        if "content" not in message:
            raise Malformed(f"{where} has no `content`, expected a call as JSON.")
        message["tool_calls"] = message["content"]
        message["content"] = ""
    _read_calls(message, where)
    if (calls := CALLS & message.keys()) and role not in ("assistant", CALL):
        raise Malformed(f"{where}: found `{min(calls)}` in a turn of the {role}, expected them in the assistant's.")
    if role in ("assistant", CALL):
        _read_thinking(message, where)
        if calls:
            message.setdefault("content", "")
    if "content" not in message:
        raise Malformed(f"{where} has no `content`, found {', '.join(message)}.")
    message["content"] = _join_parts(message["content"])
    if not isinstance(message["content"], str):
        raise Malformed(
            f"{where}: `content` is {describe_value(message['content'])}, expected a string or parts of text."
        )
    return message, is_learned


def _read_weight(message: Message, where: str) -> bool:
    """Remove the keys that weight a message; return whether it may be learned."""
    if details := _DETAILS & message.keys():
        raise Malformed(f"{where}: `{min(details)}` leaves out parts of a turn, expected entire turns: use `train`.")
    weights = {key: message.pop(key) for key in list(message) if key in WEIGHTS}
    for key, value in weights.items():
        kinds, expected = (bool, "true or false") if key in MASKS else (int | float, "0 or 1")
        if not isinstance(value, kinds) or value not in (0, 1):
            raise Malformed(f"{where}: `{key}` is {describe_value(value)}, expected {expected}.")
        weights[key] = not value if key in MASKS else bool(value)
    if len(set(weights.values())) > 1:
        raise Malformed(f"{where}: {' and '.join(f'`{key}`' for key in weights)} contradict each other.")
    if any(weights.values()) and message["role"] not in ("assistant", CALL):
        raise Malformed(
            f"{where}: `{next(iter(weights))}` asks to learn a turn of the {message['role']}, but only turns of the "
            "assistant are learned; remove it."
        )
    return all(weights.values())


def _read_calls(message: Message, where: str) -> None:
    """Convert `tool_calls`, or OpenAI's older `function_call`; remove the key if there are none."""
    calls = message.pop("tool_calls", None) or message.pop("function_call", None)
    if not (calls := _parse_text(calls, f"{where}: the call", [])):
        return
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list):
        raise Malformed(f"{where}: `tool_calls` is {describe_value(calls)}, expected a list of calls.")
    message["tool_calls"] = [_parse_call(call, where) for call in calls]


def _parse_call(call: Any, where: str) -> dict[str, Any]:
    call = _parse_json(call, f"{where}: the call") if isinstance(call, str) else call
    if not isinstance(call, dict):
        raise Malformed(f"{where}: a call is {describe_value(call)}, expected an object.")
    call = {key: value for key, value in call.items() if value is not None}
    if "function" not in call:
        outer = {key: call.pop(key) for key in ("id", "type") if key in call}
        call = {**outer, "function": call}
    function = call["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Malformed(f"{where}: a call is {describe_value(call)}, expected a function with a `name`.")
    arguments = function.get("arguments")
    if arguments is None or arguments == [] or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    elif isinstance(arguments, str):
        arguments = _parse_json(arguments, f"{where}: `arguments` of the call of {function['name']:.60}")
    if not isinstance(arguments, dict):
        raise Malformed(
            f"{where}: `arguments` of the call of {function['name']:.60} is {describe_value(arguments)}, expected an "
            "object or its JSON text."
        )
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _read_thinking(message: Message, where: str) -> None:
    """Move thinking from other keys and from parts of the content to `reasoning_content`."""
    thinking = {key: message.pop(key) for key in THINKING if key in message}
    if details := message.pop("reasoning_details", None):  # OpenRouter's
        thinking["reasoning_details"] = _join_thinking(details, f"{where}: `reasoning_details`")
    content = message.get("content")
    if isinstance(content, list) and (parts := [part for part in content if _is_thinking(part)]):
        thinking["content"] = _join_thinking(parts, f"{where}: thinking")
        message["content"] = [part for part in content if not _is_thinking(part)] or ""
    for key, value in thinking.items():
        if not isinstance(value, str):
            raise Malformed(f"{where}: `{key}` is {describe_value(value)}, expected a string.")
        thinking[key] = _TAGGED.sub(r"\1", value)
    _merge_thinking(message, thinking, where)


def _separate_thinking(message: Message, where: str, *, is_learned: bool) -> None:
    """Move thinking from `content` to `reasoning_content`. Raises Malformed for two that differ, and Dropped where a
    turn to learn has no answer."""
    try:
        thinking, answer = split_thinking(message["content"])
    except Dropped:
        # With its thinking in a key, the turn is complete, and its answer names the marker.
        if is_learned and "reasoning_content" not in message:
            raise
        return
    if thinking.strip():
        given = {"reasoning_content": message.pop("reasoning_content", ""), "content": thinking}
        _merge_thinking(message, given, where)
    message["content"] = answer
    if is_learned and not answer.strip() and not CALLS & message.keys():
        raise Dropped(EMPTY_ANSWER)


def _merge_thinking(message: Message, thinking: dict[str, str], where: str) -> None:
    """Set `reasoning_content` to the one thinking that several places of a turn have."""
    thinking = {key: value for key, value in thinking.items() if value.strip()}
    if len({value.strip() for value in thinking.values()}) > 1:
        raise Malformed(
            f"{where}: found different thinking in {' and '.join(f'`{key}`' for key in thinking)}, expected it once."
        )
    if thinking:
        message["reasoning_content"] = next(iter(thinking.values()))


def _is_thinking(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("thinking", "reasoning")


def _join_thinking(parts: Any, where: str) -> str:
    """Join the texts of thinking parts. Raises Malformed if there are none, as in encrypted thinking."""
    texts = [text for text in map(_find_thinking, parts if isinstance(parts, list) else ()) if text is not None]
    if not texts:
        raise Malformed(f"{where} is {describe_value(parts)}, expected parts with text in {' or '.join(_PART_KEYS)}.")
    return "".join(texts)


def _find_thinking(part: Any) -> str | None:
    """Return the text of a part of thinking, or of its parts; None if it has none."""
    if isinstance(part, str):
        return part
    found = []
    for key in (key for key in _PART_KEYS if isinstance(part, dict) and part.get(key) is not None):
        items = part[key] if isinstance(part[key], list) else [part[key]]
        texts: list[Any] = [item.get("text") if isinstance(item, dict) else item for item in items]
        if all(isinstance(text, str) for text in texts):
            found.append(("\n\n" if key == "summary" else "").join(texts))
    return next(filter(None, found), "" if found else None)


def list_part_keys(messages: Any) -> set[str]:
    """List the keys of parts of the content that are not read."""
    messages = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    contents = [message.get("content", message.get("value")) for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return {str(key) for part in parts for key, value in part.items() if value is not None} - {"type", *_PART_KEYS}


def _join_parts(content: Any) -> Any:
    """Join OpenAI's list of text parts; anything else is returned as it is."""
    if isinstance(content, list) and content:
        texts: list[Any] = [p.get("text") for p in content if isinstance(p, dict) and p.get("type") in _TEXTS]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(texts)
    return content


def _parse_text(value: Any, what: str, nothing: Any) -> Any:
    """Return a value, from its JSON text if it is a string; `nothing` for an empty one, as of a cell of CSV."""
    if isinstance(value, str):
        return _parse_json(value, what) if value.strip() else nothing
    return value or nothing


def _parse_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed(f"{what} is no JSON ({shorten(text, 60)}).") from None


def describe_value(value: Any) -> str:
    """Describe type and beginning of a value, for messages."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    kinds |= {int: "a number", float: "a number"}
    named = next((name for kind, name in kinds.items() if isinstance(value, kind)), type(value).__name__)
    name = "an empty list" if value == [] else named
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except RecursionError:
        text = "nested too deeply"
    return f"{name} ({shorten(text, 60)})"
