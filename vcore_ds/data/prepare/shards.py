"""One process's work on one shard: rows to conversations, conversations to tokens. Each leaves finished files."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vcore_ds.data.conversations import Conversation, Message
from vcore_ds.data.prepare import curation
from vcore_ds.data.prepare.sources import BLANK, Broken, Shard
from vcore_ds.data.prepare.statements import Statements
from vcore_ds.data.rendering import RenderedConversation, render_conversation
from vcore_ds.data.store import IN_ANSWER, SUPERVISED
from vcore_ds.data.tokenization import TokenizedSequence, load_tokenizer, tokenize_rendered
from vcore_ds.errors import UserError, first_line
from vcore_ds.files.aside import written_aside
from vcore_ds.grading.verification import AnswerChecker

NUM_EXAMPLES_OF_FAULTS = 20
"""Malformed rows of a shard that are reported with their reason."""

MAX_FAULT_CHARACTERS = 1_000
"""Longest reason that is reported: it quotes the row, which can be of any size."""

_EMPTY_THINKING = re.compile(r"<think>\s*</think>")

Kind = Literal["math", "code", "chat"]


@dataclass(frozen=True)
class CurationTask:
    """A shard of raw rows to curate."""

    kind: Kind
    shard_number: int
    shard: Shard
    seed: int
    answer_seconds: int
    """CPU seconds for comparing one answer"""
    statements_folder: str | None
    """folder with problem statements; None for the hub"""
    folder: Path
    """where the shard's files go"""


@dataclass
class ShardReport:
    """The outcomes of a shard's rows."""

    num_rows: int = 0
    num_numbers: int = 0
    """rows and blank lines, from which the next shard's row numbers continue"""
    dropped: dict[str, int] = field(default_factory=dict)
    """rows by the rule that dropped them"""
    shapes: dict[str, int] = field(default_factory=dict)
    """rows by shape, for chat data"""
    num_malformed: int = 0
    faults: list[tuple[int, str]] = field(default_factory=list)
    """(number within the shard, reason) of each of the first malformed rows"""
    num_curated: int = 0


@dataclass(frozen=True)
class Curated:
    """A conversation that passed all rules."""

    key: int
    """uniform in 64 bits, from seed, shard and number: a sample is the rows with the smallest keys"""
    shard_number: int
    number: int
    offset: int
    """start of its line in the shard's file of conversations, bytes"""


def curate_shard(task: CurationTask, key_limit: int) -> ShardReport:
    """Applies the rules to all rows of a shard, and writes the rows that pass and have a key below `key_limit`.

    The files `NNNNN.jsonl` (conversations), `NNNNN.npy` (their keys, numbers and offsets) and `NNNNN.json` (the report,
    written last) replace those of an interrupted run.
    """
    report = ShardReport()
    dropped: Counter[str] = Counter()
    shapes: Counter[str] = Counter()
    index: list[tuple[int, int, int]] = []
    checker = AnswerChecker(task.answer_seconds)
    rows = task.folder / f"{task.shard_number:05d}.jsonl"
    try:
        with written_aside(rows, several_writers=True) as unfinished, unfinished.open("wb") as file:
            for number, row in task.shard.rows():
                report.num_numbers = number + 1
                if row is BLANK:
                    continue
                report.num_rows += 1
                try:
                    line = _encode(_curate(task, row, checker, shapes))
                except curation.Dropped as reason:
                    dropped[reason.args[0]] += 1
                    continue
                except curation.Malformed as reason:
                    report.num_malformed += 1
                    if len(report.faults) < NUM_EXAMPLES_OF_FAULTS:
                        report.faults.append((number, reason.args[0][:MAX_FAULT_CHARACTERS]))
                    continue
                report.num_curated += 1
                key = sample_key(task.seed, task.shard_number, number)
                if key < key_limit:
                    index.append((key, number, file.tell()))
                    file.write(line)
    finally:
        checker.close()
    report.dropped, report.shapes = dict(dropped), dict(shapes)
    with (
        written_aside(task.folder / f"{task.shard_number:05d}.npy", several_writers=True) as unfinished,
        unfinished.open("wb") as file,
    ):
        np.save(file, np.array(index, dtype=np.uint64).reshape(-1, 3))
    write_json(task.folder / f"{task.shard_number:05d}.json", asdict(report))
    return report


