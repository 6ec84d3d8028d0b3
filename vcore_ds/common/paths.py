"""Files and folders: atomic writes, one message for every error of the system, JSON, and digests of contents."""

import errno
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from vcore_ds.common.errors import UserError
from vcore_ds.common.text import check_unicode

SUFFIX = ".unfinished"
"""Suffix of files and folders while they are written. At the end they are flushed and renamed, so that a kill or a
power failure leaves the old file, none, or the new one."""


class NoRoom(OSError):
    """The disk has less free space than needed."""


@contextmanager
def write_atomically(path: Path, *, several_writers: bool = False) -> Iterator[Path]:
    """Write a file or folder under a temporary path, which the context yields and renames to `path` at its end, or
    removes if the block raises. Replaces an existing file (of a symbolic link, its target), and raises OSError for a
    folder that is not empty. Yields a device or pipe itself. `several_writers`: processes may write the same content
    at once; each has a different temporary path, which stays if it is killed."""
    if is_special(path):
        yield path
        return
    if path.name in ("", ".."):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.is_symlink():
        path = path.resolve()
    unfinished = unfinished_path(path.with_name(f"{path.name}.{os.getpid()}") if several_writers else path)
    _remove(unfinished)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield unfinished
        _flush_and_rename(unfinished, path)
    except BaseException:
        discard(unfinished)
        raise


def is_special(path: Path) -> bool:
    """Whether `path` is a device, a pipe or a socket, which is written to and never replaced. Raises OSError."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not S_ISREG(mode) and not S_ISDIR(mode)


def write_text(path: Path, text: str, *, several_writers: bool = False) -> None:
    """Write a UTF-8 text file atomically; `several_writers` as in `write_atomically`."""
    with write_atomically(path, several_writers=several_writers) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def unfinished_path(path: Path) -> Path:
    """The temporary path of `path` while it is written."""
    return path.with_name(path.name + SUFFIX)


def begin_folder(folder: Path, num_bytes: int, purpose: str) -> Path:
    """Make an empty folder under the temporary path of `folder`, in which several processes may write. `purpose`
    completes "expected N bytes for", and may say how to need less. Raises NoRoom if the disk has less than
    `num_bytes` free."""
    unfinished = unfinished_path(folder)
    _remove(unfinished)
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < num_bytes:
        raise NoRoom(f"found {free:,} bytes free; expected {num_bytes:,} for {purpose}")
    unfinished.mkdir()
    return unfinished


def finish_folder(folder: Path) -> None:
    """Flush all files in the folder of `begin_folder`, and rename it to `folder`."""
    _flush_and_rename(unfinished_path(folder), folder)


def discard(unfinished: Path) -> None:
    """Remove a temporary file or folder after a failure; ignores errors, since the failure itself is reported."""
    shutil.rmtree(unfinished, ignore_errors=True)
    with suppress(OSError):
        unfinished.unlink()


def flush(path: Path) -> None:
    """Flush a file to disk; or the names in a folder, which the fsync of its files does not cover."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support or need fsync of folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def free_space(path: Path) -> str:
    """The free bytes of the disk of `path`, which may not exist, for messages."""
    try:
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        return f"{shutil.disk_usage(existing).free:,} bytes free there"
    except OSError as error:
        return f"free space unknown: {error}"


def _flush_and_rename(unfinished: Path, path: Path) -> None:
    if unfinished.is_dir():
        for folder, _, names in os.walk(unfinished):
            for name in names:
                flush(Path(folder, name))
            flush(Path(folder))
    else:
        flush(unfinished)
    unfinished.rename(path)
    flush(path.parent)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a full disk, an exceeded quota and a file size limit."""
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""System errors in the messages of `safetensors` and `tokenizers`, whose exceptions are not OSErrors."""

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
COMPRESSIONS = (".gz", ".zst", ".bz2")


