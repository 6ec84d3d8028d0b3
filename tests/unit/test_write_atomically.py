"""Atomic writes: a path holds the old content, nothing, or all of the new, whatever interrupts the write."""

import os
from pathlib import Path

import pytest

from vcore_ds.common import paths


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_folder(path: Path, text: str) -> None:
    with paths.write_atomically(path) as unfinished:
        (unfinished / "inner").mkdir(parents=True)
        (unfinished / "inner" / "file").write_text(text)
        assert unfinished == paths.unfinished_path(path) and not path.exists()


def test_a_file_is_made_with_its_folder_and_replaced(tmp_path: Path):
    path = tmp_path / "new" / "file"
    for text in ("first", "second"):
        with paths.write_atomically(path) as unfinished:
            unfinished.write_text(text)
            assert not path.exists() or path.read_text() == "first"
        assert path.read_text() == text
    assert list_names(path.parent) == ["file"]


def test_a_folder_gets_its_name_at_the_end_and_is_never_replaced(tmp_path: Path):
    write_folder(tmp_path / "folder", "one")
    with pytest.raises(OSError, match="not empty"), paths.write_atomically(tmp_path / "folder") as unfinished:
        unfinished.mkdir()
    assert (tmp_path / "folder" / "inner" / "file").read_text() == "one" and list_names(tmp_path) == ["folder"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_the_old_file_alone(tmp_path: Path, error: type[BaseException]):
    (tmp_path / "file").write_text("old")
    for target in ("file", "folder"):
        with pytest.raises(error), paths.write_atomically(tmp_path / target) as unfinished:  # noqa: PT012  raised within
            unfinished.mkdir() if target == "folder" else unfinished.write_text("new")
            raise error
    assert list_names(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("leftover", ["file", "folder", "link"])
def test_leftovers_of_a_killed_attempt_are_removed_by_the_next(tmp_path: Path, leftover: str):
    unfinished = paths.unfinished_path(tmp_path / "target")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("")
    if leftover == "file":
        unfinished.write_text("half")
    elif leftover == "folder":
        (unfinished / "half").mkdir(parents=True)
    else:
        unfinished.symlink_to(tmp_path / "elsewhere")
    write_folder(tmp_path / "target", "whole")
    assert list_names(tmp_path) == ["elsewhere", "target"] and list_names(tmp_path / "target") == ["inner"]
    assert list_names(tmp_path / "elsewhere") == ["kept"]


def test_several_writers_of_a_file_do_not_disturb_each_other(tmp_path: Path):
    path, content = tmp_path / "file", "the same in both"
    with paths.write_atomically(path, several_writers=True) as unfinished:
        unfinished.write_text(content[:5])
        child = os.fork()
        if child == 0:
            with paths.write_atomically(path, several_writers=True) as child_file:
                child_file.write_text(content)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert path.read_text() == content and unfinished.read_text() == content[:5]
        unfinished.write_text(content)
    assert path.read_text() == content and list_names(tmp_path) == ["file"]


def test_content_is_flushed_before_the_rename_and_the_folder_after_it(tmp_path: Path, monkeypatch):
    """Only a power failure could show this, not a kill, so the test checks the order of the calls."""
    calls: list[str] = []
    flush, rename = paths.flush, Path.rename

    def record_flush(path: Path) -> None:
        calls.append(f"flush {path.relative_to(tmp_path)}")
        flush(path)

    def record_rename(path: Path, target: Path) -> None:
        calls.append(f"rename {path.relative_to(tmp_path)}")
        rename(path, target)

    monkeypatch.setattr(paths, "flush", record_flush)
    monkeypatch.setattr(Path, "rename", record_rename)
    write_folder(tmp_path / "folder", "text")
    flushed = ["folder.unfinished", "folder.unfinished/inner", "folder.unfinished/inner/file"]
    assert sorted(calls[:3]) == [f"flush {name}" for name in flushed]
    assert calls[3:] == ["rename folder.unfinished", "flush ."]
