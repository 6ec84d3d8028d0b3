"""Rows of conversations, and their sequences and stores, made by the same functions as in `vcore-ds prepare`."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.data.conversations import Conversation, check_tokenizer, render_conversation
from vcore_ds.data.messages import Message, check_messages
from vcore_ds.data.prepare.convert import PrepareRequest
from vcore_ds.data.prepare.pipeline import prepare
from vcore_ds.data.prepare.report import PrepareReport
from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import TokenizedSequence, tokenize_rendered


def make_row(*turns: str) -> dict[str, Any]:
    """A row with alternating turns of user and assistant, the user first."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """Write strings as they are and everything else as JSON."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tokenize(talks: Sequence[list[Message]], tokenizer) -> list[TokenizedSequence]:
    """Tokenize messages without truncation, whose thinking may be in their text; ids are numbers from 0."""
    check_tokenizer(tokenizer)
    read = [Conversation(check_messages(messages)[0]) for messages in talks]
    return tokenize_rendered([render_conversation(item, tokenizer) for item in read], tokenizer)


def prepare_rows(
    source: Path | Sequence[Path],
    output: Path,
    tokenizer: Path,
    *,
    split: str = "train",
    processes: int = 1,
    max_malformed: float = 1.0,
    again: bool = False,
    said: list[str] | None = None,
    **request: Any,
) -> PrepareReport | None:
    """Prepare a store, with any number of malformed rows unless said otherwise; `said` receives what is said."""
    sources = [source] if isinstance(source, Path) else source
    made = PrepareRequest(tuple(map(str, sources)), str(tokenizer), split, **request)
    say = [].append if said is None else said.append
    return prepare(made, output, processes=processes, max_malformed=max_malformed, again=again, say=say)


def decode_supervised(sequence: TokenizedSequence, tokenizer) -> list[str]:
    """Texts of the contiguous runs of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sequence.supervised, [0]]).astype(int)))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [tokenizer.decode(sequence.input_ids[start:end]) for start, end in pairs]


def decode_texts(store: Path) -> list[str]:
    """The text of each sequence of a store, by the tests' tokenizer."""
    return [make_tokenizer().decode(sequence.input_ids) for sequence in TokenStore(store)]


def decode_learned(store: Path) -> list[str]:
    """The supervised text of each sequence of a store."""
    return [make_tokenizer().decode(sequence.input_ids[sequence.supervised]) for sequence in TokenStore(store)]
