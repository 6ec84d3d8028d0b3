"""Search for training traces that are also in the trusted data: their utility to themselves says little."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import is_readable
from vcore_ds.data.dataset import Store
from vcore_ds.data.prepare.rows import read_chat_rows
from vcore_ds.data.prepare.sources import find_files
from vcore_ds.data.store import MANIFEST, TokenStore

MAX_BYTES = 64 * 2**20  # of raw files that `count_shared_on_disk` reads, in about two seconds


def find_shared(store: Store, trusted: TokenStore) -> np.ndarray:
    """Find the positions in `store` of sequences with the same tokens as one of `trusted`, int64 [k], ascending."""
    # Only sequences of the same size are read.
    candidates = np.flatnonzero(np.isin(_sizes(store), _sizes(trusted)))
    if not len(candidates):
        return candidates
    tokens = {sequence.input_ids.tobytes() for sequence in trusted}
    return np.array([i for i in candidates.tolist() if store[i].input_ids.tobytes() in tokens], dtype=np.int64)


def _sizes(store: Store) -> np.ndarray:
    """int64 [n], one number for tokens and supervised tokens of each sequence."""
    return store.lengths.astype(np.int64) << 32 | store.num_supervised_tokens


def count_shared_on_disk(paths: Sequence[str], trusted: str, columns: Mapping[str, str] | None = None) -> int | None:
    """Count the training traces in `paths` that are also in the trusted data, without a tokenizer: token stores are
    compared by tokens, files of conversations by messages. None if they cannot be compared quickly: not on this
    machine, of both kinds, on the hub, or large."""
    if not all(map(is_readable, (*paths, trusted))):
        return None
    is_store = {(Path(path) / MANIFEST).is_file() for path in (*paths, trusted)}
    try:
        if is_store == {True}:
            pool = TokenStore(trusted)
            return sum(len(find_shared(TokenStore(path), pool)) for path in paths)
        if is_store != {False} or _count_raw_bytes([*paths, trusted]) > MAX_BYTES:
            return None
        pool_messages = set(_read_messages([trusted], columns))
        return sum(messages in pool_messages for messages in _read_messages(paths, columns))
    except UserError:  # the run reports it
        return None


def _count_raw_bytes(paths: Sequence[str]) -> int:
    return sum(Path(name).stat().st_size for name in {file.path for file in find_files(paths, "train")})


def _read_messages(paths: Sequence[str], columns: Mapping[str, str] | None) -> list[str]:
    """Read messages and tools of each conversation, as JSON with sorted keys; without malformed rows."""
    conversations = []
    for file in find_files(paths, "train"):
        for chat in read_chat_rows(file, columns):
            with suppress(TypeError):  # a value that JSON does not have
                conversations.append(json.dumps([chat.messages, chat.tools], sort_keys=True))
    return conversations
