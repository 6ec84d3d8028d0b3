"""A checkpoint's files: written aside, verified, renamed, marked COMPLETE. No tensors, no ranks.

`checkpoints/step_00000100/` holds

- `state/`: tensors, one file per rank, and their index
- `run_state.json`: step, world size, shapes, and everything else that is not a tensor
- `recipe.yaml`: resolved
- `manifest.json`: size and SHA-256 of every file above
- `COMPLETE`: SHA-256 of manifest.json; written last, so a folder without it is unfinished
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vcore_ds.common import paths

FORMAT = 1
STATE, RUN_STATE, RECIPE, MANIFEST, COMPLETE = "state", "run_state.json", "recipe.yaml", "manifest.json", "COMPLETE"
_STEP = re.compile(r"^step_(\d{8,})$")
_REJECTED = ".rejected"
"""Ending of a newer checkpoint that was passed over because it did not verify."""


@dataclass(frozen=True)
class FileRecord:
    """A file as it was read back."""

    bytes: int
    sha256: str


def step_folder(checkpoints: Path, step: int) -> Path:
    """`step`: number of optimizer steps done."""
    return checkpoints / f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """Optimizer steps, from a finished checkpoint's name; None for any other name."""
    match = _STEP.match(folder.name)
    return int(match[1]) if match else None


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Folders that are checkpoints by their name, newest first, whether or not they are whole."""
    if not checkpoints.is_dir():
        return []
    return sorted(
        (folder for folder in checkpoints.iterdir() if step_of(folder) is not None), key=_number, reverse=True
    )


def list_unfinished(checkpoints: Path) -> list[Path]:
    """Checkpoints that were being written when a run ended: with the unfinished suffix, or renamed without COMPLETE."""
    if not checkpoints.is_dir():
        return []
    unmarked = [folder for folder in list_checkpoints(checkpoints) if not (folder / COMPLETE).exists()]
    return sorted([*checkpoints.glob(f"step_*{paths.SUFFIX}"), *unmarked])


def _number(folder: Path) -> int:
    step = step_of(folder)
    assert step is not None
    return step


# ---- writing -------------------------------------------------------------------------------------------------------


def begin(checkpoints: Path, step: int, num_bytes: int) -> Path:
    """The empty folder that the checkpoint of `step` is written in. Raises `paths.NoRoom`."""
    purpose = (
        "a checkpoint. Make room, lower checkpoint.keep_last (an old checkpoint is deleted only when the new one is "
        "complete), or move the run's folder to a larger disk"
    )
    folder = paths.begin_folder(step_folder(checkpoints, step), num_bytes, purpose)
    (folder / STATE).mkdir()
    return folder


def record_of(path: Path) -> FileRecord:
    """Size and checksum of a file, flushed, then read from the disk rather than from the page cache where the system
    allows that."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(file.tell(), digest.hexdigest())


def finish(checkpoints: Path, step: int, world_size: int, records: Mapping[str, FileRecord]) -> Path:
    """Writes the manifest, gives the folder that `begin` made its name, and marks it COMPLETE.

    Args:
        records: every file's, by its name relative to the folder.

    Raises:
        OSError: a file is missing, or differs from what its writer read back.
    """
    final = step_folder(checkpoints, step)
    unfinished = paths.unfinished_path(final)
    for name, record in records.items():
        path = unfinished / name
        # Another node's file that is not here was written to that node's own disk.
        if not path.is_file():
            raise OSError(
                f"{path}: found no such file, though another rank has written it; expected run.output_dir on a file "
                "system that all nodes share"
            )
        if path.stat().st_size != record.bytes:
            raise OSError(f"{path}: found {path.stat().st_size:,} bytes; its writer has read {record.bytes:,} back")
    manifest = json.dumps(
        {
            "format": FORMAT,
            "step": step,
            "world_size": world_size,
            "files": {name: asdict(records[name]) for name in sorted(records)},
        },
        indent=2,
    )
    (unfinished / MANIFEST).write_text(manifest + "\n", encoding="utf-8")
    remove(final)  # one that did not verify, or that a run resumed at an earlier step has left behind
    paths.finish_folder(final)
    with paths.written_aside(final / COMPLETE) as mark:
        mark.write_text(record_of(final / MANIFEST).sha256 + "\n", encoding="utf-8")
    return final


