"""Token stores of the raw data that a recipe names: made once, kept for every later run."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from filelock import FileLock, Timeout

from vcore_ds.data.rendering import check_tokenizer
from vcore_ds.data.store import MANIFEST
from vcore_ds.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ONE_PROCESS_BYTES = 32 * 2**20
"""Raw data below this are tokenized sooner than further processes have started."""


def cache_root(cache_folder: str | None) -> Path:
    """The folder for what later runs find again; None for `$XDG_CACHE_HOME/vcore_ds`, or `~/.cache/vcore_ds`."""
    return Path(cache_folder or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vcore_ds")).expanduser()


def store_of(
    path: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    cutoff_length: int,
    overlong: Literal["drop", "truncate"],
    cache_folder: str | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """The folder of the token store of `path`: that itself if it is a store, else one in the cache, made where needed.

    Raw data are what `vcore-ds prepare chat` takes. Processes that ask for the same store at once wait for the first.

    Args:
        cache_folder: see `cache_root`.

    Raises:
        UserError: the data are missing, hold a row that is not a conversation, or nothing to learn from.
    """
    if (Path(path) / MANIFEST).is_file():
        return Path(path)
    from vcore_ds.data.prepare import PrepareRequest, describe_origin, find_shards, prepare

    check_tokenizer(tokenizer)
    name = str(tokenizer.name_or_path)
    request = PrepareRequest("chat", (path,), name, "train", cutoff_length=cutoff_length, overlong=overlong)
    shards = find_shards(request.sources, request.split)
    # The fingerprint of a large file is of its beginning and its end; a change between them shows in its time.
    files = sorted({Path(shard.source) for shard in shards if shard.kind != "hub"})
    made_from = [describe_origin(request, shards, tokenizer), [(str(f.resolve()), f.stat().st_mtime_ns) for f in files]]
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_root(cache_folder) / f"{Path(path).stem}-{key}"
    if (folder / MANIFEST).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        say(f"Data: {path}: another process is making {folder}; waiting for it")
        lock.acquire()
    try:
        is_small = sum(file.stat().st_size for file in files) < _ONE_PROCESS_BYTES
        processes = 1 if is_small else len(os.sched_getaffinity(0))
        prepare(request, folder, processes=processes, max_malformed_share=0.0, say=say)
    except UserError as error:
        raise UserError(
            f"{error}\nThe data that a recipe names become a token store in {folder.parent} before training. To leave "
            f"out malformed rows, make the store yourself and name it instead of {path}: vcore-ds prepare chat {path} "
            f"--tokenizer {name} --cutoff-length {cutoff_length} --max-malformed 0.01 --output STORE"
        ) from None
    finally:
        lock.release()
    return folder
