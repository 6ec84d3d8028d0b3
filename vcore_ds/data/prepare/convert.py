"""Conversion of raw rows to sequences: rules, chat template, tokenizer; one call for each chunk of a file."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import write_atomically
from vcore_ds.data.answers import AnswerChecker
from vcore_ds.data.conversations import NOTICES, Conversation, RenderedConversation, render_conversation
from vcore_ds.data.messages import Dropped, Malformed, Message
from vcore_ds.data.prepare import curation
from vcore_ds.data.prepare.curation import PrepareRequest
from vcore_ds.data.prepare.rows import MESSAGE_FIELD, ChatRow, read_chat_row
from vcore_ds.data.prepare.sources import BLANK, Broken, RawFile, parse_chunk
from vcore_ds.data.store import IN_ANSWER, SUPERVISED
from vcore_ds.data.tokenization import TokenizedSequence, load_tokenizer, tokenize_rendered

if TYPE_CHECKING:
    from pyarrow import Schema, Table

    from vcore_ds.data.prepare.sources import Chunk

KEPT, MALFORMED = "kept", "malformed"

NOTICED = {
    "truncated": "truncated at the cutoff: their ends, with the answer and the end of the turn, are not learned",
    **NOTICES,
    "null_arguments": "have calls with null arguments, which a table gives to arguments that a call does not have: "
    "they are left out. JSON lines, or `arguments` as JSON text, keep them",
}
"""Observations on kept sequences, each a number for a sequence, and the text of their line."""

_CHARACTERS_PER_TOKEN, _MIN_CHARACTERS = 64, 2**20
"""A row is not tokenized if it has more characters than the minimum, and more than 64 for each token of the cutoff."""
_BATCH = 64  # rows that are rendered and tokenized together
_MAX_REASON = 1_000  # characters of a reason; reasons quote the row, which can be of any size
_MAX_IGNORED, _MAX_NAME_CHARACTERS = 20, 40
"""Ignored fields of a row that are counted by name, and the characters of a name."""


@dataclass
class Result:
    """What became of a row."""

    number: int  # in its source, from 0
    key: int  # uniform in 64 bits, see `make_sample_key`
    outcome: str = KEPT  # or `MALFORMED`, or the rule that leaves it out
    reason: str = ""  # why it is malformed
    shape: str = ""
    num_tokens: int = 0  # of the conversation, without the cutoff
    noticed: dict[str, int] = field(default_factory=dict)
    context_turns: int = 0
    ignored: Sequence[str] = ()
    input_ids: Sequence[int] | np.ndarray = ()
    marks: Sequence[int] | np.ndarray = ()
    digest: int = 0  # of tokens and marks


def make_schema() -> "Schema":
    """Make the Arrow schema of results."""
    import pyarrow as pa

    text, number = pa.string(), pa.int32()
    return pa.schema(
        {
            "number": pa.int64(),
            "key": pa.uint64(),
            "outcome": text,
            "reason": text,
            "shape": text,
            "num_tokens": number,
            "noticed": pa.struct(dict.fromkeys(NOTICED, number)),
            "context_turns": number,
            "ignored": pa.list_(text),
            "input_ids": pa.list_(number),
            "marks": pa.list_(pa.uint8()),
            "digest": pa.uint64(),
        }
    )


def read_results(path: Path, columns: Sequence[str]) -> "Table":
    """Map columns of the results of a chunk."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all().select(columns)


