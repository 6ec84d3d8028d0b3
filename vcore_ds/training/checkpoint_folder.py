"""A checkpoint's files: written under a temporary name, verified, renamed, marked COMPLETE. No tensors, no ranks.

`checkpoints/step_00000100/` holds

- `state/`: tensors, one file per rank, and their index
- `run_state.json`: step, world size, shapes, and all other values that are not tensors
- `recipe.yaml`: the resolved recipe
- `manifest.json`: size and SHA-256 of every file above
- `COMPLETE`: SHA-256 of manifest.json; written last, so a folder without it is unfinished
"""

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vcore_ds.common import paths

FORMAT = 1
STATE, RUN_STATE, RECIPE, MANIFEST, COMPLETE = "state", "run_state.json", "recipe.yaml", "manifest.json", "COMPLETE"
_STEP = re.compile(r"^step_(\d{8,})$")
_REJECTED = ".rejected"  # suffix of a newer checkpoint when a run resumed from an older one


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file as read back from disk."""

    bytes: int
    sha256: str


def step_folder(checkpoints: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` optimizer steps."""
    return checkpoints / f"step_{step:08d}"


def parse_step(folder: Path) -> int | None:
    """The number of optimizer steps in a checkpoint's name; None for other names."""
    match = _STEP.match(folder.name)
    return int(match[1]) if match else None


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Folders named like checkpoints, newest first, complete or not."""
    folders = checkpoints.iterdir() if checkpoints.is_dir() else ()
    return sorted((folder for folder in folders if parse_step(folder) is not None), key=_get_step, reverse=True)


def list_unfinished(checkpoints: Path) -> list[Path]:
    """Checkpoints whose writing was interrupted: with the unfinished suffix, or renamed but without COMPLETE."""
    unmarked = [folder for folder in list_checkpoints(checkpoints) if not (folder / COMPLETE).exists()]
    return sorted([*checkpoints.glob(f"step_*{paths.SUFFIX}"), *unmarked])


def _get_step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def begin(checkpoints: Path, step: int, num_bytes: int) -> Path:
    """Make the empty folder in which the checkpoint of `step` is written. Raises `paths.NoRoom`."""
    purpose = (
        "a checkpoint. Make room, lower checkpoint.keep_last (an old checkpoint is deleted only when the new one is "
        "complete), or move the run's folder to a larger disk"
    )
    folder = paths.begin_folder(step_folder(checkpoints, step), num_bytes, purpose)
    (folder / STATE).mkdir()
    return folder


def hash_file(path: Path) -> FileRecord:
    """Flush a file, and read back its size and checksum, if possible from the disk instead of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(file.tell(), digest.hexdigest())


def finish(checkpoints: Path, step: int, world_size: int, records: Mapping[str, FileRecord]) -> Path:
    """Write the manifest, rename the folder that `begin` made, and mark it COMPLETE. `records`: of every file, by its
    relative name. Raises OSError if a file is missing, or has another size than its writer read back."""
    final = step_folder(checkpoints, step)
    unfinished = paths.unfinished_path(final)
    for name, record in records.items():
        path = unfinished / name
        # A file written by another node is missing if it is on that node's local disk.
        if not path.is_file():
            raise OSError(
                f"{path}: found no such file, though another rank has written it; expected run.output_dir on a file "
                "system that all nodes share"
            )
        if path.stat().st_size != record.bytes:
            raise OSError(f"{path}: found {path.stat().st_size:,} bytes; its writer read {record.bytes:,} bytes back")
    files = {name: asdict(records[name]) for name in sorted(records)}
    manifest = {"format": FORMAT, "step": step, "world_size": world_size, "files": files}
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    remove(final)  # one that failed verification, or is newer than the checkpoint from which the run resumed
    paths.finish_folder(final)
    paths.write_text(final / COMPLETE, hash_file(final / MANIFEST).sha256 + "\n")
    return final


