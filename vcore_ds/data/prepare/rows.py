"""Conversations from rows in the shapes of fine-tuning data sets."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from vcore_ds.data.conversations import Conversation
from vcore_ds.data.messages import (
    MASKS,
    SPEAKERS,
    THINKING,
    WEIGHTS,
    Dropped,
    Malformed,
    Message,
    check_messages,
    check_template_variables,
    check_tools,
    list_part_keys,
)
from vcore_ds.data.prepare.sources import RawFile

_EXPECTED = (
    "expected `messages`, `conversations`, `prompt` and `completion`, or `instruction` and `output`: rename the keys "
    "(a question to `prompt`, its answer to `completion`), or name them with data.columns (prepare --columns), such as "
    "{prompt: question, completion: answer}"
)


def read_chat_row(row: Any, *, from_table: bool = False, columns: Mapping[str, str] | None = None) -> Conversation:
    """Read a row in one of four shapes, told by its columns: `messages`; `conversations` (ShareGPT); `prompt` and
    `completion` (TRL); `instruction` and `output` (Alpaca). Each may have `system` and `tools` too. `from_table`:
    nested objects have the keys of all rows' objects, with null where a row has none. `columns`: our name of a column
    -> the row's. Raises Malformed, and Dropped for a row without an answer or with thinking that does not end."""
    if not isinstance(row, dict):
        raise Malformed(f"found {type(row).__name__}, expected an object")
    if columns:
        row = _rename_columns(row, columns)
    has_null_arguments = from_table and _has_null_arguments(row)
    row = _remove_nulls(row) if from_table else {key: value for key, value in row.items() if value is not None}
    forms = [form for form in _SHAPES if all(column in row for column in form[0])]
    if not forms:
        raise Malformed(f"found the keys {_list_names(row)}; {_EXPECTED}")
    named = [form for form in forms if columns and columns.keys() & {*form[0]}]
    required, shape, read, others = [*named, *forms][0]
    weights = _read_weights(row)
    system = _find_texts({"system": "", **row}, "system", empty={"system"})["system"]
    messages = read(row)
    if system.strip() and isinstance(messages, list):
        messages = [{"role": "system", "content": system}, *messages]
    checked, context_turns = check_messages(messages)
    tools, functions = check_tools(row.get("tools")), check_tools(row.get("functions"))
    variables = check_template_variables(row.get("chat_template_kwargs"))
    if not any(message["role"] == "assistant" for message in checked[1:]):
        raise Malformed("no turn of the assistant that answers something")
    known = {*required, *others, *weights, "system", "tools", "chat_template_kwargs"}
    known |= {"functions"} if tools == functions or not tools else set()
    unknown = sorted(str(name) for name in row if name not in known)
    unknown += [f"messages.content.{key}" for key in sorted(list_part_keys(messages))]
    return Conversation(checked, tools or functions, context_turns, variables, shape, unknown, has_null_arguments)


def _read_weights(row: dict[str, Any]) -> set[str]:
    """Return the columns that say whether a row is learned. Raises Dropped if it is not. `loss` and numbers other than
    0 and 1 may mean something else."""
    read = set()
    for name in WEIGHTS & row.keys():
        value = row[name]
        if isinstance(value, list):
            raise Malformed(f"column `{name}` is a list, expected `{name}` in each message")
        if isinstance(value, bool) or (value in (0, 1) and name not in {"loss", *MASKS}):
            if bool(value) == (name in MASKS):
                raise Dropped(f"`{name}` of the row is {str(value).lower()}")
            read.add(name)
    return read


def read_chat_rows(file: RawFile, columns: Mapping[str, str] | None = None) -> Iterator[Conversation]:
    """Yield each row of a file that is a conversation; malformed rows and those without an answer are skipped."""
    for row in file.rows():
        with suppress(Malformed, Dropped):
            yield read_chat_row(row, from_table=file.is_table, columns=columns)


