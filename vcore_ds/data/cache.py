"""Cache of token stores, made once from the raw data that recipes name."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from vcore_ds.common.digests import cache_root
from vcore_ds.common.locks import read_request
from vcore_ds.common.paths import reading, unfinished_path, writing
from vcore_ds.common.version import __version__
from vcore_ds.config.data_section import DataConfig
from vcore_ds.data.conversations import check_tokenizer
from vcore_ds.data.store import MANIFEST, check_supervision, read_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMALL_BYTES = 32 * 2**20  # smaller data are tokenized before further processes would have started


def check_source(path: str) -> None:
    """Raise UserError unless `path` is data, a token store, or possibly an id on the hub, which is not contacted."""
    with reading("", Path(path), "data, or a token store, that can be read"):
        if not (Path(path) / MANIFEST).is_file():
            from vcore_ds.data.prepare.sources import find_local_files

            find_local_files(path, "train")


def is_small(path: str) -> bool:
    """Whether `path` is a token store, or raw data on this machine of which one is made in seconds."""
    from vcore_ds.data.prepare.sources import find_local_files

    if (Path(path) / MANIFEST).is_file():
        return True
    files = find_local_files(path, "train")
    return files is not None and sum(Path(file.path).stat().st_size for file in files) < SMALL_BYTES


def find_or_make_store(
    path: str,
    tokenizer: "PreTrainedTokenizerBase",
    settings: DataConfig,
    *,
    say: Callable[[str], None] = print,
    note: Callable[[str], None] | None = None,
) -> Path:
    """Return the token store of `path`: `path` itself, or one in the cache, which is made if it does not exist. Raw
    data may be anything that `vcore-ds prepare chat` takes. `settings`: how they are read; its own paths are not.
    `say` is called with progress and problems, `note` (None for `say`) with the formats and counts of the data. Raises
    UserError if the data do not exist, have too many malformed rows, or have nothing to learn from, if a store was made
    with another value of data.supervise, or if the cache cannot be written."""
    with reading("", Path(path), "data, or a token store, that can be read"):
        is_store = (Path(path) / MANIFEST).is_file()
    if is_store:
        check_supervision(Path(path), settings.supervise)
        return Path(path)
    from vcore_ds.data.prepare.curation import PrepareRequest, describe_origin
    from vcore_ds.data.prepare.pipeline import prepare, refuse_malformed
    from vcore_ds.data.prepare.sources import find_files

    check_tokenizer(tokenizer)
    shared = settings.model_dump(include={"cutoff_length", "overlong", "supervise", "columns"})
    request = PrepareRequest("chat", (path,), str(tokenizer.name_or_path), "train", **shared)
    raw_files = find_files(request.sources, request.split)
    # The digest of a large file is of samples; changes in between show in its mtime.
    files = sorted({Path(file.path) for file in raw_files if not file.hub})
    origin = [describe_origin(request, raw_files, tokenizer), [(str(f.resolve()), f.stat().st_mtime_ns) for f in files]]
    key = hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:16]
    name = f"{Path(path).stem.replace('::', '-')}-{key}"
    folder, limit = cache_root(settings.cache_dir) / name, settings.max_malformed
    with writing("data.cache_dir", folder, "a folder that can be written, with room for the token store"):
        if (folder / MANIFEST).is_file():
            counts = read_manifest(folder)["counts"]
            refuse_malformed(path, counts["malformed"], counts["drawn"], limit, f"{folder}.malformed.txt")
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        try:
            held = lock.acquire(timeout=1)
        except Timeout:
            say(f"Data: {path}: another process is making {folder}; waiting for it")
            held = lock.acquire()
        with held:
            processes = 1 if is_small(path) else len(os.sched_getaffinity(0))
            # The folder's name is a hash of everything else in the request, and no user chose it or could be asked.
            again = read_request(unfinished_path(folder)).get("version") != __version__
            prepare(request, folder, processes=processes, max_malformed=limit, again=again, say=say, note=note)
    return folder
