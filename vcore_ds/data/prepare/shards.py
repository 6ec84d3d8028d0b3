"""Work on one shard: curation of rows, tokenization of conversations, each with its result files."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.paths import write_atomically, write_json
from vcore_ds.data.answers import AnswerChecker
from vcore_ds.data.conversations import NOTICES, Conversation, RenderedConversation, render_conversation
from vcore_ds.data.messages import Dropped, Malformed
from vcore_ds.data.prepare import curation
from vcore_ds.data.prepare.curation import PrepareRequest, find_statement
from vcore_ds.data.prepare.rows import MESSAGE_FIELD, read_chat_row
from vcore_ds.data.prepare.sources import BLANK, Broken, Shard
from vcore_ds.data.store import IN_ANSWER, SUPERVISED
from vcore_ds.data.tokenization import TokenizedSequence, load_tokenizer, tokenize_rendered

NUM_EXAMPLES_OF_FAULTS = 20  # malformed rows of a shard that are reported with a reason

MAX_FAULT_CHARACTERS = 1_000  # longest reported reason; reasons quote the row, which can be of any size

_MAX_IGNORED, _MAX_NAME_CHARACTERS = 20, 40
"""Ignored fields of a row that are counted by name, and the characters of a name."""


@dataclass
class ShardReport:
    """The outcomes of a shard's rows."""

    num_rows: int = 0
    num_numbers: int = 0  # rows and blank lines; the next shard's row numbers continue from here
    dropped: dict[str, int] = field(default_factory=dict)  # rows by the rule that dropped them
    shapes: dict[str, int] = field(default_factory=dict)  # rows by shape, for chat data
    num_malformed: int = 0
    faults: list[tuple[int, str]] = field(default_factory=list)
    """(number within the shard, reason) of each of the first malformed rows"""
    num_curated: int = 0


@dataclass(frozen=True)
class Curated:
    """A conversation that passed all rules."""

    key: int  # uniform in 64 bits, see `make_sample_key`
    shard_number: int
    number: int
    offset: int  # bytes, of its line in the shard's file of conversations


def curate_shard(request: PrepareRequest, shard: Shard, shard_number: int, folder: Path, key_limit: int) -> int:
    """Apply the rules to all rows of a shard. Writes those that pass and have a key below `key_limit` to `NNNNN.jsonl`,
    their keys, numbers and offsets to `NNNNN.npy` and, last, the report to `NNNNN.json`. Returns the shard's number."""
    report = ShardReport()
    dropped: Counter[str] = Counter()
    shapes: Counter[str] = Counter()
    index: list[tuple[int, int, int]] = []
    checker = AnswerChecker(request.answer_seconds)
    name = folder / f"{shard_number:05d}"
    try:
        with (
            write_atomically(name.with_suffix(".jsonl"), several_writers=True) as unfinished,
            unfinished.open("wb") as file,
        ):
            for number, row in shard.rows():
                report.num_numbers = number + 1
                if row is BLANK:
                    continue
                report.num_rows += 1
                try:
                    line = _encode(_curate(request, row, shard, checker, shapes))
                except Dropped as reason:
                    dropped[reason.args[0]] += 1
                    continue
                except Malformed as reason:
                    report.num_malformed += 1
                    if len(report.faults) < NUM_EXAMPLES_OF_FAULTS:
                        report.faults.append((number, reason.args[0][:MAX_FAULT_CHARACTERS]))
                    continue
                report.num_curated += 1
                key = make_sample_key(request.seed, shard_number, number)
                if key < key_limit:
                    index.append((key, number, file.tell()))
                    file.write(line)
    finally:
        checker.close()
    report.dropped, report.shapes = dict(dropped), dict(shapes)
    with write_atomically(name.with_suffix(".npy"), several_writers=True) as unfinished, unfinished.open("wb") as file:
        np.save(file, np.array(index, dtype=np.uint64).reshape(-1, 3))
    write_json(name.with_suffix(".json"), asdict(report))
    return shard_number


