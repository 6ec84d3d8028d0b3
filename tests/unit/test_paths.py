"""Atomic writes, of which a path holds the old content, nothing, or all of the new; and digests of files."""

import hashlib
import os
import pwd
from pathlib import Path

import pytest

from vcore_ds.commands.cli import main
from vcore_ds.common import paths
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import STEP_BYTES, cache_root, compute_file_digest
from vcore_ds.config.load import SHIPPED_RECIPES


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_folder(path: Path, text: str) -> None:
    with paths.write_atomically(path) as unfinished:
        (unfinished / "inner").mkdir(parents=True)
        (unfinished / "inner" / "file").write_text(text)
        assert unfinished == paths.unfinished_path(path) and not path.exists()


def test_a_file_is_replaced_and_a_folder_never(tmp_path: Path):
    path = tmp_path / "new" / "file"
    for text in ("first", "second"):
        with paths.write_atomically(path) as unfinished:
            unfinished.write_text(text)
            assert not path.exists() or path.read_text() == "first"
        assert path.read_text() == text
    assert list_names(path.parent) == ["file"]
    write_folder(tmp_path / "folder", "one")
    with pytest.raises(OSError, match="not empty"), paths.write_atomically(tmp_path / "folder") as unfinished:
        unfinished.mkdir()
    assert (tmp_path / "folder" / "inner" / "file").read_text() == "one"
    assert list_names(tmp_path) == ["folder", "new"]


def test_only_a_regular_file_is_replaced(tmp_path: Path):
    """Root could rename a file over /dev/null."""
    (tmp_path / "link").symlink_to("inner/target")
    for text in ("first", "second"):  # a dangling link, and one to a file
        paths.write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "inner" / "target").read_text() == text
    assert list_names(tmp_path / "inner") == ["target"]
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    paths.write_text(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    with pytest.raises(KeyError), paths.write_atomically(tmp_path / "pipe"):
        raise KeyError
    (tmp_path / "loop").symlink_to("loop")
    before = list_names(tmp_path)
    for path, cause in ((tmp_path / "loop", "Too many levels"), (Path(), "Is a directory"), (Path("/"), "Is a dir")):
        with pytest.raises(OSError, match=cause):
            paths.write_text(path, "text")
    assert list_names(tmp_path) == before and "pipe" in before


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


def test_a_user_without_a_home_folder_gets_no_folder_called_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As in containers that run under any user id."""
    (tmp_path / "~rows.jsonl").write_text('{"a": 1}\n')
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME", "LOGNAME", "USER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert paths.is_readable("~rows.jsonl") and not paths.is_readable("~nouser/rows.jsonl")
    assert paths.expand_home("~nouser/x") == Path("~nouser/x")
    with pytest.raises(UserError, match=r"data\.cache_dir: ~.*Set HOME, XDG_CACHE_HOME or data\.cache_dir"):
        cache_root()
    assert cache_root("here") == Path("here") and compute_file_digest(Path("~rows.jsonl")).startswith("2:")
    recipe = str(SHIPPED_RECIPES / "qwen3_4b_math_lora.yaml")
    assert main(["check", recipe, "run.output_dir=~/runs/x"]) == 2
    message = capsys.readouterr().err
    assert 'run.output_dir: found "~/runs/x"' in message and "HOME is unset" in message
    assert main(["check", recipe, "data.train_path=~rows.jsonl", "run.output_dir=runs/x"]) == 0
    assert "~rows.jsonl:1: " in capsys.readouterr().out
    assert main(["keep", "~nouser/scores", "--top", "0.5", "--output", "."]) == 2
    assert "--output: .: is there already" in capsys.readouterr().err
    assert list_names(tmp_path) == ["~rows.jsonl"]


# ---- digests: every byte of a small file counts, samples throughout a large one, and none is read twice -------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_root() / "digests"


def change(path: Path, position: int) -> None:
    """Change a byte; size and modification time stay."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(position)
        file.write(b"!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.usefixtures("cache")
def test_a_change_in_the_middle_of_equal_size_and_time_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_SETTLED_NS", 0)  # so that the first digest is kept
    path, contents = tmp_path / "rows.jsonl", bytearray(b"x" * 2**22)
    path.write_bytes(contents)
    first = compute_file_digest(path)
    expected = hashlib.sha256(f"{2**22} ".encode() + hashlib.sha256(contents).digest()).hexdigest()
    assert first == f"2:{expected}"
    change(path, 2**21 + 5)
    assert compute_file_digest(path) != first
    (tmp_path / "copy").write_bytes(path.read_bytes())
    assert compute_file_digest(tmp_path / "copy") == compute_file_digest(path)


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    path.write_text("{}")
    with pytest.raises(UserError, match="found a byte that is no UTF-8"):
        compute_file_digest(path)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("position", [0, STEP_BYTES + 4095, 2 * STEP_BYTES + 99])
def test_a_large_file_is_sampled_from_end_to_end(
    position: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "WHOLE_BYTES", 0)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"x" * (2 * STEP_BYTES + 100))
    first = compute_file_digest(path)
    change(path, position)
    assert compute_file_digest(path) != first
    path.write_bytes(b"short")
    assert compute_file_digest(path) != first


def test_a_file_is_read_once_and_again_when_it_has_just_been_written(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("a")
    first = compute_file_digest(path)
    assert not cache.exists()  # another change may get the same time
    monkeypatch.setattr(paths, "_SETTLED_NS", 0)
    assert compute_file_digest(path) == first and len(list(cache.iterdir())) == 1
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert compute_file_digest(path) == first