def sample_key(seed: int, shard_number: int, number: int) -> int:
    """Of a row, uniform in 64 bits: a sample is the rows with the smallest ones."""
    digest = hashlib.blake2b(f"{seed} {shard_number} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def read_report(folder: Path, shard_number: int) -> ShardReport | None:
    """The report of a finished shard; None for any other."""
    path = folder / f"{shard_number:05d}.json"
    return ShardReport(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def read_curated(folder: Path, shard_number: int) -> list[Curated]:
    """The rows that a finished shard kept, without their conversations."""
    index = np.load(folder / f"{shard_number:05d}.npy").tolist()
    return [Curated(key, shard_number, number, offset) for key, number, offset in index]


@dataclass(frozen=True)
class TokenizationTask:
    """Curated conversations to tokenize."""

    block_number: int
    rows: Sequence[Curated]
    locations: Sequence[str]
    """source and number of each row, for messages"""
    sequence_ids: Sequence[int]
    """id of each row, from 0"""
    tokenizer: str
    cutoff_length: int
    overlong: Literal["drop", "truncate"]
    curated_folder: Path
    folder: Path


OVERLONG, UNSUPERVISED, REFUSED, LONG_PROMPT, KEPT = range(5)
"""Outcomes of a conversation. `REFUSED` by the chat template is a fault of the row, and so is `LONG_PROMPT` where
sequences are truncated; where long ones are dropped, it counts among them."""


def tokenize_block(task: TokenizationTask) -> None:
    """Writes `NNNNN.npz`: the outcome of each row, and the tokens of the kept ones one after another."""
    tokenizer = _tokenizer(task.tokenizer)
    outcomes = np.zeros(len(task.rows), dtype=np.uint8)
    faults: list[str] = []
    rendered: list[RenderedConversation] = []
    for i, row in enumerate(task.rows):
        messages = _read_messages(task.curated_folder, row)
        # Messages about a conversation begin with its location, "path:row".
        path, _, number = task.locations[i].rpartition(":")
        try:
            rendered.append(render_conversation(Conversation(int(number), messages, path), tokenizer))
            outcomes[i] = KEPT
        except UserError as error:
            outcomes[i] = REFUSED
            faults.append(str(error)[:MAX_FAULT_CHARACTERS])
    ids, marks, lengths, sequence_ids = [], [], [], []
    truncated, unsupervised_turns, empty_thinking = [], [], []
    sequences = iter(zip(rendered, tokenize_rendered(rendered, tokenizer), strict=True) if rendered else ())
    for i in np.flatnonzero(outcomes == KEPT).tolist():
        item, sequence = next(sequences)
        outcomes[i] = _judge(sequence, task.cutoff_length, task.overlong)
        if outcomes[i] == LONG_PROMPT and task.overlong == "truncate":
            prompt_length = int(np.flatnonzero(sequence.supervised)[0])
            faults.append(
                f"{task.locations[i]}: the prompt alone has {prompt_length:,} tokens, expected fewer than the cutoff, "
                f"{task.cutoff_length:,}"
            )
        if outcomes[i] != KEPT:
            continue
        assert sequence.in_answer is not None
        ids.append(sequence.input_ids[: task.cutoff_length])
        mark = sequence.supervised * SUPERVISED + sequence.in_answer * IN_ANSWER
        marks.append(mark[: task.cutoff_length].astype(np.uint8))
        lengths.append(len(ids[-1]))
        sequence_ids.append(task.sequence_ids[i])
        truncated.append(len(sequence) > task.cutoff_length)
        unsupervised_turns.append(item.spans.count(None))
        empty_thinking.append(_adds_empty_thinking(item))
    block = task.folder / f"{task.block_number:05d}.npz"
    with written_aside(block, several_writers=True) as unfinished, unfinished.open("wb") as file:
        np.savez(
            file,
            outcomes=outcomes,
            faults=np.array(faults, dtype=np.str_),
            lengths=np.array(lengths, dtype=np.int64),
            sequence_ids=np.array(sequence_ids, dtype=np.int64),
            truncated=np.array(truncated, dtype=np.bool_),
            unsupervised_turns=np.array(unsupervised_turns, dtype=np.int64),
            empty_thinking=np.array(empty_thinking, dtype=np.bool_),
            ids=np.concatenate(ids) if ids else np.zeros(0, dtype=np.int32),
            marks=np.concatenate(marks) if marks else np.zeros(0, dtype=np.uint8),
        )


def _adds_empty_thinking(item: RenderedConversation) -> bool:
    added = len(_EMPTY_THINKING.findall(item.text))
    return added > sum(len(_EMPTY_THINKING.findall(message["content"])) for message in item.conversation.messages)


def _judge(sequence: TokenizedSequence, cutoff_length: int, overlong: str) -> int:
    if not sequence.supervised.any():
        return UNSUPERVISED
    if not sequence.supervised[:cutoff_length].any():
        return LONG_PROMPT
    return OVERLONG if overlong == "drop" and len(sequence) > cutoff_length else KEPT


def write_json(path: Path, value: Any) -> None:
    """Readable JSON, written aside."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    with written_aside(path, several_writers=True) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def _curate(task: CurationTask, row: Any, checker: AnswerChecker, shapes: Counter[str]) -> list[Message]:
    if isinstance(row, Broken):
        raise curation.Malformed(row.reason)
    if task.kind == "math":
        return curation.math_messages(row, checker.check)
    if task.kind == "code":
        return curation.code_messages(row, _statements(task.statements_folder).find)
    shape, messages = curation.chat_messages(row)
    shapes[shape] += 1
    return messages


def _encode(messages: list[Message]) -> bytes:
    """A line of JSON. Raises `Malformed` for what is no Unicode text, or no JSON (parquet has times and bytes)."""
    try:
        json.dumps(messages, ensure_ascii=False).encode()
        return json.dumps(messages).encode() + b"\n"
    except UnicodeEncodeError as error:
        raise curation.Malformed(f"half of a surrogate pair, which is no Unicode text ({error.reason})") from None
    except (TypeError, RecursionError) as error:
        raise curation.Malformed(f"a message that cannot be written as JSON ({first_line(error)})") from None


def _read_messages(folder: Path, row: Curated) -> list[Message]:
    with (folder / f"{row.shard_number:05d}.jsonl").open("rb") as file:
        file.seek(row.offset)
        return json.loads(file.readline())


_statements = lru_cache(maxsize=1)(Statements)
_tokenizer = lru_cache(maxsize=1)(load_tokenizer)
