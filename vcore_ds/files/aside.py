"""Files and folders written aside: whatever has its own name is whole, and on the disk.

`NAME.unfinished` stands beside `NAME` while it is written. At the end all of it is flushed and renamed, so that a kill
or a power failure leaves the old `NAME`, or none, or the new one.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = ".unfinished"
"""Ending of everything that is still being written, or that an interruption has left."""


class NoRoom(OSError):
    """A disk has less room than is about to be written."""


@contextmanager
def written_aside(path: Path, *, several_writers: bool = False) -> Iterator[Path]:
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