def find_data_suffix(path: str | Path) -> str:
    """The suffix of a data file, in lower case and without that of its compression; empty for another file."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
        if suffixes and suffixes[-1] in (".parquet", ".arrow"):
            return ""
    return suffixes[-1] if suffixes and suffixes[-1] in DATA_SUFFIXES else ""


def expand_home(path: str | Path) -> Path:
    """Replace `~` or `~USER` by that home folder; where there is none, keep the name, as shells do: files may be called
    ~x, for which `Path.expanduser` raises RuntimeError."""
    return Path(os.path.expanduser(path))


def check_working_folder() -> None:
    """Raise UserError if the working folder has been removed, or cannot be read: libraries need it."""
    with reading("", Path(), "a working folder: change to one that exists (cd)"):
        os.getcwd()


def split_source(source: str) -> tuple[str, str | None]:
    """Split NAME::CONFIGURATION of a folder or hub data set; None for no configuration."""
    name, mark, configuration = source.rpartition("::")
    return (name, configuration) if mark and not os.path.lexists(expand_home(source)) else (source, None)


def can_be_hub_id(source: str) -> bool:
    """Whether `source`, if it is no file or folder, can be the id of a data set on the hub: owner/name."""
    name = split_source(source)[0]
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not find_data_suffix(name)


def is_readable(source: str) -> bool:
    """Whether this process can read a file, a folder, or all files of a glob pattern."""
    path = str(expand_home(split_source(source)[0]))
    names = [path] if os.path.lexists(path) else glob.glob(path, recursive=True)  # file names may contain [
    return bool(names) and all(os.access(name, os.R_OK) for name in names)


def writing(where: str, path: Path, expected: str = "a folder that can be written") -> AbstractContextManager[None]:
    """A context for code that writes to `path`, or checks it before writing. `where`: the recipe's key or the command's
    option that names it; empty if messages begin with the path. Raises UserError for every OSError in the block."""
    return _explain_errors(where, path, "written", expected)


def reading(where: str, path: Path, expected: str) -> AbstractContextManager[None]:
    """A context for code that reads from `path`; see `writing`."""
    return _explain_errors(where, path, "read", expected)


def refuse_existing(path: Path, expected: str) -> None:
    """Raise UserError if `path`, an --output, exists or cannot be accessed; `expected` as in `writing`."""
    with writing("--output", path, expected):
        exists = path.exists()
    if exists:
        raise UserError(f"--output: {path}: is there already; expected {expected}. Name another one, or remove it")


def check_folder(folder: Path) -> None:
    """Check that a folder can be written, by making it and a file in it, and removing both: permissions do not show
    read-only or special file systems. Raises OSError."""
    missing = [parent for parent in (folder, *folder.parents) if not os.path.lexists(parent)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for parent in missing:
            with suppress(OSError):  # another process may have put something in it
                parent.rmdir()


@contextmanager
def _explain_errors(where: str, path: Path, what: str, expected: str) -> Iterator[None]:
    prefix = f"{where}: {path}" if where else str(path)
    try:
        yield
    except NoRoom as error:
        raise UserError(f"{prefix}: {error}") from None
    except OSError as error:
        raise UserError(_describe_error(prefix, path, what, expected, error)) from None
    except Exception as error:
        match = _RUST_ERROR.search(str(error))
        if isinstance(error, UserError) or match is None:
            raise
        system_error = OSError(int(match[1]), os.strerror(int(match[1])))
        raise UserError(_describe_error(prefix, path, what, expected, system_error)) from None


def _describe_error(prefix: str, path: Path, what: str, expected: str, error: OSError) -> str:
    other = Path(os.fsdecode(error.filename)) if error.filename is not None else path
    if other != path and path.parent not in other.parents and other not in path.parents:
        return f"{other}: cannot be used: {error.strerror}; expected to be, while {prefix} is {what}"
    problem = str(error) if error.errno is None else os.strerror(error.errno)  # Arrow replaces the text
    if other != path:
        problem += f" ({other})"
    remedy = "name another one"
    # numpy's OSError after a partial write has no errno.
    if error.errno in _DISK_IS_FULL or (error.errno is None and what == "written"):
        problem += f" ({free_space(path)})"
        remedy = "make room, or name a place on another disk"
    elif error.errno in (errno.EACCES, errno.EPERM):
        remedy = f"change its permissions, or {remedy}"
    return f"{prefix}: cannot be {what}: {problem}; expected {expected}: {remedy}"


Contents = TypeVar("Contents")


def read_json(path: Path, contents: TypeAdapter[Contents], expected: str, remedy: str = "Remove the file") -> Contents:
    """Read and validate a JSON file. `expected`: the contents in words; `remedy`: what to do with an invalid file.
    Raises UserError if it cannot be read or is invalid: truncated, damaged, or of another version."""
    with reading("", path, expected):
        text = path.read_bytes()
    return parse_json(text, contents, str(path), expected, remedy)


def parse_json(text: bytes, contents: TypeAdapter[Contents], where: str, expected: str, remedy: str) -> Contents:
    """Validate a JSON text as in `read_json`; `where` begins the message."""
    try:
        return contents.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        problem = f"{place}: {first['msg']}" if place else first["msg"]
        shown = problem[:200]  # it may quote long keys
        raise UserError(
            f"{where}: is damaged, or of another version ({shown}); expected {expected}. {remedy}"
        ) from None


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n", several_writers=True)


WHOLE_BYTES = 512 * 2**20
"""Files up to this size are hashed completely, which takes a second (SHA-256: 520 MB/s on one core)."""
STEP_BYTES = 4 * 2**20
"""Distance between the samples of larger files."""
_SAMPLE_BYTES = 4096
_RULE = "2:"
"""Prefix of digests, which names what is hashed."""
_SETTLED_NS = 2 * 10**9
"""Age from which a file's time tells its contents: two changes may have the same time on file systems with coarse
clocks."""


def cache_root(cache_folder: str | None = None) -> Path:
    """The cache folder; None for `$XDG_CACHE_HOME/vcore_ds`, or `~/.cache/vcore_ds`. Raises UserError if there is no
    home folder: one called `~` would be made."""
    root = expand_home(cache_folder or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vcore_ds"))
    if root.parts[0] == "~":
        raise UserError(
            f"data.cache_dir: {root}: found no home folder: HOME is not set, and user id {os.getuid()} has no name; "
            "expected one. Set HOME, XDG_CACHE_HOME or data.cache_dir"
        )
    return root


def compute_file_digest(path: Path) -> str:
    """Compute `_RULE` plus a SHA-256 of a file's size and contents; of one larger than `WHOLE_BYTES`, of samples. It is
    read again only if its size, times or inode have changed. Raises OSError, and UserError for a name that is no
    UTF-8."""
    stat = path.stat()
    state = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
    # Manifests and tables, which keep the names of files, could not be written.
    check_unicode(state, str(path), "Rename the file or folder")
    name = hashlib.sha256(state.encode()).hexdigest()[:32]
    with suppress(OSError, UserError):  # without a cache it is computed each time
        if (known := (cache_root() / "digests" / name).read_text()).startswith(_RULE):
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
        with suppress(OSError, UserError):
            write_text(cache_root() / "digests" / name, text, several_writers=True)
    return text


def read_samples(path: Path, size: int, starts: Iterable[int]) -> Iterator[bytes]:
    """Yield 4 KiB of a file at each of `starts`, and every `STEP_BYTES` from there to the next; `size`: of the file."""
    ordered = sorted(starts)
    with path.open("rb", buffering=0) as file:
        for start, end in zip(ordered, [*ordered[1:], size], strict=True):
            for offset in range(start, end, STEP_BYTES):
                file.seek(offset)
                yield file.read(_SAMPLE_BYTES)