def remove(folder: Path) -> None:
    """Delete a checkpoint, COMPLETE first, so that an interrupted deletion leaves no valid checkpoint."""
    if folder.exists():
        (folder / COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(folder)


def remove_old(
    checkpoints: Path,
    *,
    keep_last: int,
    keep_every_steps: int | None,
    keep_step: int | None = None,
    best: Iterable[Path] = (),
) -> list[Path]:
    """Delete complete checkpoints, and return them, except the newest `keep_last`, those of every `keep_every_steps`-th
    step and of `keep_step`, and the `best`."""
    complete, best = list_complete(checkpoints), set(best)
    old = [
        folder
        for folder in complete[keep_last:]
        if (keep_every_steps is None or _get_step(folder) % keep_every_steps != 0)
        and _get_step(folder) != keep_step
        and folder not in best
    ]
    for folder in old:
        remove(folder)
    return old


def list_complete(checkpoints: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    return [folder for folder in list_checkpoints(checkpoints) if (folder / COMPLETE).is_file()]


def rank_by_loss(checkpoints: Path, held_out_digest: str) -> list[tuple[float, Path]]:
    """List losses and folders of the complete checkpoints with a loss on the held-out data of `held_out_digest`, lowest
    loss first; of equal losses, the earlier step first."""
    ranked = []
    for folder in reversed(list_complete(checkpoints)):
        with suppress(OSError, ValueError):  # a damaged one; `find_problem` reports it when it is needed
            state = read_run_state(folder)
            loss = state.get("held_out_loss")
            if loss is not None and state.get("held_out_digest") == held_out_digest:
                ranked.append((loss, folder))
    return sorted(ranked, key=lambda pair: pair[0])


def set_aside_newer(checkpoints: Path, step: int) -> list[Path]:
    """Rename checkpoints newer than `step`, from which a run resumes, and remove unfinished ones; return the new paths.
    Under their old names `remove_old` would keep them as the newest, and delete valid ones."""
    for folder in checkpoints.glob(f"step_*{paths.SUFFIX}"):
        shutil.rmtree(folder)
    renamed = []
    for folder in list_checkpoints(checkpoints):
        if _get_step(folder) > step:
            rejected, numbers = folder.with_name(folder.name + _REJECTED), itertools.count(2)
            while rejected.exists():  # perhaps a valid one, of another schedule
                rejected = folder.with_name(f"{folder.name}{_REJECTED}_{next(numbers)}")
            folder.rename(rejected)
            renamed.append(rejected)
    return renamed


def find_newest_usable(
    candidates: Iterable[Path], find_problem: Callable[[Path], str | None]
) -> tuple[Path | None, list[str]]:
    """Find the first candidate without a problem, or None; also return `NAME: PROBLEM` for each one before it."""
    problems: list[str] = []
    for folder in candidates:
        problem = find_problem(folder)
        if problem is None:
            return folder, problems
        problems.append(f"{folder.name}: {problem}")
    return None, problems


def find_problem(folder: Path, say: Callable[[str], None], *, part: int = 0, num_parts: int = 1) -> str | None:
    """Find out why a checkpoint cannot be resumed from or exported; None if it is valid. `say` receives a line before
    files are read, which can take minutes. `part`, `num_parts`: of the files sorted by size, read every `num_parts`-th
    from index `part` on."""
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
    """Why a checkpoint cannot be used."""


def _read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Read the record of every file, by name. Raises _Unusable, also if the checksum differs from that in COMPLETE."""
    try:
        mark = (folder / COMPLETE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise _Unusable(f"no {COMPLETE}: its writing was interrupted") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _Unusable(f"{COMPLETE} cannot be read: {error}") from None
    try:
        sha256 = hash_file(folder / MANIFEST).sha256
        if sha256 != mark:
            raise _Unusable(f"{MANIFEST}: found SHA-256 {sha256}; {COMPLETE} says {mark!r}: one of the two is damaged")
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise _Unusable(f"{MANIFEST}: found format {manifest['format']}; this version reads format {FORMAT}")
        return {name: FileRecord(**record) for name, record in manifest["files"].items()}
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise _Unusable(f"{MANIFEST} cannot be read: {type(error).__name__}: {error}") from None


def _verify_file(folder: Path, name: str, expected: FileRecord) -> None:
    """Read a file completely. Raises _Unusable."""
    path = folder / name
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected.bytes:
            raise _Unusable(f"{name}: found {num_bytes:,} bytes; {MANIFEST} says {expected.bytes:,}")
        if hash_file(path) != expected:
            raise _Unusable(f"{name}: its SHA-256 differs from {MANIFEST}: the file is damaged")
    except FileNotFoundError:
        raise _Unusable(f"{name}: missing") from None
    except OSError as error:
        raise _Unusable(f"{name}: cannot be read: {error}") from None


def read_digest(folder: Path) -> str:
    """SHA-256 of a complete checkpoint's manifest, which covers all its contents; only COMPLETE is read."""
    return (folder / COMPLETE).read_text(encoding="utf-8").strip()


def read_run_state(folder: Path) -> dict[str, Any]:
    """The contents of run_state.json of a checkpoint that `find_problem` has verified."""
    return json.loads((folder / RUN_STATE).read_text(encoding="utf-8"))
