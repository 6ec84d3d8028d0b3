"""Checks of a token store: its manifest, the sizes of its files, and their checksums."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import parse_json, reading

MANIFEST = "manifest.json"
FORMAT: Literal["vcore_ds token store, version 1"] = "vcore_ds token store, version 1"

REMEDY = "make it again with `vcore-ds prepare`"
COPY_AGAIN = f"copy the whole folder again, or {REMEDY}"

_DIGESTED = ("tokens.idx", "tokens.bin", "marks.bin")
"""Files with the tokens, the lengths (index) and the supervision."""

_LARGE_BYTES = 10**9  # checksums of larger stores take seconds, so they are announced

_File = Literal["tokens.idx", "tokens.bin", "marks.bin", "marks.idx", "sequence_id.npy", "num_supervised_tokens.npy"]
_Count = Annotated[int, Field(ge=1)]


class _Entries(BaseModel):
    """Base of parts of a manifest, which may have further entries."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Tokenizer(_Entries):
    name: str
    hash: str
    chat_template_hash: str


class _Counts(_Entries):
    rows: int = 0
    dropped: dict[str, int] = {}
    noticed: dict[str, int] = {}
    reading: list[str] = []


class _Manifest(_Entries):
    format: Literal["vcore_ds token store, version 1"]
    num_sequences: _Count
    num_tokens: _Count
    num_supervised_tokens: _Count
    max_length: _Count
    max_token_id: int
    tokenizer: _Tokenizer
    digest: str
    sha256: Annotated[dict[_File, str], Field(min_length=6)]
    files: Annotated[dict[_File, int], Field(min_length=6)]
    counts: _Counts = _Counts()
    filters: dict[str, Any] = {}


_MANIFEST = TypeAdapter(_Manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest, and the sizes of the files. Raises UserError if there is no store, or it is damaged,
    of another version, or cannot be read."""
    with reading("", folder, "a token store that can be read"):
        return _read_manifest(folder)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        where = "" if folder.is_dir() else f" (working directory {Path.cwd()})"
        raise UserError(f"{folder}: found no {MANIFEST} there{where}; expected a token store; {REMEDY}")
    checked = parse_json(path.read_bytes(), _MANIFEST, str(path), "the manifest of a token store", COPY_AGAIN)
    manifest = checked.model_dump(exclude_unset=True)
    for name, expected in manifest["files"].items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != expected:
            found = "no such file" if size is None else f"{size:,} bytes"
            raise UserError(f"{folder / name}: found {found}, expected {expected:,} bytes ({MANIFEST}); {COPY_AGAIN}")
    return manifest


def check_supervision(folder: Path, supervise: str) -> None:
    """Raise UserError for a store of conversations that was made with another value of `data.supervise`."""
    manifest = read_manifest(folder)
    made_with = manifest.get("filters", {}).get("supervise", "all")
    if manifest.get("kind") == "chat" and made_with != supervise:
        raise UserError(
            f"{folder}: found a store made with --supervise {made_with}, expected {supervise} (data.supervise); set "
            f"data.supervise={made_with}, or {REMEDY} and --supervise {supervise}"
        )


def hash_files(folder: Path) -> dict[str, str]:
    """Compute the SHA-256 of every file in the folder but the manifest, by name."""
    return {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}


def combine_hashes(hashes: dict[str, str]) -> str:
    """Compute the SHA-256 of tokens and supervision from the hashes of the files."""
    return hashlib.sha256(b"".join(bytes.fromhex(hashes[name]) for name in _DIGESTED)).hexdigest()


def check_contents(folder: Path, cache_folder: Path, say: Callable[[str], None] = print) -> None:
    """Compare the files' checksums with the manifest (a second per GB), once for each state (size, mtime, inode) of the
    files: an empty file in `cache_folder`, named by a hash of manifest and state, records it. Raises UserError if a
    file was replaced or damaged, or cannot be read."""
    manifest = read_manifest(folder)
    mark = cache_folder / "verified" / _hash_state(folder, manifest)
    if mark.is_file():
        return
    num_bytes = sum(manifest["files"].values())
    if num_bytes >= _LARGE_BYTES:
        say(f"Data: {folder}: computing the checksums of {num_bytes / 1e9:.1f} GB, once")
    with reading("", folder, "a token store that can be read"):
        hashes = {name: _sha256(folder / name) for name in manifest["sha256"]}
    damaged = [name for name, found in hashes.items() if found != manifest["sha256"][name]]
    if damaged or combine_hashes(hashes) != manifest["digest"]:
        raise UserError(
            f"{folder / (damaged or [MANIFEST])[0]}: damaged, or of another store: its size is right, its SHA-256 is "
            f"not; {COPY_AGAIN}"
        )
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError:
        say(f"Data: {folder}: the next run computes its checksums again: {cache_folder} cannot be written to")


def _hash_state(folder: Path, manifest: dict[str, Any]) -> str:
    stats = {name: (folder / name).stat() for name in manifest["files"]}
    states = {name: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats.items()}
    text = json.dumps([str(folder.resolve()), manifest, states], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
