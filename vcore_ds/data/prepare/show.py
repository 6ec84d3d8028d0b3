"""Rows as a model learns them, for `vcore-ds prepare --show`."""

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vcore_ds.data.conversations import RenderedConversation, check_tokenizer
from vcore_ds.data.messages import Dropped, Malformed
from vcore_ds.data.prepare.convert import read_row, render_row
from vcore_ds.data.prepare.curation import PrepareRequest
from vcore_ds.data.prepare.sources import BLANK, find_files
from vcore_ds.data.store import MANIFEST, TokenStore
from vcore_ds.data.templates import find_end
from vcore_ds.data.tokenization import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BEGIN, _END = "⟦", "⟧"  # around learned text
_MAX_CHARACTERS = 2_000  # of a passage; of longer ones beginning and end are shown
_MAX_REASONS = 20  # rows that are left out before the first that is shown


def show_rows(request: PrepareRequest, number: int) -> Iterator[str]:
    """Yield the first rows that are learned, each with its learned text marked, and why others are left out. A source
    may be a token store."""
    tokenizer = load_tokenizer(request.tokenizer, "--tokenizer")
    check_tokenizer(tokenizer)
    stores = [source for source in request.sources if (Path(source) / MANIFEST).is_file()]
    for source in stores:
        yield from _show_store(source, tokenizer, number)
    files = find_files([source for source in request.sources if source not in stores], request.split)
    rows = ((file, i, row) for file in files for i, row in enumerate(file.rows()) if row is not BLANK)
    num_shown = num_left_out = 0
    for file, i, row in rows:
        try:
            item = render_row(request, file, i, read_row(request, file, row))
        except (Dropped, Malformed) as problem:
            kind = "malformed" if isinstance(problem, Malformed) else "left out"
            yield f"{file.source}:{i + 1}: {kind}: {problem}"
            num_left_out += 1
        else:
            yield _show_conversation(item, tokenizer)
            num_shown += 1
        if num_shown == number or num_left_out == _MAX_REASONS:
            return


def _show_conversation(item: RenderedConversation, tokenizer: "PreTrainedTokenizerBase") -> str:
    passages, at = [], 0
    for start, end in (span for span in item.spans if span is not None):
        passages += [(False, item.text[at:start]), (True, item.text[start:end])]
        at = end
    return _describe(item.conversation.location, [*passages, (False, item.text[at:])], tokenizer)


def _show_store(path: str, tokenizer: "PreTrainedTokenizerBase", number: int) -> Iterator[str]:
    for sequence in islice(TokenStore(path, tokenizer), number):
        edges = [0, *(np.flatnonzero(np.diff(sequence.supervised)) + 1).tolist(), len(sequence)]
        passages = [
            (bool(sequence.supervised[start]), str(tokenizer.decode(sequence.input_ids[start:end])))
            for start, end in pairwise(edges)
        ]
        yield _describe(f"{path}: sequence {sequence.sequence_id}", passages, tokenizer)


def _describe(place: str, passages: Sequence[tuple[bool, str]], tokenizer: "PreTrainedTokenizerBase") -> str:
    """Join passages of a text, (whether it is learned, text), below a line with their ends."""
    ends = dict.fromkeys(find_end(tokenizer, text) or "no special token" for is_learned, text in passages if is_learned)
    if not ends:
        return f"{place}: nothing is learned"
    shown = [f"{_BEGIN}{_shorten(text)}{_END}" if is_learned else _shorten(text) for is_learned, text in passages]
    return f"{place}: learned between {_BEGIN} and {_END}, up to {' and '.join(ends)}\n{''.join(shown).rstrip()}\n"


def _shorten(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = _MAX_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
