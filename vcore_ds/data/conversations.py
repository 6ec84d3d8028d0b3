"""Conversations: their messages, checked."""

import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""`role` and `content` are strings; further keys (`reasoning_content`, ..) are there for the chat template."""

_EXPECTED = 'Expected {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


@dataclass(frozen=True)
class Conversation:
    """One row of a data file."""

    row: int
    """Line of a JSON-lines file or row of a parquet file, from 1."""
    messages: list[Message]
    """At least one of them by the assistant."""
    path: str = ""
    """The file, for messages about this conversation."""

    @property
    def location(self) -> str:
        """`path:row`, with which messages about it begin."""
        return f"{self.path}:{self.row}"


def split_thinking(text: str) -> tuple[str, str] | None:
    """(thinking, answer) of a text that is exactly one `<think>` pair and what follows it; else None."""
    thinking, closing, answer = text.partition("</think>")
    before, opening, thinking = thinking.partition("<think>")
    if before.strip() or not (opening and closing) or "<think>" in thinking + answer or "</think>" in answer:
        return None
    return thinking.strip("\n"), answer.lstrip("\n")


def check_messages(messages: Any) -> list[Message]:
    """The messages of a conversation, without their null keys. Raises ValueError with what was found and expected."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`messages` is {_kind(messages)}. {_EXPECTED}.")
    checked = [_message(message, f"message {i}") for i, message in enumerate(messages, start=1)]
    if not any(message["role"] == "assistant" for message in checked):
        roles = ", ".join(message["role"] for message in checked)
        raise ValueError(f"no turn of the assistant to learn from, found the roles {roles}.")
    return checked


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {_kind(message)}, expected an object with `role` and `content`.")
    # A parquet column gives every message all keys that any message has, with null where it has none.
    message = {key: value for key, value in message.items() if value is not None}
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f"{where} has no `{key}`, found {', '.join(message) or 'no key at all'}.")
        if not isinstance(message[key], str):
            raise ValueError(f"{where}: `{key}` is {_kind(message[key])}, expected a string.")
    return message


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    kinds |= {int: "a number", float: "a number"}
    name = "an empty list" if value == [] else kinds.get(type(value), type(value).__name__)
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except RecursionError:
        text = "nested too deeply"
    return f"{name} ({_shorten(text)})"


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
