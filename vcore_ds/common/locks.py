"""One process at a time in a folder that is written: that of a run, or an --output."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import unfinished_path, write_json, writing

LOCK = ".lock"

WAIT_SECONDS = 300.0
"""Time for ranks of an earlier attempt, whose launcher is gone, to finish their step and save."""


class RunLock:
    """The lock on a run's folder, which rank 0 holds while it lives: the kernel releases it with the process.

    Without it, a job that follows one whose launcher was killed could begin while the old ranks are still saving.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock: FileLock | None = None

    def acquire(self, say: Callable[[str], None]) -> None:
        """Waits for the lock and takes it, making the folder where needed; warns where the file system has no locks.

        Raises:
            UserError: the folder cannot be made, or another process holds it for longer than `WAIT_SECONDS`.
        """
        with writing("run.output_dir", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / LOCK)
        try:
            try:
                lock.acquire(timeout=1.0)
            except Timeout:
                say(f"{self.folder}: another process is using it; waiting up to {WAIT_SECONDS:.0f} s for it to end")
                lock.acquire(timeout=WAIT_SECONDS)
        except Timeout:
            raise UserError(
                f"run.output_dir: {self.folder}: found another process using it; expected one job at a time. Stop "
                "that job (`touch STOP` in the folder), or set run.output_dir"
            ) from None
        except (OSError, NotImplementedError) as error:
            say(_cannot_be_locked(self.folder, error))
            return
        self._lock = lock

    def release(self) -> None:
        """Lets another process have it; nothing where it is not held."""
        if self._lock is not None:
            self._lock.release()  # the file stays: a waiting process would otherwise lock a file without a name
            self._lock = None


@contextmanager
def lock_folder(folder: Path, say: Callable[[str], None] = print) -> Iterator[FileLock]:
    """A context in which this process alone writes into an --output, which is made where needed; warns where the file
    system has no locks. The kernel releases the lock of a process that is killed.

    Raises:
        UserError: another process is in it.
        OSError: the folder cannot be made.
    """
    lock = _lock(folder, say)
    try:
        yield lock
    finally:
        lock.release()


def remove_locked(folder: Path, lock: FileLock) -> None:
    """Removes the folder of `lock_folder`, and releases its lock. Nothing else is to be done in the context.

    The folder loses its name while it is locked: a process that gets the lock afterwards sees that, and makes a new
    folder (`_lock`). What is in it is removed after that: NFS keeps a file that is open, and with it the folder.
    """
    removed = folder.with_name(f"{folder.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)  # left by a process that was killed here
    with suppress(OSError):
        folder.rename(removed)
    lock.release()
    shutil.rmtree(removed, ignore_errors=True)


def _lock(folder: Path, say: Callable[[str], None]) -> FileLock:
    """Makes a folder where needed and locks it, once more where another process has removed it meanwhile."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        try:
            # Open, its inode cannot be reused: a folder that is removed cannot be mistaken for a new one of its name.
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            lock.acquire(timeout=1.0)
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
                return lock
            lock.release()
        except FileNotFoundError:
            lock.release()
        except Timeout:
            raise UserError(
                f"--output: {folder}: found another process writing into it; expected one at a time. Wait for it, or "
                "name another folder"
            ) from None
        except (OSError, NotImplementedError) as error:
            say(_cannot_be_locked(folder, error))
            return lock
        finally:
            os.close(descriptor)


def _cannot_be_locked(folder: Path, error: Exception) -> str:
    return f"warning: {folder} cannot be locked ({error}): make sure that no other job uses it"


# `OUTPUT.unfinished`: the parts of a long computation that are done, which the same command continues.
#
# The folder names the request that its parts belong to. It is gone when the computation is done, and after a failure
# before its first part.


REQUEST = "request.json"
MAX_DIFFERENCES = 12
"""Lines of a message on two requests."""
MAX_VALUE_LENGTH = 160
"""Characters of a value in such a line."""


@contextmanager
def unfinished_work(output: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Yields `OUTPUT.unfinished`, which this process alone writes into. A block that raises leaves the folder where
    something was computed; any other block removes it.

    Raises:
        UserError: another process is in it.
        OSError: the folder cannot be made.
    """
    folder = unfinished_path(output)
    with lock_folder(folder, say) as lock:
        try:
            yield folder
        except BaseException:
            if not _holds_parts(folder):
                remove_locked(folder, lock)
            raise
        remove_locked(folder, lock)


def resume_or_begin(folder: Path, request: Mapping[str, Any], say: Callable[[str], None], *, again: bool) -> None:
    """Keeps the parts in the folder of `unfinished_work` where they belong to the same request; else empties it.

    Args:
        request: everything that the parts depend on, as JSON can hold it.
        again: begin again, whatever was computed.

    Raises:
        UserError: parts of another request are there, and `again` is false.
    """
    if _holds_parts(folder) and not again:
        differences = describe_differences(read_request(folder), request)
        if not differences:
            say(f"{folder}: resuming where an earlier run ended")
            return
        raise UserError(
            f"--output: {folder}: found unfinished work of another request:\n{differences}\nexpected the same values, "
            "to resume it. Name another --output, or delete the unfinished work with --again"
        )
    if _holds_parts(folder):
        say(f"{folder}: beginning again")
    discard_parts(folder)
    write_json(folder / REQUEST, request)


def discard_parts(folder: Path) -> None:
    """Empties a folder but for its lock: where work begins again, or can never come to a result."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def read_request(folder: Path) -> dict[str, Any]:
    """The request whose parts are in a folder; empty where the file is missing or damaged."""
    try:
        found = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def describe_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """A line for each value in which two requests differ, by its dotted key; empty where they are equal."""
    left, right = _flatten(there), _flatten(json.loads(json.dumps(here)))
    keys = [key for key in dict.fromkeys([*left, *right]) if left.get(key, _NOTHING) != right.get(key, _NOTHING)]
    lines = [f"  {key}: {_show(left, key)} there, {_show(right, key)} here" for key in islice(keys, MAX_DIFFERENCES)]
    if len(keys) > MAX_DIFFERENCES:
        lines.append(f"  and {len(keys) - MAX_DIFFERENCES:,} more")
    return "\n".join(lines)


_NOTHING = object()


def _flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Dotted key -> value, of objects and lists within each other; an empty one is a value."""
    children = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(children, Mapping) or (key and not children):
        return {key: value}
    return {k: v for name, child in children.items() for k, v in _flatten(child, f"{key}.{name}".lstrip(".")).items()}


def _show(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "nothing"
    text = json.dumps(values[key], ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 3] + "..."


def _holds_parts(folder: Path) -> bool:
    """Whether anything was computed: the lock, the request and empty folders are written before that."""
    return any(path.is_file() and path.name != LOCK and not path.name.startswith(REQUEST) for path in folder.rglob("*"))
