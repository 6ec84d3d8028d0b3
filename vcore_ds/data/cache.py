"""The data that a recipe names: token stores, or raw data, which are converted to a store once, in a cache. Also finds
training traces that are in the trusted data too: their utility to themselves says little."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from filelock import FileLock, Timeout

from vcore_ds.common import __version__
from vcore_ds.common.locks import read_request
from vcore_ds.common.paths import cache_root, unfinished_path, writing
from vcore_ds.config.data_section import MANIFEST, DataConfig
from vcore_ds.data.conversations import check_tokenizer
from vcore_ds.data.prepare.convert import PrepareRequest
from vcore_ds.data.prepare.pipeline import prepare
from vcore_ds.data.prepare.report import refuse_malformed
from vcore_ds.data.prepare.sources import check_source, find_files, is_small
from vcore_ds.data.store import TokenStore, check_supervision, read_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vcore_ds.data.dataset import Store


def find_or_make_store(
    path: str,
    tokenizer: "PreTrainedTokenizerBase",
    settings: DataConfig,
    *,
    say: Callable[[str], None] = print,
    note: Callable[[str], None] | None = None,
) -> Path:
    """Return the token store of `path`: `path` itself, or one in the cache, which is made if it does not exist. Raw
    data may be anything that `vcore-ds prepare` takes. `settings`: how they are read; its own paths are not.
    `say` is called with progress and problems, `note` (None for `say`) with the formats and counts of the data. Raises
    UserError if the data do not exist, have too many malformed rows, or have nothing to learn from, if a store was made
    with another value of data.supervise, or if the cache cannot be written."""
    if check_source(path, settings.split):
        check_supervision(Path(path), settings.supervise)
        return Path(path)
    check_tokenizer(tokenizer)
    shared = settings.model_dump(include={"cutoff_length", "overlong", "supervise", "columns", "split"})
    request = PrepareRequest((path,), str(tokenizer.name_or_path), **shared)
    raw_files = find_files(request.sources, request.split)
    # The digest of a large file is of samples; changes in between show in its mtime.
    files = sorted({Path(file.path) for file in raw_files if not file.hub})
    times = [(str(file.resolve()), file.stat().st_mtime_ns) for file in files]
    origin = json.dumps([request.describe_origin(raw_files, tokenizer), times], sort_keys=True)
    name = f"{Path(path).stem.replace('::', '-')[:40]}-{hashlib.sha256(origin.encode()).hexdigest()[:16]}"
    folder, limit = cache_root(settings.cache_dir) / name, settings.max_malformed
    with writing("data.cache_dir", folder, "a folder that can be written, with room for the token store"):
        if (folder / MANIFEST).is_file():
            counts = read_manifest(folder)["counts"]
            if counts["malformed"]:
                listed = folder.with_name(f"{folder.name}.malformed.txt")
                faults = listed.read_text(encoding="utf-8").splitlines()
                refuse_malformed(path, faults, counts["drawn"], limit, f". All of them: {listed}")
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        try:
            held = lock.acquire(timeout=1)
        except Timeout:
            say(f"Data: {path}: another process is making {folder}; waiting for it")
            held = lock.acquire()
        with held:
            processes = 1 if is_small(path, settings.split) else len(os.sched_getaffinity(0))
            # The folder's name is a hash of everything else in the request, and no user chose it or could be asked.
            again = read_request(unfinished_path(folder)).get("version") != __version__
            prepare(
                request,
                folder,
                tokenizer=tokenizer,
                processes=processes,
                max_malformed=limit,
                again=again,
                say=say,
                note=note,
            )
    return folder


def find_shared(store: "Store", trusted: TokenStore) -> np.ndarray:
    """Find the positions in `store` of sequences with the same tokens as one of `trusted`, int64 [k], ascending."""
    # Only sequences of the same size are read.
    candidates = np.flatnonzero(np.isin(_sizes(store), _sizes(trusted)))
    if not len(candidates):
        return candidates
    tokens = {sequence.input_ids.tobytes() for sequence in trusted}
    return np.array([i for i in candidates.tolist() if store[i].input_ids.tobytes() in tokens], dtype=np.int64)


def _sizes(store: "Store") -> np.ndarray:
    """int64 [n], one number for tokens and supervised tokens of each sequence."""
    return store.lengths.astype(np.int64) << 32 | store.num_supervised_tokens
