"""Folders and files that a user names: one message where the system does not let them be read or written."""

import errno
import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from vcore_ds.common.errors import UserError

# Files and folders written aside: whatever has its own name is whole, and on the disk.
#
# `NAME.unfinished` stands beside `NAME` while it is written. At the end all of it is flushed and renamed, so that a
# kill or a power failure leaves the old `NAME`, or none, or the new one.


SUFFIX = ".unfinished"
"""Ending of everything that is still being written, or that an interruption has left."""


class NoRoom(OSError):
    """A disk has less room than is about to be written."""


@contextmanager
def write_atomically(path: Path, *, several_writers: bool = False) -> Iterator[Path]:
    """Yields the name to write a file or a folder under, where nothing is; `path` gets its name when the block ends.

    A block that raises leaves neither name behind. An existing file is replaced; an existing folder with something in
    it is not (OSError).

    Args:
        several_writers: for a target that several processes may write at the same time, each with the same content:
            every one has a name of its own. What a killed one leaves stays until its folder goes. Otherwise there is
            one writer, whose next attempt removes what the last one left.
    """
    unfinished = unfinished_path(path.with_name(f"{path.name}.{os.getpid()}") if several_writers else path)
    _remove(unfinished)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield unfinished
        _rename(unfinished, path)
    except BaseException:
        discard(unfinished)
        raise


def unfinished_path(path: Path) -> Path:
    """Where `path` is written before it has its name."""
    return path.with_name(path.name + SUFFIX)


def begin_folder(folder: Path, num_bytes: int, purpose: str) -> Path:
    """An empty folder under the unfinished name of `folder`, for what several processes write in steps.

    Args:
        num_bytes: what is going to be written.
        purpose: completes "expected N bytes for", and may say how to need less.

    Raises:
        NoRoom: before anything is written.
    """
    unfinished = unfinished_path(folder)
    _remove(unfinished)
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < num_bytes:
        raise NoRoom(f"found {free:,} bytes free; expected {num_bytes:,} for {purpose}")
    unfinished.mkdir()
    return unfinished


def finish_folder(folder: Path) -> None:
    """Flushes what `begin_folder` has begun, whoever wrote it, and gives it its name."""
    _rename(unfinished_path(folder), folder)


def discard(unfinished: Path) -> None:
    """Removes what a failure has left, as far as that is possible: the failure itself is what there is to report."""
    shutil.rmtree(unfinished, ignore_errors=True)
    with suppress(OSError):
        unfinished.unlink()


def flush(path: Path) -> None:
    """Forces a file, or the names in a folder, which a file's own fsync does not cover, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync of folders, and need none.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def free_space(path: Path) -> str:
    """For messages: the free bytes of the disk that `path` is or would be on."""
    try:
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        return f"{shutil.disk_usage(existing).free:,} bytes free there"
    except OSError as error:
        return f"free space unknown: {error}"


def _rename(unfinished: Path, path: Path) -> None:
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
"""Errors of a disk, a quota or a file size limit without room."""
_REMEDIES = {
    **dict.fromkeys(_DISK_IS_FULL, "make room, or name a place on another disk"),
    errno.EACCES: "change its permissions, or name another one",
    errno.EPERM: "change its permissions, or name another one",
    errno.EROFS: "name one on a file system that is mounted for writing",
    errno.ENAMETOOLONG: "name a shorter one",
}
"""What to do, by error number."""
_OTHER_REMEDY = "name another one"
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""How `safetensors` and `tokenizers` word the system's errors, in exceptions that are no OSError."""

DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
"""Files that raw data are read from."""


def can_be_hub_id(source: str) -> bool:
    """Whether `source`, which is not there as a file or folder, can be a data set on the hub: owner/name."""
    is_local = source.startswith((".", "/", "~")) or Path(source).suffix.lower() in DATA_SUFFIXES
    return source.count("/") == 1 and not is_local


def is_readable(source: str) -> bool:
    """Whether this process can read a file, a folder, or all files of a pattern."""
    path = str(Path(source).expanduser())
    names = [path] if os.path.lexists(path) else glob.glob(path, recursive=True)  # a path may hold [ itself
    return bool(names) and all(os.access(name, os.R_OK) for name in names)


