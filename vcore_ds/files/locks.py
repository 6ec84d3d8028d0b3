"""One process at a time in a folder that is written: that of a run, or an --output."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from vcore_ds.errors import UserError
from vcore_ds.files.user_paths import writing

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
def alone_in(folder: Path, say: Callable[[str], None] = print) -> Iterator[FileLock]:
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
    """Removes the folder of `alone_in`, and releases its lock. Nothing else is to be done in the context.

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
