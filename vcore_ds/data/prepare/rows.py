"""Reading of conversations from rows in the shapes of fine-tuning data sets."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vcore_ds.data.messages import (
    SPEAKERS,
    TEMPLATE_FIELDS,
    THINKING,
    WEIGHTS,
    Dropped,
    Malformed,
    Message,
    check_messages,
    check_template_variables,
    check_tools,
)
from vcore_ds.data.prepare.sources import RawFile

MESSAGE_FIELD = "messages."  # before the name of an ignored field of messages; columns of rows have none

_EXPECTED = (
    "expected `messages`, `conversations`, `prompt` and `completion`, or `instruction` and `output`: rename the keys "
    "(a question to `prompt`, its answer to `completion`)"
)


@dataclass(frozen=True)
class ChatRow:
    """A row as a conversation."""

    shape: str  # empty for rows of math and code
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    context_turns: list[int] = field(default_factory=list)  # positions of the assistant's turns that are not learned
    unknown: list[str] = field(default_factory=list)
    template_variables: dict[str, Any] = field(default_factory=dict)  # `chat_template_kwargs`
    has_null_arguments: bool = False  # which were removed

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of a `Conversation` besides its place and messages."""
        names = ("tools", "context_turns", "template_variables")
        return {name: getattr(self, name) for name in names}

    @property
    def unknown_fields(self) -> list[str]:
        """Keys of messages that only a chat template could read."""
        keys = {key for message in self.messages for key in message} - TEMPLATE_FIELDS
        return [f"{MESSAGE_FIELD}{key}" for key in sorted(keys)]


def read_chat_row(row: Any, *, from_table: bool = False, columns: Mapping[str, str] | None = None) -> ChatRow:
    """Read a row in one of four shapes, told by its columns: `messages`; `conversations` (ShareGPT); `prompt` and
    `completion` (TRL); `instruction` and `output` (Alpaca). Each may have `system` and `tools` too. `from_table`:
    nested objects have the keys of all rows' objects, with null where a row has none. `columns`: our name of a column
    -> the row's. Raises Malformed, and Dropped for a row without an answer or with thinking that does not end."""
    check_object(row)
    if columns:
        row = _rename_columns(row, columns)
    null_calls: list[Any] = []
    row = {key: value for key, value in row.items() if value is not None}
    row = _remove_nulls(row, null_calls) if from_table else row
    forms = [form for form in _SHAPES if all(column in row for column in form[0])]
    if not forms:
        raise Malformed(f"found the keys {list_names(row)}; {_EXPECTED}")
    named = [form for form in forms if columns and columns.keys() & {*form[0]}]
    required, shape, read, others = [*named, *forms][0]
    system = find_texts({"system": "", **row}, "system", empty={"system"})["system"]
    messages = read(row)
    if system.strip() and isinstance(messages, list):
        messages = [{"role": "system", "content": system}, *messages]
    checked, context_turns = check_messages(messages)
    tools = check_tools(row.get("tools", row.get("functions")))
    variables = check_template_variables(row.get("chat_template_kwargs"))
    if not any(message["role"] == "assistant" for message in checked[1:]):
        raise Malformed("no turn of the assistant that answers something")
    known = {*required, *others, "system", "tools", "functions", "chat_template_kwargs"}
    unknown = sorted(str(name) for name in row if name not in known)
    return ChatRow(shape, checked, tools, context_turns, unknown, variables, bool(null_calls))


def read_chat_rows(file: RawFile, columns: Mapping[str, str] | None = None) -> Iterator[ChatRow]:
    """Yield each row of a file that is a conversation; malformed rows and those without an answer are skipped."""
    for row in file.rows():
        with suppress(Malformed, Dropped):
            yield read_chat_row(row, from_table=file.is_table, columns=columns)


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
    return [*context, *_add_thinking(row, completion)]


def _read_alpaca(row: dict[str, Any]) -> list[Any]:
    fields = find_texts({"input": "", **row}, "instruction", "input", "output", empty={"input", "output"})
    messages = []
    history = row.get("history") or []
    if not isinstance(history, list):
        raise Malformed(f"`history` is {type(history).__name__}, expected a list of pairs")
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Malformed("`history` has an entry that is no pair of question and answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = "\n".join(text for text in (fields["instruction"], fields["input"]) if text)
    answer = {"role": "assistant", "content": fields["output"]}
    return [*messages, {"role": "user", "content": question}, *_add_thinking(row, [answer])]


def _add_thinking(row: dict[str, Any], completion: list[Any]) -> list[Any]:
    """Move thinking that has a column to the assistant's turn of the completion."""
    thinking = {name: row[name] for name in THINKING if name in row}
    answers = [turn for turn in completion if isinstance(turn, dict) and turn.get("role") == "assistant"]
    if not thinking or not answers:
        return completion
    name = next(iter(thinking))
    if len(answers) > 1:
        raise Malformed(
            f"column `{name}` beside {len(answers)} turns of the assistant; put the thinking into the turns"
        )
    if answers[0] | thinking != thinking | answers[0]:
        raise Malformed(f"found different thinking in the column `{name}` and in the completion")
    return [turn | thinking if turn is answers[0] else turn for turn in completion]


_SHAPES: tuple[tuple[tuple[str, ...], str, Callable[[dict[str, Any]], Any], tuple[str, ...]], ...] = (
    (("messages",), "messages", _read_messages, ()),
    (("conversations",), "ShareGPT", _read_sharegpt, ()),
    (("prompt", "completion"), "prompt and completion", _read_prompt_completion, THINKING),
    (("instruction", "output"), "Alpaca", _read_alpaca, ("input", "history", *THINKING)),
)
"""Columns that tell a shape, its name, its reader, and its other columns."""


def _rename_columns(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Give columns our names; each one's own name is then no column."""
    if missing := [name for name in columns.values() if name not in row]:
        raise Malformed(f"no column `{missing[0]}`, which data.columns (--columns) names; found {list_names(row)}")
    others = {name: value for name, value in row.items() if name not in columns.values()}
    return others | {name: row[theirs] for name, theirs in columns.items()}


def _remove_nulls(value: Any, calls: list[Any]) -> Any:
    """Remove the keys with null from an object and its nested objects; adds those with a null argument to `calls`: a
    table gives a call the arguments of all calls."""
    if isinstance(value, dict):
        arguments = value.get("arguments")
        if isinstance(arguments, dict) and None in arguments.values():
            calls.append(value)
        return {key: _remove_nulls(item, calls) for key, item in value.items() if item is not None}
    return [_remove_nulls(item, calls) for item in value] if isinstance(value, list) else value


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
