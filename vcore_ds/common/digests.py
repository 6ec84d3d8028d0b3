"""Digests that tell files apart: of all bytes of a small file, of samples throughout a large one; kept in a cache."""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from vcore_ds.common.paths import write_text
from vcore_ds.common.text import check_unicode

WHOLE_BYTES = 512 * 2**20
"""Files up to this size are hashed completely, which takes a second (SHA-256: 520 MB/s on one core)."""
STEP_BYTES = 4 * 2**20
"""Distance between the samples of larger files."""
_SAMPLE_BYTES = 4096

_RULE = "2:"
"""Prefix of digests. Those of vcore_ds 0.7 and before, of size, first and last MiB, have none."""
_SETTLED_NS = 2 * 10**9
"""Age from which a file's time tells its contents: two changes may have the same time on file systems with coarse
clocks."""


def cache_root(cache_folder: str | None = None) -> Path:
    """The cache folder; None for `$XDG_CACHE_HOME/vcore_ds`, or `~/.cache/vcore_ds`."""
    return Path(cache_folder or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vcore_ds")).expanduser()


def compute_file_digest(path: Path) -> str:
    """Compute `_RULE` plus a SHA-256 of a file's size and contents; of one larger than `WHOLE_BYTES`, of samples. It is
    read again only if its size, times or inode have changed. Raises OSError, and UserError for a name that is no
    UTF-8."""
    stat = path.stat()
    state = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
    # Manifests and tables, which keep the names of files, could not be written.
    check_unicode(state, str(path), "Rename the file or folder")
    entry = cache_root() / "digests" / hashlib.sha256(state.encode()).hexdigest()[:32]
    with suppress(OSError):
        if (known := entry.read_text()).startswith(_RULE):
            return known
    digest = hashlib.sha256(f"{stat.st_size} ".encode())
    if stat.st_size <= WHOLE_BYTES:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    else:
        for sample in read_samples(path, stat.st_size, {0, max(0, stat.st_size - _SAMPLE_BYTES)}):
            digest.update(sample)
    text = _RULE + digest.hexdigest()
    if max(stat.st_mtime_ns, stat.st_ctime_ns) < time.time_ns() - _SETTLED_NS:
        with suppress(OSError):
            write_text(entry, text, several_writers=True)
    return text


def read_samples(path: Path, size: int, starts: Iterable[int]) -> Iterator[bytes]:
    """Yield 4 KiB of a file at each of `starts`, and every `STEP_BYTES` from there to the next; `size`: of the file."""
    ordered = sorted(starts)
    with path.open("rb", buffering=0) as file:
        for start, end in zip(ordered, [*ordered[1:], size], strict=True):
            for offset in range(start, end, STEP_BYTES):
                file.seek(offset)
                yield file.read(_SAMPLE_BYTES)
