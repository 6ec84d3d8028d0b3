"""One job at a time in a run's folder, one command at a time in an --output."""

import subprocess
import sys
from pathlib import Path

import pytest

from vcore_ds.common import locks
from vcore_ds.common.errors import UserError
from vcore_ds.common.locks import LOCK, RunLock, lock_folder

HOLD = """
import sys
from pathlib import Path
from vcore_ds.common.locks import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire(print)
print('held', flush=True)
input()
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_folder_is_refused_until_its_holder_is_killed(
    tmp_path: Path, holder: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.5)
    said: list[str] = []
    with pytest.raises(UserError, match="run.output_dir: .*found another process using it"):
        RunLock(tmp_path).acquire(said.append)
    assert len(said) == 1 and "another process is using it; waiting" in said[0]
    with pytest.raises(UserError, match=f"--output: {tmp_path}: "):
        lock_folder(tmp_path).__enter__()
    holder.kill()
    holder.wait()
    for _ in range(2):  # the lock is free again after its release
        lock = RunLock(tmp_path)
        lock.acquire(said.append)
        lock.release()
        with lock_folder(tmp_path, said.append):
            assert (tmp_path / LOCK).exists()
    assert len(said) == 1


def test_work_goes_on_with_a_warning_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        raise OSError("No locks available")

    monkeypatch.setattr(locks.FileLock, "acquire", refuse)
    said: list[str] = []
    lock = RunLock(tmp_path / "run")
    lock.acquire(said.append)
    lock.release()
    with lock_folder(tmp_path / "output", said.append):
        assert all((tmp_path / name).is_dir() for name in ("run", "output"))
    assert len(said) == 2 and all("cannot be locked (No locks available)" in line for line in said)