@contextmanager
def writing(where: str, path: Path, expected: str = "a folder that can be written") -> Iterator[None]:
    """Around a block that writes to `path`, or looks there before it writes.

    Args:
        where: the recipe's key or the command's option that names the path; empty where messages begin with the path.

    Raises:
        UserError: for every OSError of the block.
    """
    with _explained(where, path, "written", expected):
        yield


@contextmanager
def reading(where: str, path: Path, expected: str) -> Iterator[None]:
    """The same around a block that reads from `path`."""
    with _explained(where, path, "read", expected):
        yield


def refuse_existing(path: Path, expected: str) -> None:
    """Raises UserError where `path`, an --output, exists or cannot be looked at; `expected` as for `writing`."""
    with writing("--output", path, expected):
        is_there = path.exists()
    if is_there:
        raise UserError(f"--output: {path}: is there already; expected {expected}. Name another one, or remove it")


def check_folder(folder: Path) -> None:
    """Makes the folder with a file in it, and removes what it has made.

    Nothing less tells: permissions do not know of read-only or special file systems.

    Raises:
        OSError: from the system.
    """
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
def _explained(where: str, path: Path, what: str, expected: str) -> Iterator[None]:
    try:
        yield
    except NoRoom as error:
        raise UserError(f"{_place(where, path)}: {error}") from None
    except OSError as error:
        raise UserError(_message(where, path, what, expected, error)) from None
    except Exception as error:
        found = _RUST_ERROR.search(str(error))
        if isinstance(error, UserError) or found is None:
            raise
        system_error = OSError(int(found[1]), os.strerror(int(found[1])))
        raise UserError(_message(where, path, what, expected, system_error)) from None


def _place(where: str, path: Path) -> str:
    return f"{where}: {path}" if where else str(path)


def _message(where: str, path: Path, what: str, expected: str, error: OSError) -> str:
    place = _place(where, path)
    other = Path(os.fsdecode(error.filename)) if error.filename is not None else path
    if other != path and path.parent not in other.parents and other not in path.parents:
        return f"{other}: cannot be used: {error.strerror}; expected to be, while {place} is {what}"
    # numpy gives no number where it has written fewer bytes than it was to.
    is_full = error.errno in _DISK_IS_FULL or (error.errno is None and what == "written")
    number = errno.ENOSPC if is_full else error.errno
    remedy = _OTHER_REMEDY if number is None else _REMEDIES.get(number, _OTHER_REMEDY)
    found = _obstacle(path, error)
    if found is None:
        found = error.strerror or str(error)
        if other != path:
            found += f" ({other})"
    if is_full:
        found += f" ({free_space(path)})"
    return f"{place}: cannot be {what}: {found}; expected {expected}: {remedy}"


def _obstacle(path: Path, error: OSError) -> str | None:
    """What stands where a folder is needed, for the errors whose own words do not say."""
    if error.errno not in (errno.EEXIST, errno.ENOTDIR, errno.ENOENT, errno.ELOOP):
        return None
    for place in (*reversed(path.parents), path):
        if place.is_symlink() and not os.path.exists(place):
            return f"{place} is a link to {os.readlink(place)}, where nothing is or which leads back to itself"
        if os.path.exists(place) and not place.is_dir():
            return f"{place} is a file, not a folder"
    return None


# JSON that this package writes, read back as the types that were written, with one message where it is not.


Contents = TypeVar("Contents")

_MAX_SHOWN = 200
"""Characters of a problem in a message: it may quote a key of any length."""


def read_json(path: Path, contents: TypeAdapter[Contents], expected: str, remedy: str = "Remove the file") -> Contents:
    """What a file holds.

    Args:
        contents: what it should hold.
        expected: the same in words.
        remedy: what to do with a file that holds something else.

    Raises:
        UserError: the file cannot be read, or holds something else: it is cut off, damaged, or of another version.
    """
    with reading("", path, expected):
        text = path.read_bytes()
    return parse_json(text, contents, str(path), expected, remedy)


def parse_json(text: bytes, contents: TypeAdapter[Contents], where: str, expected: str, remedy: str) -> Contents:
    """The same of a text that was read already; `where` begins the message."""
    try:
        return contents.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        problem = f"{place}: {first['msg']}" if place else first["msg"]
        raise UserError(
            f"{where}: is damaged, or of another version ({problem[:_MAX_SHOWN]}); expected {expected}. {remedy}"
        ) from None


def write_json(path: Path, value: Any) -> None:
    """Readable JSON, written aside."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    with write_atomically(path, several_writers=True) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
