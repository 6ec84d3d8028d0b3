"""Requests of `vcore-ds prepare`, and the conversion of raw rows to sequences: rules, chat template, tokenizer."""

import hashlib
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vcore_ds.data.conversations import NOTICES, Conversation, RenderedConversation, Supervise, render_conversation
from vcore_ds.data.messages import Dropped, Malformed
from vcore_ds.data.prepare.rows import read_chat_row
from vcore_ds.data.prepare.sources import RawFile, UnreadableRow, describe_source
from vcore_ds.data.store import IN_ANSWER, SUPERVISED, describe_tokenizer
from vcore_ds.data.templates import match_special_tokens
from vcore_ds.data.tokenization import TokenizedSequence, load_tokenizer, tokenize_rendered

if TYPE_CHECKING:
    from pyarrow import Schema
    from transformers import PreTrainedTokenizerBase

_ROWS_VERSION = 4
"""How rows are read. 1 dropped `tools`, calls, and the weights of messages; 2 left thinking in the text, dropped
thinking columns and `chat_template_kwargs`, and did not learn every end of a turn; both drew other samples. 3 learned
masked turns, and dropped calls as text."""

KEPT, MALFORMED = "kept", "malformed"

NOTICED = {
    "truncated": "truncated at the cutoff: their ends, with the answer and the end of the turn, are not learned",
    **NOTICES,
    "other_markers": "have thinking between other markers than <think> and </think>, such as <|begin_of_thought|>: it "
    "is learned as text of the answer; replace the markers",
    "line_breaks": "have other white space around their thinking than the chat template writes, such as "
    "<think>x</think>answer: the template's line breaks are learned",
    "null_arguments": "have calls with null arguments, which a table gives to arguments that a call does not have: "
    "they are left out. JSON lines, or `arguments` as JSON text, keep them",
}
"""Observations on kept sequences, each a number for a sequence, and the text of their line."""

_OTHER_MARKERS = re.compile(
    r"\s*(<\|begin_of_(?:thought|thinking)\|>|<\|?(?:thinking|thought|reasoning|reason|scratchpad)\|?>|\[THINK\])",
    re.IGNORECASE,
)
"""Beginnings of answers, in data for other templates, whose thinking is in no `<think>`."""
_CHARACTERS_PER_TOKEN, _MIN_CHARACTERS = 64, 2**20
"""A row is not tokenized if it has more characters than the minimum, and more than 64 for each token of the cutoff."""
_MAX_REASON = 1_000  # characters of a reason; reasons quote the row, which can be of any size
_MAX_IGNORED, _MAX_NAME_CHARACTERS = 20, 40
"""Ignored fields of a row that are counted by name, and the characters of a name."""
_NO_TOKENS = np.empty(0, np.int32), np.empty(0, np.uint8)


