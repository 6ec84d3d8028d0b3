"""`OUTPUT.unfinished`: whose parts it keeps, when it goes, and that no second process works in a folder that goes."""

import fcntl
import json
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from vcore_ds.common.errors import UserError
from vcore_ds.common.locks import LOCK, FileLock, resume_or_begin, unfinished_work

REQUEST = {"seed": 1, "sets": [{"name": "a"}, {"name": "b"}], "lora": None, "betas": (0.9, 0.99)}


@pytest.fixture
def said() -> list[str]:
    return []


def attempt(output: Path, said: list[str], request: dict[str, Any], *, again: bool = False, parts: int = 1) -> set[str]:
    """An attempt that stops after some parts; returns the parts that it found."""
    with suppress(KeyboardInterrupt), unfinished_work(output, said.append) as folder:
        resume_or_begin(folder, request, said.append, again=again)
        (folder / "pass_000").mkdir(exist_ok=True)
        existing = {path.name for path in (folder / "pass_000").iterdir()}
        for number in range(parts):
            (folder / "pass_000" / f"{len(existing) + number}.npz").touch()
        raise KeyboardInterrupt
    return existing


def test_parts_are_kept_only_for_the_same_request(tmp_path: Path, said: list[str]) -> None:
    output = tmp_path / "out"
    assert attempt(output, said, REQUEST) == set() and said == []
    assert attempt(output, said, REQUEST) == {"0.npz"} and "resuming" in said[-1]
    changed = REQUEST | {"seed": 2, "lora": {"rank": 4}, "sets": REQUEST["sets"][::-1], "betas": [0.9, 0.999]}
    with pytest.raises(UserError) as error:
        attempt(output, said, changed)
    assert str(error.value).splitlines() == [
        f"--output: {output}.unfinished: found unfinished work of another request:",
        "  betas.1: 0.99 there, 0.999 here",
        "  lora: null there, nothing here",
        "  seed: 1 there, 2 here",
        '  sets.0.name: "a" there, "b" here',
        '  sets.1.name: "b" there, "a" here',
        "  lora.rank: nothing there, 4 here",
        "expected the same values, to resume it. Name another --output, or delete the unfinished work with --again",
    ]
    assert attempt(output, said, REQUEST, parts=0) == {"0.npz", "1.npz"}, "a refusal has deleted work"
    assert attempt(output, said, changed, again=True) == set() and "beginning again" in said[-1]
    assert attempt(output, said, changed) == {"0.npz"}


def test_a_request_that_cannot_be_read_counts_as_another_one(tmp_path: Path, said: list[str]) -> None:
    attempt(tmp_path / "out", said, REQUEST)
    for damage in ("{", "[]"):
        (tmp_path / "out.unfinished" / "request.json").write_text(damage)
        with pytest.raises(UserError, match="  seed: nothing there, 1 here"):
            attempt(tmp_path / "out", said, REQUEST)


def test_a_long_difference_is_cut(tmp_path: Path, said: list[str]) -> None:
    attempt(tmp_path / "out", said, {str(i): "x" * 1000 for i in range(40)})
    with pytest.raises(UserError) as error:
        attempt(tmp_path / "out", said, {})
    assert "and 28 more" in str(error.value) and len(str(error.value)) < 3500


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, said: list[str]) -> None:
    attempt(tmp_path / "new" / "out", said, REQUEST, parts=0)
    assert list((tmp_path / "new").iterdir()) == []
    attempt(tmp_path / "new" / "out", said, REQUEST | {"seed": 2})  # nothing to refuse
    assert json.loads((tmp_path / "new" / "out.unfinished" / "request.json").read_text())["seed"] == 2


class Second:
    """Stands in for another process: locks treat it as one, since it opens the files itself."""

    def __init__(self, output: Path):
        self._output, self._held = output, ExitStack()

    def begin(self) -> None:
        folder = self._held.enter_context(unfinished_work(self._output, print))
        resume_or_begin(folder, REQUEST, print, again=False)
        (folder / "part").touch()

    def check(self) -> None:
        """Its part is where it has written it, and it is alone there."""
        folder = self._output.with_name("out.unfinished")
        assert (folder / "part").is_file() and (folder / LOCK).is_file()
        with pytest.raises(UserError, match="another process"):
            self._held.enter_context(unfinished_work(self._output, print))
        self._held.close()
        assert list(self._output.parent.iterdir()) == []


def test_a_second_process_that_begins_as_the_first_ends_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins as soon as the lock is free, before the first removes anything."""
    second, release = Second(tmp_path / "out"), FileLock.release

    def release_and_let_in(self: FileLock, force: bool = False) -> None:
        release(self, force)
        monkeypatch.setattr(FileLock, "release", release)
        second.begin()

    with unfinished_work(tmp_path / "out", print) as folder:
        (folder / "part of the first").touch()
        monkeypatch.setattr(FileLock, "release", release_and_let_in)
    second.check()


def test_a_lock_on_a_removed_folder_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has opened the first one's lock file, and gets the lock when the folder has lost its name."""
    second, lock, first = Second(tmp_path / "out"), fcntl.flock, ExitStack()
    first.enter_context(unfinished_work(tmp_path / "out", print))

    def end_first_and_lock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        # Unlinked, filelock would notice; on NFS, or a moment earlier, the file still has its name.
        with monkeypatch.context() as patched:
            patched.setattr("shutil.rmtree", lambda *_, **__: None)
            first.close()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", end_first_and_lock)
    second.begin()
    assert (tmp_path / "out.unfinished.removed" / LOCK).is_file()
    second.check()