def remove(folder: Path) -> None:
    """Deletes a checkpoint so that what an interruption leaves of it never counts as one."""
    if folder.exists():
        (folder / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(folder)


def remove_old(checkpoints: Path, *, keep_last: int, keep_every_steps: int | None) -> list[Path]:
    """Deletes all complete checkpoints but the newest `keep_last` and every `keep_every_steps`-th; returns them."""
    complete = [folder for folder in list_checkpoints(checkpoints) if (folder / COMPLETE).is_file()]
    old = [f for f in complete[keep_last:] if keep_every_steps is None or _number(f) % keep_every_steps != 0]
    for folder in old:
        remove(folder)
    return old


def set_aside_newer(checkpoints: Path, step: int) -> list[Path]:
    """Renames the checkpoints after `step`, which a run resumes from, and removes unfinished ones; returns new names.

    Newer checkpoints did not verify. Under their old names they would count among the newest that are kept, and good
    ones would be deleted instead of them.
    """
    for folder in checkpoints.glob(f"step_*{paths.SUFFIX}"):
        shutil.rmtree(folder)
    renamed = []
    for folder in list_checkpoints(checkpoints):
        if _number(folder) > step:
            rejected = folder.with_name(folder.name + _REJECTED)
            if rejected.exists():
                shutil.rmtree(rejected)
            folder.rename(rejected)
            renamed.append(rejected)
    return renamed


# ---- reading -------------------------------------------------------------------------------------------------------


def newest_usable(
    candidates: Iterable[Path], problem_of: Callable[[Path], str | None]
) -> tuple[Path | None, list[str]]:
    """The first candidate without a problem, None where all have one; and `NAME: PROBLEM` of each one before it."""
    problems: list[str] = []
    for folder in candidates:
        problem = problem_of(folder)
        if problem is None:
            return folder, problems
        problems.append(f"{folder.name}: {problem}")
    return None, problems


def problem_of(folder: Path, say: Callable[[str], None], *, part: int = 0, num_parts: int = 1) -> str | None:
    """Why a checkpoint cannot be used, for a resume and an export alike; None where it can.

    Args:
        say: hears what is about to be read, which can take minutes.
        part: of the files, largest first, every `num_parts`-th from this one is read; the manifest always is.
    """
    try:
        records = _read_manifest(folder)
        num_bytes = sum(record.bytes for record in records.values())
        say(f"verifying {folder.name}: {num_bytes / 1e9:.3g} GB")
        by_size = sorted(records, key=lambda name: (-records[name].bytes, name))
        for name in by_size[part::num_parts]:
            _verify_file(folder, name, records[name])
    except _Unusable as error:
        return str(error)
    return None


class _Unusable(Exception):
    """The message is the reason."""


def _read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Name -> record of every file, provided that COMPLETE vouches for the manifest."""
    try:
        mark = (folder / COMPLETE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise _Unusable(f"no {COMPLETE}: writing it was not finished") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _Unusable(f"{COMPLETE} cannot be read: {error}") from None
    try:
        found = record_of(folder / MANIFEST).sha256
        if found != mark:
            raise _Unusable(f"{MANIFEST}: found SHA-256 {found}; {COMPLETE} says {mark!r}: one of the two is damaged")
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise _Unusable(f"{MANIFEST}: found format {manifest['format']}; this version reads format {FORMAT}")
        return {name: FileRecord(**record) for name, record in manifest["files"].items()}
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise _Unusable(f"{MANIFEST} cannot be read: {type(error).__name__}: {error}") from None


def _verify_file(folder: Path, name: str, expected: FileRecord) -> None:
    """Reads all of a file."""
    path = folder / name
    try:
        found = path.stat().st_size
        if found != expected.bytes:
            raise _Unusable(f"{name}: found {found:,} bytes; {MANIFEST} says {expected.bytes:,}")
        if record_of(path) != expected:
            raise _Unusable(f"{name}: its SHA-256 is not that of {MANIFEST}: the file is damaged")
    except FileNotFoundError:
        raise _Unusable(f"{name}: missing") from None
    except OSError as error:
        raise _Unusable(f"{name}: cannot be read: {error}") from None


def read_digest(folder: Path) -> str:
    """SHA-256 of a complete checkpoint's manifest, and so of all its contents; nothing but COMPLETE is read."""
    return (folder / COMPLETE).read_text(encoding="utf-8").strip()


def read_run_state(folder: Path) -> dict[str, Any]:
    """The contents of run_state.json, of a checkpoint that `problem_of` found no problem with."""
    return json.loads((folder / RUN_STATE).read_text(encoding="utf-8"))
