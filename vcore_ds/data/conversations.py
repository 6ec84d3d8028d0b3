"""Conversations from a file, each checked where it stands."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcore_ds.errors import UserError

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
        return f"{self.path}:{self.row}"


def split_thinking(text: str) -> tuple[str, str] | None:
    """(thinking, answer) of a text that is exactly one `<think>` pair and what follows it; else None."""
    thinking, closing, answer = text.partition("</think>")
    before, opening, thinking = thinking.partition("<think>")
    if before.strip() or not (opening and closing) or "<think>" in thinking + answer or "</think>" in answer:
        return None
    return thinking.strip("\n"), answer.lstrip("\n")


def read_conversations(path: str | Path) -> list[Conversation]:
    """All conversations of a `.jsonl`/`.json` file (an object a line) or a `.parquet` file with the column `messages`.

    Blank lines are skipped. Raises `UserError` with file and line for the first row that is not a conversation,
    and for a file that is missing, a folder, empty or of another kind.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: found a folder, expected one .jsonl, .json or .parquet file.")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file (looked from {Path.cwd()}).")
    readers = {".jsonl": _json_lines, ".json": _json_lines, ".parquet": _parquet_rows}
    if path.suffix.lower() not in readers:
        raise UserError(f"{path}: found a file ending in {path.suffix!r}, expected .jsonl, .json or .parquet.")
    rows = readers[path.suffix.lower()](path)
    conversations = [Conversation(row, check_messages(value, f"{path}:{row}"), str(path)) for row, value in rows]
    if not conversations:
        raise UserError(f"{path}: the file is empty. {_EXPECTED} in each row.")
    return conversations


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    # Bytes, because text that is not UTF-8 would fail as a block that nobody can find, not as a line.
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if line_number == 1 else "utf-8").strip()
                if text:
                    yield line_number, json.loads(text)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}:{line_number}: not UTF-8 text ({error.reason} at byte {error.start})."
                ) from None
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}:{line_number}: not JSON ({error.msg} at column {error.colno}): found {_shorten(text)}. "
                    f"{_EXPECTED} on each line, without line breaks inside."
                ) from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f"{path}: reading parquet needs the package `pyarrow`: pip install pyarrow.") from None
    try:
        columns = pq.read_schema(path).names
        if "messages" not in columns:
            raise UserError(f"{path}: no column `messages`, found {', '.join(columns)}.")
        rows = pq.read_table(path, columns=["messages"]).to_pylist()
    except pa.ArrowException as error:
        raise UserError(f"{path}: not a readable parquet file ({error}).") from None
    yield from enumerate(rows, start=1)


def check_messages(row: Any, location: str) -> list[Message]:
    """The messages of a row {"messages": [..]}, without their null keys. Raises `UserError` that begins with `location`
    for what is no conversation."""
    if not isinstance(row, dict):
        raise UserError(f"{location}: found {_kind(row)}. {_EXPECTED}.")
    if "messages" not in row:
        raise UserError(f"{location}: no key `messages`, found {', '.join(row) or 'no key at all'}. {_EXPECTED}.")
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{location}: `messages` is {_kind(messages)}. {_EXPECTED}.")
    checked = [_message(message, f"{location}: message {i}") for i, message in enumerate(messages, start=1)]
    if not any(message["role"] == "assistant" for message in checked):
        roles = ", ".join(message["role"] for message in checked)
        raise UserError(f"{location}: no turn of the assistant to learn from, found the roles {roles}.")
    return checked


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"{where} is {_kind(message)}, expected an object with `role` and `content`.")
    # A parquet column gives every message all keys that any message has, with null where it has none.
    message = {key: value for key, value in message.items() if value is not None}
    for key in ("role", "content"):
        if key not in message:
            raise UserError(f"{where} has no `{key}`, found {', '.join(message) or 'no key at all'}.")
        if not isinstance(message[key], str):
            raise UserError(f"{where}: `{key}` is {_kind(message[key])}, expected a string.")
    return message


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    name = "an empty list" if value == [] else kinds.get(type(value), "a number")
    return f"{name} ({_shorten(json.dumps(value, ensure_ascii=False))})"


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
