"""Locks on the folders of runs and outputs, and resumable work in `OUTPUT.unfinished`."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import unfinished_path, write_json, writing
from vcore_ds.common.text import shorten

LOCK = ".lock"

WAIT_SECONDS = 300.0
"""Time for the ranks of an earlier attempt, whose launcher was killed, to finish their step and save."""


class RunLock:
    """The lock on a run's folder, held by rank 0; the kernel releases it when the process ends. Without it, the next
    job could start while the ranks of one whose launcher was killed are still saving."""

    def __init__(self, folder: Path):
        self.folder, self._lock = folder, FileLock(folder / LOCK)

    def acquire(self, say: Callable[[str], None]) -> None:
        """Make the folder if needed and acquire the lock; warns if the file system has no locks. Raises UserError if
        the folder cannot be made, or another process holds the lock for longer than `WAIT_SECONDS`."""
        with writing("run.output_dir", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if not _wait_for_lock(self._lock, self.folder, say):
            raise UserError(
                f"run.output_dir: {self.folder}: found another process using it; expected one job at a time. Stop "
                "that job (`touch STOP` in the folder), or set run.output_dir"
            )

    def release(self) -> None:
        self._lock.release()  # keep the file: a waiting process would lock the deleted one


@contextmanager
def lock_folder(
    folder: Path, say: Callable[[str], None] = print, *, waits: bool = False, output: Path | None = None
) -> Iterator[FileLock]:
    """A context with an exclusive lock on an --output folder, which is made if needed; warns if the file system has no
    locks. The kernel releases the lock when the process ends. `waits`: up to `WAIT_SECONDS` for another process that
    holds it. `output`: the path for messages, if another. Raises UserError if another process holds the lock, OSError
    if the folder cannot be made."""
    lock = FileLock(folder / LOCK)
    while not _make_and_lock(folder, lock, say, waits, output or folder):
        lock.release()
    try:
        yield lock
    finally:
        lock.release()


@contextmanager
def lock_output(path: Path, *, waits: bool = False) -> Iterator[None]:
    """As `lock_folder`, for a folder that exists only when it is complete: the lock lies beside it, until the end of
    the context. Raises UserError also if it cannot be made."""
    missing, folder = [parent for parent in path.parents if not parent.exists()], path.with_name(f".{path.name}.lock")
    with ExitStack() as held:
        with writing("--output", path, "a new folder that can be written"):
            lock = held.enter_context(lock_folder(folder, waits=waits, output=path))
        try:
            yield
        finally:
            remove_locked(folder, lock)
            for parent in missing:
                with suppress(OSError):  # not empty: it has the output, or another process's lock
                    parent.rmdir()


def _make_and_lock(folder: Path, lock: FileLock, say: Callable[[str], None], waits: bool, output: Path) -> bool:
    """Make a folder if needed and lock it. False if another process has removed it meanwhile (`remove_locked`)."""
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        # While it is open its inode is not reused, so a new folder of the same name is recognised.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not (_wait_for_lock if waits else _try_lock)(lock, output, say):
                raise UserError(
                    f"--output: {output}: found another process writing into it; expected one at a time. Wait for it, "
                    "or name another folder"
                )
            return os.path.samestat(os.fstat(descriptor), os.stat(folder))
        finally:
            os.close(descriptor)
    return False


def _wait_for_lock(lock: FileLock, folder: Path, say: Callable[[str], None]) -> bool:
    """Whether the lock could be acquired within `WAIT_SECONDS`; says that it waits."""
    if _try_lock(lock, folder, say):
        return True
    say(f"{folder}: another process is using it; waiting up to {WAIT_SECONDS:.0f} s for it to end")
    return _try_lock(lock, folder, say, WAIT_SECONDS)


def _try_lock(lock: FileLock, folder: Path, say: Callable[[str], None], seconds: float = 1.0) -> bool:
    """Whether the lock could be acquired within `seconds`; without one, with a warning, if the file system has none."""
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        return False
    except FileNotFoundError:
        raise
    except (OSError, NotImplementedError) as error:
        say(f"warning: {folder} cannot be locked ({error}): make sure that no other job uses it")
    return True


def remove_locked(folder: Path, lock: FileLock) -> None:
    """Remove the folder of `lock_folder` and release its lock; the last call in that context. It is renamed while it is
    locked, so that the next process with the lock notices and makes a new folder. Its contents are removed after the
    release, because NFS keeps open files and their folder."""
    removed = folder.with_name(f"{folder.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)  # from a process that was killed here
    with suppress(OSError):
        folder.rename(removed)
    lock.release()
    shutil.rmtree(removed, ignore_errors=True)


REQUEST = "request.json"  # file in `OUTPUT.unfinished` with the request to which the finished parts belong
MAX_SHOWN = 12  # differences in a message


@contextmanager
def unfinished_work(output: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """A context that yields `OUTPUT.unfinished`, exclusively locked, for the finished parts of a long computation. The
    folder is removed at the end; if the block raises, it stays if it has any results. Raises as `lock_folder`."""
    folder = unfinished_path(output)
    with lock_folder(folder, say) as lock:
        try:
            yield folder
        except BaseException:
            if not _has_results(folder):
                remove_locked(folder, lock)
            raise
        remove_locked(folder, lock)


def resume_or_begin(folder: Path, request: Mapping[str, Any], say: Callable[[str], None], *, again: bool) -> None:
    """Keep the finished parts in the folder of `unfinished_work` if they were made for the same request: all values
    that they depend on, as JSON. Without parts, or with `again`, start empty.
    Raises UserError if there are parts of another request."""
    if _has_results(folder):
        differences = describe_differences(read_request(folder), request)
        if not (differences or again):
            say(f"{folder}: resuming where an earlier run ended")
            return
        if not again:
            raise UserError(
                f"--output: {folder}: found unfinished work of another request:\n{differences}\nexpected the same "
                "values, to resume it. Name another --output, or delete the unfinished work with --again"
            )
        say(f"{folder}: beginning again")
    discard_parts(folder)
    write_json(folder / REQUEST, request)


def discard_parts(folder: Path) -> None:
    """Empty a folder except for its lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def read_request(folder: Path) -> dict[str, Any]:
    """The request of the parts in a folder; empty if the file is missing or damaged."""
    with suppress(FileNotFoundError, ValueError):
        request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
        return request if isinstance(request, dict) else {}
    return {}


def describe_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """A line for each dotted key with different values in two requests; empty if they are equal."""
    left, right = _flatten(old), _flatten(json.loads(json.dumps(new)))
    keys = [key for key in left | right if left.get(key) != right.get(key)]
    shown = [(key, *(shorten(side.get(key, "nothing"), 160) for side in (left, right))) for key in keys[:MAX_SHOWN]]
    lines = [f"  {key}: {there} there, {here} here" for key, there, here in shown]
    if len(keys) > MAX_SHOWN:
        lines.append(f"  and {len(keys) - MAX_SHOWN:,} more")
    return "\n".join(lines)


def _flatten(value: Any, key: str = "") -> dict[str, str]:
    """Dotted key -> value as JSON, of nested objects and lists; empty ones are values."""
    children = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(children, Mapping) or (key and not children):
        return {key: json.dumps(value, ensure_ascii=False)}
    return {k: v for name, child in children.items() for k, v in _flatten(child, f"{key}.{name}".lstrip(".")).items()}


def _has_results(folder: Path) -> bool:
    """Whether a folder has more files than the lock and the request."""
    return any(path.is_file() and path.name != LOCK and not path.name.startswith(REQUEST) for path in folder.rglob("*"))