@dataclass(frozen=True)
class PrepareRequest:
    """Everything that determines the bytes of the store."""

    sources: tuple[str, ...]  # files, folders, patterns, or ids on the hub
    tokenizer: str  # folder or hub id of the model to train
    split: str  # split of data sets on the hub
    sample: int | None = None  # sequences to keep, chosen at random; None for all
    seed: int = 42
    cutoff_length: int = 16384  # tokens; longer sequences are dropped or truncated
    overlong: Literal["drop", "truncate"] = "drop"
    supervise: Supervise = "all"  # turns of the assistant that are learned
    columns: Mapping[str, str] = field(default_factory=dict)  # our name of a column -> the rows' name

    def describe_origin(self, files: Sequence[RawFile], tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
        """Make the manifest's entries on a store's origin; equal origins give equal contents."""
        apart = ("sources", "tokenizer", "seed")
        filters = {key: value for key, value in asdict(self).items() if key not in apart}
        filters["rows_version"] = _ROWS_VERSION
        return {
            "source": describe_source(files),
            "tokenizer": describe_tokenizer(tokenizer),
            "filters": filters,
            "seed": self.seed,
        }


@dataclass
class RowOutcome:
    """The outcome of a row."""

    number: int  # in its file, from 0
    outcome: str = KEPT  # or `MALFORMED`, or the rule that leaves it out
    reason: str = ""  # why it is malformed
    shape: str = ""
    num_tokens: int = 0  # of the conversation, without the cutoff
    noticed: dict[str, int] = field(default_factory=dict)
    context_turns: int = 0
    ignored: Sequence[str] = ()
    digest: int = 0  # equal for rows with the same messages


def make_schema() -> "Schema":
    """Make the columns of results, which are pickled; rows that are not kept have no tokens."""
    import pyarrow as pa

    ids, marks = pa.list_(pa.int32()), pa.list_(pa.uint8())
    return pa.schema({"number": pa.int64(), "result": pa.binary(), "input_ids": ids, "marks": marks})


def convert_batch(
    rows: Sequence[bytes], numbers: Sequence[int], request: PrepareRequest, file: RawFile
) -> dict[str, list[Any]]:
    """Convert encoded rows of a file, whose `numbers` are theirs, to columns of results."""
    tokenizer = open_tokenizer(request.tokenizer)
    results = [RowOutcome(number) for number in numbers]
    items = [
        examine_row(result, file.parse(row), request, file, tokenizer)
        for result, row in zip(results, rows, strict=True)
    ]
    rendered = [item for item in items if item is not None]
    sequences = iter(tokenize_rendered(rendered, tokenizer) if rendered else [])
    tokens = [
        _NO_TOKENS if item is None else _judge(result, next(sequences), request)
        for result, item in zip(results, items, strict=True)
    ]
    return {
        "number": [result.number for result in results],
        "result": [pickle.dumps(result) for result in results],
        "input_ids": [ids for ids, _ in tokens],
        "marks": [marks for _, marks in tokens],
    }


def examine_row(
    result: RowOutcome, row: Any, request: PrepareRequest, file: RawFile, tokenizer: "PreTrainedTokenizerBase | None"
) -> RenderedConversation | None:
    """Read a row, render it, and record in `result` what is found. Returns None for a row that is malformed or left
    out, and without a tokenizer."""
    item = None
    try:
        if isinstance(row, UnreadableRow):
            raise Malformed(row.reason)
        conversation = read_chat_row(row, from_table=file.is_table, columns=request.columns)
        result.shape = conversation.shape
        if tokenizer is not None:
            _check_size(conversation, request)
            item = render_conversation(conversation, tokenizer, request.supervise)
    except Dropped as rule:
        result.outcome = str(rule)
        return None
    except Malformed as fault:
        result.outcome, result.reason = MALFORMED, str(fault)[:_MAX_REASON]
        return None
    ignored = [*conversation.unknown, *(item.ignored if item else ())]
    result.ignored = [f"`{name[:_MAX_NAME_CHARACTERS]}`" for name in ignored[:_MAX_IGNORED]]
    content = [conversation.messages, conversation.tools, conversation.context_turns]
    text = json.dumps(content, sort_keys=True, default=repr).encode()
    result.digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
    result.context_turns = len(conversation.context_turns)
    read = [value for name, value in row.items() if name not in conversation.unknown]
    result.noticed = {
        **(item.notices if item else {}),
        "other_markers": int(_has_other_markers(conversation, tokenizer)),
        "line_breaks": int(item is not None and any(_differs_in_space(text, item.text) for text in _iter_texts(read))),
        "null_arguments": int(conversation.has_null_arguments),
    }
    return item


def _has_other_markers(conversation: Conversation, tokenizer: "PreTrainedTokenizerBase | None") -> bool:
    """Whether an answer begins with thinking in markers that are text for the tokenizer and its template."""
    answers = (message["content"] for message in conversation.messages if message["role"] == "assistant")
    markers = [match[1] for answer in answers if (match := _OTHER_MARKERS.match(answer))]
    special = None if tokenizer is None else match_special_tokens(tokenizer)
    return any(special is None or not special.fullmatch(marker) for marker in markers)


def _differs_in_space(text: str, rendered: str) -> bool:
    """Whether a turn with thinking is in the rendered conversation up to white space alone."""
    if "</think>" not in text or text.strip() in rendered:
        return False
    return "".join(text.split()) in "".join(rendered.split())


def _iter_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _iter_texts(item)


def _check_size(conversation: Conversation, request: PrepareRequest) -> None:
    """Drop a text that is far beyond the cutoff: its tokens would take hundreds of times its size in memory."""
    limit = max(_MIN_CHARACTERS, _CHARACTERS_PER_TOKEN * request.cutoff_length)
    texts = [message.get(name, "") for message in conversation.messages for name in ("content", "reasoning_content")]
    if sum(map(len, texts)) > limit:
        raise Dropped(f"longer than {limit:,} characters")


def _judge(result: RowOutcome, sequence: TokenizedSequence, request: PrepareRequest) -> tuple[np.ndarray, np.ndarray]:
    """Decide whether a sequence is kept; return its tokens and their marks, or nothing."""
    cutoff, result.num_tokens = request.cutoff_length, len(sequence)
    is_overlong, has_target = len(sequence) > cutoff, sequence.supervised[:cutoff].any()
    if not sequence.supervised.any():
        result.outcome = "no turn to learn"
    elif is_overlong and request.overlong == "drop":
        result.outcome = f"longer than {cutoff:,} tokens" if has_target else "prompt alone longer than the cutoff"
    elif not has_target:
        prompt_length = int(np.flatnonzero(sequence.supervised)[0])
        result.outcome = MALFORMED
        result.reason = f"the prompt alone has {prompt_length:,} tokens, expected fewer than the cutoff, {cutoff:,}"
    else:
        assert sequence.in_answer is not None
        result.noticed["truncated"] = int(is_overlong)
        marks = sequence.supervised * SUPERVISED + sequence.in_answer * IN_ANSWER
        return sequence.input_ids[:cutoff], marks[:cutoff].astype(np.uint8)
    return _NO_TOKENS


open_tokenizer = lru_cache(maxsize=1)(load_tokenizer)
