"""Digests of data files: every byte of a small file counts, samples throughout a large one, and none is read twice."""

import hashlib
import os
from pathlib import Path

import pytest

from vcore_ds.common import digests
from vcore_ds.common.digests import STEP_BYTES, cache_root, compute_file_digest
from vcore_ds.common.errors import UserError


@pytest.fixture(autouse=True)
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


def test_a_change_in_the_middle_of_equal_size_and_time_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_SETTLED_NS", 0)  # so that the first digest is kept
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


@pytest.mark.parametrize("position", [0, STEP_BYTES + 4095, 2 * STEP_BYTES + 99])
def test_a_large_file_is_sampled_from_end_to_end(
    position: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "WHOLE_BYTES", 0)
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
    monkeypatch.setattr(digests, "_SETTLED_NS", 0)
    assert compute_file_digest(path) == first and len(list(cache.iterdir())) == 1
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert compute_file_digest(path) == first