def _read_sharegpt(row: dict[str, Any]) -> Any:
    turns = row["conversations"]
    for number, turn in enumerate(turns if isinstance(turns, list) else (), start=1):
        speaker = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
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
    if isinstance(completion, list) and completion and all(isinstance(text, str) for text in completion):
        raise Malformed(
            f"`completion` is a list of {len(completion)} texts; expected one text or a list of messages. Write a row "
            "for each text, or for the one to learn: data.columns (prepare --columns) names columns, not items of lists"
        )
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise Malformed("`prompt` or `completion` is neither a text nor a list of messages")
    context = [
        {**turn, "weight": 0} if isinstance(turn, dict) and not WEIGHTS & turn.keys() else turn for turn in prompt
    ]
    return [*context, *_add_thinking(row, completion)]


def _read_alpaca(row: dict[str, Any]) -> list[Any]:
    fields = _find_texts({"input": "", **row}, "instruction", "input", "output", empty={"input", "output"})
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise Malformed("`history` is no list of pairs of question and answer")
    messages = [turn for question, answer in history for turn in _make_turns(question, answer)]
    question = "\n".join(text for text in (fields["instruction"], fields["input"]) if text)
    question_turn, answer = _make_turns(question, fields["output"])
    return [*messages, question_turn, *_add_thinking(row, [answer])]


def _make_turns(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _add_thinking(row: dict[str, Any], completion: list[Any]) -> list[Any]:
    """Move thinking that has a column to the assistant's turn of the completion."""
    thinking = {name: row[name] for name in THINKING if name in row}
    turns = [turn for turn in completion if isinstance(turn, dict)]
    answers = [turn for turn in turns if SPEAKERS.get(str(turn.get("role", turn.get("from"))).lower()) == "assistant"]
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
    (("messages",), "messages", lambda row: row["messages"], ()),
    (("conversations",), "ShareGPT", _read_sharegpt, ()),
    (("prompt", "completion"), "prompt and completion", _read_prompt_completion, THINKING),
    (("instruction", "output"), "Alpaca", _read_alpaca, ("input", "history", *THINKING)),
)
"""Columns that tell a shape, its name, its reader, and its other columns."""


def _rename_columns(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Give columns our names; each one's own name is then no column."""
    if missing := [name for name in columns.values() if name not in row]:
        raise Malformed(f"no column `{missing[0]}`, which data.columns (--columns) names; found {_list_names(row)}")
    others = {name: value for name, value in row.items() if name not in columns.values()}
    return others | {name: row[theirs] for name, theirs in columns.items()}


def _remove_nulls(value: Any) -> Any:
    """Remove the keys with null from an object and its nested objects, to which a table gives the keys of all rows."""
    if type(value) is dict:  # no `JsonObject`
        return {key: _remove_nulls(item) for key, item in value.items() if item is not None}
    return [_remove_nulls(item) for item in value] if isinstance(value, list) else value


def _has_null_arguments(value: Any) -> bool:
    """Whether a call has a null argument: a table gives a call the arguments of all calls."""
    if type(value) is dict:  # no `JsonObject`
        arguments = value.get("arguments")
        is_call = type(arguments) is dict and None in arguments.values()
        return is_call or any(map(_has_null_arguments, value.values()))
    return isinstance(value, list) and any(map(_has_null_arguments, value))


def _find_texts(row: Any, *names: str, empty: Collection[str] = ()) -> dict[str, str]:
    """Return row fields that must be strings; empty only if listed in `empty`."""
    for name in names:
        if name not in row:
            raise Malformed(f"no field `{name}`, found {_list_names(row)}")
        if not isinstance(row[name], str):
            raise Malformed(f"`{name}` is {type(row[name]).__name__} ({row[name]!r:.60}), expected a string")
        if not row[name].strip() and name not in empty:
            raise Malformed(f"`{name}` is empty")
    return {name: row[name] for name in names}


def _list_names(row: dict[str, Any]) -> str:
    """List the row's keys for a message, shortened."""
    return f"{', '.join(row):.300}" or "none"
