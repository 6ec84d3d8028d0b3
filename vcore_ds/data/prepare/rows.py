"""Reading of conversations from rows in the shapes of fine-tuning data sets."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from vcore_ds.data.messages import SPEAKERS, TEMPLATE_FIELDS, WEIGHTS, Message, check_messages, check_tools
from vcore_ds.data.prepare.sources import BLANK, Broken, Shard

MESSAGE_FIELD = "messages."  # before the name of an ignored field of messages; columns of rows have none

_EXPECTED = (
    "expected `messages`, `conversations`, `prompt` and `completion`, or `instruction` and `output`: rename the keys "
    "(a question to `prompt`, its answer to `completion`)"
)


class Malformed(Exception):
    """The row has a wrong form; `args[0]` says what was found and expected."""


@dataclass(frozen=True)
class ChatRow:
    """A row as a conversation."""

    shape: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    context_turns: list[int]  # positions of the assistant's turns that are not learned
    unknown: list[str]

    @property
    def unknown_fields(self) -> list[str]:
        """Keys of messages that only a chat template could read."""
        keys = {key for message in self.messages for key in message} - TEMPLATE_FIELDS
        return [f"{MESSAGE_FIELD}{key}" for key in sorted(keys)]


def read_chat_row(row: Any, *, from_table: bool = False) -> ChatRow:
    """Read a row in one of four shapes, told by its columns: `messages`; `conversations` (ShareGPT); `prompt` and
    `completion` (TRL); `instruction` and `output` (Alpaca). Each may have `system` and `tools` too. `from_table`:
    nested objects have the keys of all rows' objects, with null where a row has none. Raises Malformed."""
    check_object(row)
    row = _remove_nulls(row) if from_table else {key: value for key, value in row.items() if value is not None}
    form = next((form for form in _SHAPES if all(column in row for column in form[0])), None)
    if form is None:
        raise Malformed(f"found the keys {list_names(row)}; {_EXPECTED}")
    columns, shape, read, others = form
    system = find_texts({"system": "", **row}, "system", empty={"system"})["system"]
    messages = read(row)
    if system.strip() and isinstance(messages, list):
        messages = [{"role": "system", "content": system}, *messages]
    try:
        checked, context_turns = check_messages(messages)
        tools = check_tools(row.get("tools", row.get("functions")))
    except ValueError as error:
        raise Malformed(str(error)) from None
    answers = [message for message in checked[1:] if message["role"] == "assistant"]
    if not any(message["content"].strip() or "tool_calls" in message for message in answers):
        raise Malformed("no turn of the assistant that answers something")
    known = {*columns, *others, "system", "tools", "functions"}
    return ChatRow(shape, checked, tools, context_turns, sorted(str(name) for name in row if name not in known))


def read_chat_rows(shard: Shard) -> Iterator[ChatRow | Malformed]:
    """Yield each row of a shard that is not blank as a conversation, or what is wrong with it."""
    for _, row in shard.rows():
        if row is BLANK:
            continue
        try:
            yield Malformed(row.reason) if isinstance(row, Broken) else read_chat_row(row, from_table=shard.is_table)
        except Malformed as problem:
            yield problem


def _read_messages(row: dict[str, Any]) -> Any:
    return row["messages"]


def _read_sharegpt(row: dict[str, Any]) -> list[Any]:
    turns = row["conversations"]
    if not isinstance(turns, list):
        raise Malformed(f"`conversations` is {type(turns).__name__}, expected a list")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise Malformed(f"turn {number} is {type(turn).__name__}, expected an object with `from` and `value`")
        speaker = turn.get("from", turn.get("role"))
        if not isinstance(speaker, str) or speaker.lower() not in SPEAKERS:
            raise Malformed(f"turn {number} is from {speaker!r:.60}, expected one of {', '.join(SPEAKERS)}")
    return turns


def _read_prompt_completion(row: dict[str, Any]) -> list[Any]:
    """Read texts as a turn of the user and one of the assistant; of lists of messages, those of the prompt are
    context."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    for name, turns in (("prompt", prompt), ("completion", completion)):
        if not isinstance(turns, list):
            raise Malformed(f"`{name}` is {type(turns).__name__}, expected a text or a list of messages")
    context = [
        {**turn, "weight": 0} if isinstance(turn, dict) and not WEIGHTS & turn.keys() else turn for turn in prompt
    ]
    return [*context, *completion]


def _read_alpaca(row: dict[str, Any]) -> list[Any]:
    fields = find_texts({"input": "", **row}, "instruction", "input", "output", empty={"input"})
    messages = []
    history = row.get("history") or []
    if not isinstance(history, list):
        raise Malformed(f"`history` is {type(history).__name__}, expected a list of pairs")
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Malformed("`history` has an entry that is no pair of question and answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = "\n".join(text for text in (fields["instruction"], fields["input"]) if text)
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": fields["output"]}]


_SHAPES: tuple[tuple[tuple[str, ...], str, Callable[[dict[str, Any]], Any], tuple[str, ...]], ...] = (
    (("messages",), "messages", _read_messages, ()),
    (("conversations",), "ShareGPT", _read_sharegpt, ()),
    (("prompt", "completion"), "prompt and completion", _read_prompt_completion, ()),
    (("instruction", "output"), "Alpaca", _read_alpaca, ("input", "history")),
)
"""Columns that tell a shape, its name, its reader, and its other columns."""


def _remove_nulls(value: Any) -> Any:
    """Remove the keys with null from an object and its nested objects."""
    if isinstance(value, dict):
        return {key: _remove_nulls(item) for key, item in value.items() if item is not None}
    return [_remove_nulls(item) for item in value] if isinstance(value, list) else value


def check_object(row: Any) -> None:
    """Raise Malformed unless the row is an object."""
    if not isinstance(row, dict):
        raise Malformed(f"found {type(row).__name__}, expected an object")


def find_texts(row: Any, *names: str, empty: Collection[str] = ()) -> dict[str, str]:
    """Return row fields that must be strings; empty only if listed in `empty`."""
    for name in names:
        if name not in row:
            raise Malformed(f"no field `{name}`, found {list_names(row)}")
        if not isinstance(row[name], str):
            raise Malformed(f"`{name}` is {type(row[name]).__name__} ({row[name]!r:.60}), expected a string")
        if not row[name].strip() and name not in empty:
            raise Malformed(f"`{name}` is empty")
    return {name: row[name] for name in names}


def list_names(row: dict[str, Any]) -> str:
    """List the row's keys for a message, shortened."""
    return f"{', '.join(row):.300}" or "none"