def make_sample_key(seed: int, source_number: int, number: int) -> int:
    """Make the key of a row, uniform in 64 bits: a sample is the rows with the smallest keys."""
    digest = hashlib.blake2b(f"{seed} {source_number} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def convert_chunk(
    request: PrepareRequest, file: RawFile, chunk: "Chunk", numbers: Sequence[int], keys: Sequence[int], path: Path
) -> list[int]:
    """Convert the rows of a chunk, with these numbers and keys, and write their results; return the keys of those that
    are kept."""
    import pyarrow as pa

    parsed = zip(numbers, keys, parse_chunk(chunk), strict=True)
    rows = [(Result(number, key), row) for number, key, row in parsed if row is not BLANK]
    for start in range(0, len(rows), _BATCH):
        _convert_rows(request, file, rows[start : start + _BATCH])
    results = [result for result, _ in rows]
    table = pa.Table.from_pylist([vars(result) for result in results], make_schema())
    with (
        write_atomically(path, several_writers=True) as unfinished,
        pa.OSFile(str(unfinished), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    return [result.key for result in results if result.outcome == KEPT]


def _convert_rows(request: PrepareRequest, file: RawFile, rows: Sequence[tuple[Result, Any]]) -> None:
    tokenizer = _load_tokenizer(request.tokenizer)
    rendered: list[tuple[Result, RenderedConversation]] = []
    for result, row in rows:
        try:
            chat = read_row(request, file, row)
            result.shape = chat.shape
            item = render_row(request, file, result.number, chat)
        except Dropped as rule:
            result.outcome = str(rule)
        except Malformed as fault:
            result.outcome, result.reason = MALFORMED, str(fault)[:_MAX_REASON]
        else:
            result.noticed = {**item.notices, "null_arguments": int(chat.has_null_arguments)}
            fields = [*chat.unknown, *(f"{MESSAGE_FIELD}{key}" for key in item.ignored)]
            result.ignored = [name[:_MAX_NAME_CHARACTERS] for name in fields[:_MAX_IGNORED]]
            result.context_turns = len(item.conversation.context_turns)
            rendered.append((result, item))
    sequences = tokenize_rendered([item for _, item in rendered], tokenizer) if rendered else []
    for (result, _), sequence in zip(rendered, sequences, strict=True):
        _judge(result, sequence, request)


def read_row(request: PrepareRequest, file: RawFile, row: Any) -> ChatRow:
    """Read a raw row by the rules of its kind. Raises Dropped and Malformed."""
    if isinstance(row, Broken):
        raise Malformed(row.reason)
    if request.kind == "math":
        return ChatRow("", curation.convert_math_row(row, make_checker(request.answer_seconds).check))
    if request.kind == "code":
        return ChatRow("", curation.convert_code_row(row, partial(curation.find_statement, request.statements)))
    return read_chat_row(row, from_table=file.is_table, columns=request.columns)


def render_row(request: PrepareRequest, file: RawFile, number: int, chat: ChatRow) -> RenderedConversation:
    """Render a row; `number`: in its source, from 0. Raises Dropped and Malformed."""
    conversation = Conversation(number + 1, _shorten(chat.messages, request), file.source, **chat.options)
    try:
        item = render_conversation(conversation, _load_tokenizer(request.tokenizer), request.supervise)
        item.text.encode()
    except UserError as error:
        raise Malformed(str(error).removeprefix(f"{conversation.location}: ")) from None
    except UnicodeEncodeError as error:
        raise Malformed(f"half of a surrogate pair, which is no Unicode text ({error.reason})") from None
    return item


def _shorten(messages: list[Message], request: PrepareRequest) -> list[Message]:
    """Drop or cut a text that is far beyond the cutoff: its tokens would take hundreds of times its size in memory."""
    limit = max(_MIN_CHARACTERS, _CHARACTERS_PER_TOKEN * request.cutoff_length)
    names = ("content", "reasoning_content")
    if sum(len(message.get(name, "")) for message in messages for name in names) <= limit:
        return messages
    if request.overlong == "drop":
        raise Dropped(f"longer than {limit:,} characters")
    return [message | {name: message[name][:limit] for name in names if name in message} for message in messages]


def _judge(result: Result, sequence: TokenizedSequence, request: PrepareRequest) -> None:
    """Decide whether a sequence is kept, and take its tokens."""
    cutoff, result.num_tokens = request.cutoff_length, len(sequence)
    is_overlong = len(sequence) > cutoff
    if not sequence.supervised.any():
        result.outcome = "no turn to learn"
    elif not sequence.supervised[:cutoff].any():
        result.outcome = "prompt alone longer than the cutoff"
        if request.overlong == "truncate":
            prompt_length = int(np.flatnonzero(sequence.supervised)[0])
            result.outcome = MALFORMED
            result.reason = f"the prompt alone has {prompt_length:,} tokens, expected fewer than the cutoff, {cutoff:,}"
    elif is_overlong and request.overlong == "drop":
        result.outcome = f"longer than {cutoff:,} tokens"
    else:
        assert sequence.in_answer is not None
        marks = sequence.supervised * SUPERVISED + sequence.in_answer * IN_ANSWER
        ids, marks = sequence.input_ids[:cutoff], marks[:cutoff].astype(np.uint8)
        content = ids.tobytes() + marks.tobytes()
        result.input_ids, result.marks = ids, marks
        result.digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
        result.noticed["truncated"] = int(is_overlong)


_load_tokenizer = lru_cache(maxsize=1)(load_tokenizer)
make_checker = lru_cache(maxsize=1)(AnswerChecker)
"""One of each process, whose child has imported math-verify."""