def make_sample_key(seed: int, shard_number: int, number: int) -> int:
    """Make the key of a row, uniform in 64 bits: a sample is the rows with the smallest keys."""
    digest = hashlib.blake2b(f"{seed} {shard_number} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def is_finished(folder: Path, shard_number: int) -> bool:
    """Whether all files of a shard were written."""
    return (folder / f"{shard_number:05d}.json").is_file()


def read_report(folder: Path, shard_number: int) -> ShardReport:
    """Read the report of a finished shard."""
    return ShardReport(**json.loads((folder / f"{shard_number:05d}.json").read_text(encoding="utf-8")))


def read_curated(folder: Path, shard_number: int) -> list[Curated]:
    """Read the rows that a finished shard kept, without their conversations."""
    index = np.load(folder / f"{shard_number:05d}.npy").tolist()
    return [Curated(key, shard_number, number, offset) for key, number, offset in index]


@dataclass(frozen=True)
class FirstRow:
    """The position of a shard's first row."""

    source: str
    in_source: int  # row (or line) of its source, from 0
    overall: int  # row among all sources, from 0

    def locate(self, number: int) -> str:
        """Location, for messages, of the row with this number in the shard."""
        return f"{self.source}:{self.in_source + number + 1}"


OVERLONG, UNSUPERVISED, REFUSED, LONG_PROMPT, KEPT = range(5)
"""Outcomes of a conversation. `REFUSED` (by the chat template) makes the row malformed, and so does `LONG_PROMPT` if
sequences are truncated; otherwise it counts as dropped."""


def tokenize_block(
    request: PrepareRequest, block_number: int, rows: Sequence[Curated], first_rows: Sequence[FirstRow], folder: Path
) -> None:
    """Write `tokenized/NNNNN.npz`: the outcome of each row of `curated/`, and the concatenated tokens of the kept ones.
    `first_rows`: of each shard."""
    tokenizer, cutoff = _load_tokenizer(request.tokenizer), request.cutoff_length
    outcomes, num_tokens = np.full(len(rows), REFUSED, dtype=np.uint8), np.zeros(len(rows), dtype=np.int64)
    faults: list[str] = []
    rendered: dict[int, RenderedConversation] = {}
    unknown_columns: dict[int, list[str]] = {}
    for i, row in enumerate(rows):
        first, curated = first_rows[row.shard_number], _read_curated_row(folder / "curated", row)
        unknown_columns[i] = curated.pop("unknown_columns", [])
        try:
            conversation = Conversation(first.in_source + row.number + 1, path=first.source, **curated)
            rendered[i] = render_conversation(conversation, tokenizer, request.supervise)
        except UserError as error:
            faults.append(str(error)[:MAX_FAULT_CHARACTERS])
    sequences = tokenize_rendered(list(rendered.values()), tokenizer) if rendered else []
    kept: list[tuple[int, RenderedConversation, TokenizedSequence]] = []
    ignored: list[str] = []
    for (i, item), sequence in zip(rendered.items(), sequences, strict=True):
        outcomes[i], num_tokens[i] = _judge(sequence, cutoff, request.overlong), len(sequence)
        if outcomes[i] == KEPT:
            kept.append((first_rows[rows[i].shard_number].overall + rows[i].number, item, sequence))
            fields = [*unknown_columns[i], *(f"{MESSAGE_FIELD}{key}" for key in item.ignored)]
            ignored.append(json.dumps([name[:_MAX_NAME_CHARACTERS] for name in fields[:_MAX_IGNORED]]))
        elif outcomes[i] == LONG_PROMPT and request.overlong == "truncate":
            prompt_length = int(np.flatnonzero(sequence.supervised)[0])
            faults.append(
                f"{item.conversation.location}: the prompt alone has {prompt_length:,} tokens, expected fewer than the "
                f"cutoff, {cutoff:,}"
            )
    notices: dict[str, Any] = {name: np.array([item.notices.get(name, 0) for _, item, _ in kept]) for name in NOTICES}
    block = folder / "tokenized" / f"{block_number:05d}.npz"
    with write_atomically(block, several_writers=True) as unfinished, unfinished.open("wb") as file:
        np.savez(
            file,
            outcomes=outcomes,
            num_tokens=num_tokens,
            faults=np.array(faults, dtype=np.str_),
            lengths=np.array([min(len(sequence), cutoff) for _, _, sequence in kept], dtype=np.int64),
            sequence_ids=np.array([sequence_id for sequence_id, _, _ in kept], dtype=np.int64),
            truncated=np.array([len(sequence) > cutoff for _, _, sequence in kept], dtype=np.bool_),
            **notices,
            context_turns=np.array([len(item.conversation.context_turns) for _, item, _ in kept], dtype=np.int64),
            ignored=np.array(ignored, dtype=np.str_),
            ids=_concatenate([sequence.input_ids[:cutoff] for _, _, sequence in kept], np.int32),
            marks=_concatenate([_encode_marks(sequence)[:cutoff] for _, _, sequence in kept], np.uint8),
        )


def _concatenate(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays])


def _encode_marks(sequence: TokenizedSequence) -> np.ndarray:
    assert sequence.in_answer is not None
    return (sequence.supervised * SUPERVISED + sequence.in_answer * IN_ANSWER).astype(np.uint8)


def _judge(sequence: TokenizedSequence, cutoff_length: int, overlong: str) -> int:
    if not sequence.supervised.any():
        return UNSUPERVISED
    if not sequence.supervised[:cutoff_length].any():
        return LONG_PROMPT
    return OVERLONG if overlong == "drop" and len(sequence) > cutoff_length else KEPT


def _curate(
    request: PrepareRequest, row: Any, shard: Shard, checker: AnswerChecker, shapes: Counter[str]
) -> dict[str, Any]:
    """Return the arguments of a `Conversation` besides its place, and `unknown_columns`."""
    if isinstance(row, Broken):
        raise Malformed(row.reason)
    if request.kind == "math":
        return {"messages": curation.convert_math_row(row, checker.check)}
    if request.kind == "code":
        return {"messages": curation.convert_code_row(row, partial(find_statement, request.statements))}
    chat = read_chat_row(row, from_table=shard.is_table)
    shapes[chat.shape] += 1
    return {"messages": chat.messages, **chat.options, "unknown_columns": chat.unknown}


def _encode(curated: dict[str, Any]) -> bytes:
    """Return a line of JSON. Raises `Malformed` for invalid Unicode, and for types of parquet that JSON lacks."""
    try:
        json.dumps(curated, ensure_ascii=False).encode()
        return json.dumps(curated).encode() + b"\n"
    except UnicodeEncodeError as error:
        raise Malformed(f"half of a surrogate pair, which is no Unicode text ({error.reason})") from None
    except (TypeError, RecursionError) as error:
        raise Malformed(f"a message that cannot be written as JSON ({first_line(error)})") from None


def _read_curated_row(folder: Path, row: Curated) -> dict[str, Any]:
    with (folder / f"{row.shard_number:05d}.jsonl").open("rb") as file:
        file.seek(row.offset)
        return json.loads(file.readline())


_load_tokenizer = lru_cache(maxsize=1)(load_tokenizer)
