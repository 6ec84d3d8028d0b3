"""One job at a time in a run's folder."""

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from vcore_ds.errors import UserError
from vcore_ds.files.user_paths import writing

LOCK = ".lock"

WAIT_SECONDS = 300.0
"""For the ranks of an attempt before, whose launcher is gone, to finish their step and save."""


class RunLock:
    """Held by rank 0 while it lives: the kernel lets go of it with the process, however that ends.

    Without it the job that follows one whose launcher was killed could begin beside ranks that are still saving.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock: FileLock | None = None

    def acquire(self, say: Callable[[str], None]) -> None:
        """Makes the folder where it is not there. Does nothing where the file system knows no locks, and says so.

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
                say(f"{self.folder}: another process works there; waiting up to {WAIT_SECONDS:.0f} s for its end")
                lock.acquire(timeout=WAIT_SECONDS)
        except Timeout:
            raise UserError(
                f"run.output_dir: {self.folder}: found another process at work there; expected one job at a time. End "
                "that one (`touch STOP` in the folder), or set run.output_dir"
            ) from None
        except (OSError, NotImplementedError) as error:
            say(f"warning: {self.folder} cannot be locked ({error}): see to it that no other job uses it meanwhile")
            return
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()  # the file stays: who waits for it would hold what nobody else can see
            self._lock = None
