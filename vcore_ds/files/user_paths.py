"""Folders and files that a user names: one message where the system does not let them be read or written."""

import errno
import glob
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vcore_ds.errors import UserError
from vcore_ds.files.aside import NoRoom, free_space

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
