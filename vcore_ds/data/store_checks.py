"""Checks of a token store: its files must be complete, unchanged, and belong together."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.common.errors import UserError, first_line

MANIFEST = "manifest.json"
FORMAT = "vcore_ds token store, version 1"

REMEDY = "make it again with `vcore-ds prepare`"
COPY_AGAIN = f"copy the whole folder again, or {REMEDY}"

INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Header of megatron-core's index: magic, version, type of the values, sequences, documents."""

_INDEX_MAGIC, _INDEX_VERSION = b"MMIDIDX\x00\x00", 1

_INDEX_TYPES = {np.uint8: 1, np.int32: 4}

_DIGESTED = ("tokens.idx", "tokens.bin", "marks.bin")
"""Files with the tokens, the lengths (index) and the supervision."""

_FILES = {*_DIGESTED, "marks.idx", "sequence_id.npy", "num_supervised_tokens.npy"}

_LARGE_BYTES = 10**9  # checksums of larger stores take seconds, so they are announced

_ENTRIES: dict[str, type] = {
    **dict.fromkeys(("num_sequences", "num_tokens", "num_supervised_tokens", "max_length"), int),
    "tokenizer": dict,
    "digest": str,
    "files": dict,
}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest. Raises UserError if there is no store, or its manifest is damaged."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder (looked from {Path.cwd()}); expected a token store")
    if not path.is_file():
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        raise UserError(f"{folder}: no token store: found no {MANIFEST} there, only {names}; {REMEDY}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise UserError(f"{path}: found the format {manifest['format']!r:.80}, expected {FORMAT!r}; {REMEDY}")
        _check_entries(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{path}: not the manifest of a token store ({problem}); {REMEDY}") from None
    return manifest


def _check_entries(manifest: dict[str, Any]) -> None:
    """Raise KeyError or ValueError for the first entry that is missing or of a wrong type."""
    for key, expected in _ENTRIES.items():
        if type(manifest[key]) is not expected:
            raise ValueError(f"{key} is {type(manifest[key]).__name__}, expected {expected.__name__}")
    for key in ("name", "hash", "chat_template_hash"):
        if not isinstance(manifest["tokenizer"][key], str):
            raise ValueError(f"tokenizer.{key} is {type(manifest['tokenizer'][key]).__name__}, expected str")
    if missing := _FILES - manifest["files"].keys():
        raise ValueError(f"files lacks {min(missing)}")
    if not all(type(size) is int for size in manifest["files"].values()):
        raise ValueError("files holds a size that is no integer")
    if type(manifest.get("max_token_id", 0)) is not int:
        raise ValueError("max_token_id is no integer")
    if manifest["num_sequences"] < 1:
        raise ValueError("num_sequences is less than 1")
    if set(manifest.get("sha256", manifest["files"])) != manifest["files"].keys():
        raise ValueError("sha256 and files name different files")
    counts = manifest.get("counts", {})
    if not isinstance(counts, dict) or type(counts.get("rows", 0)) is not int:
        raise ValueError("counts is no table of integers")
    for key in ("dropped", "noticed"):
        if not all(type(number) is int for number in counts.get(key, {}).values()):
            raise ValueError(f"counts.{key} is no table of integers")
    if not all(isinstance(line, str) for line in counts.get("reading", [])):
        raise ValueError("counts.reading is no list of texts")


def check_supervision(folder: Path, supervise: str) -> None:
    """Raise UserError for a store of conversations that was made with another value of `data.supervise`."""
    manifest = read_manifest(folder)
    made_with = manifest.get("filters", {}).get("supervise", "all")
    if manifest.get("kind") == "chat" and made_with != supervise:
        raise UserError(
            f"{folder}: found a store made with --supervise {made_with}, expected {supervise} (data.supervise); set "
            f"data.supervise={made_with}, or {REMEDY} and --supervise {supervise}"
        )


def check_files(folder: Path, sizes: dict[str, int]) -> None:
    """Raise UserError for a file that is missing or has another size. `sizes`: bytes of each file, as written."""
    for name, expected in sizes.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise UserError(f"{path}: the file is missing from its store; {COPY_AGAIN}")
        size = path.stat().st_size
        if size != expected:
            state = "truncated" if size < expected else "not the file that was written"
            raise UserError(f"{path}: {state}: found {size:,} bytes, expected {expected:,} ({MANIFEST}); {COPY_AGAIN}")


def load_array(path: Path, dtype: type[np.generic]) -> np.ndarray:
    """Map the one-dimensional array of a `.npy` file. Raises UserError for other contents."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # of any class: numpy evaluates the header as Python
        raise UserError(f"{path}: not a readable array ({first_line(error)}); {COPY_AGAIN}") from None
    if array.dtype != dtype or array.ndim != 1:
        raise UserError(
            f"{path}: found an array of {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} [n]; {COPY_AGAIN}"
        )
    return array


def check_index_header(path: Path, dtype: type[np.generic], num_sequences: int) -> None:
    """Raise UserError unless the index is of `num_sequences` sequences of this type, which megatron-core does not
    check."""
    with path.open("rb") as file:
        beginning = file.read(INDEX_HEADER.size)
    if not beginning.startswith(_INDEX_MAGIC) or len(beginning) < INDEX_HEADER.size:
        raise UserError(f"{path}: not an index of megatron-core's format; {REMEDY}")
    header = INDEX_HEADER.unpack(beginning)[1:]
    expected = (_INDEX_VERSION, _INDEX_TYPES[dtype], num_sequences, num_sequences + 1)
    num_bytes = INDEX_HEADER.size + 12 * num_sequences + 8 * (num_sequences + 1)
    if header != expected or path.stat().st_size != num_bytes:
        raise UserError(
            f"{path}: damaged, or of another store: found version, type, sequences and documents {header} in "
            f"{path.stat().st_size:,} bytes, expected {expected} in {num_bytes:,}; {COPY_AGAIN}"
        )


def check_index(folder: Path, name: str, index: Any, dtype: type[np.generic], manifest: dict[str, Any]) -> None:
    """Raise UserError if an index (megatron-core's reader of `name`.idx, `tokens` or `marks`) points outside its file
    or contradicts the manifest. `dtype`: of the values in the file."""
    lengths, offsets = np.asarray(index.sequence_lengths), np.asarray(index.sequence_pointers)
    num_bytes, itemsize = manifest["files"][f"{name}.bin"], np.dtype(dtype).itemsize
    ends = np.cumsum(lengths, dtype=np.int64)
    if lengths.min() < 1 or lengths.max() != manifest["max_length"]:
        problem = f"lengths of {lengths.min():,} to {lengths.max():,} tokens, expected 1 to {manifest['max_length']:,}"
    elif ends[-1] != manifest["num_tokens"] or ends[-1] * itemsize != num_bytes:
        problem = f"{ends[-1]:,} tokens, expected {manifest['num_tokens']:,} in {num_bytes:,} bytes"
    elif offsets[0] != 0 or not np.array_equal(offsets[1:], ends[:-1] * itemsize):
        problem = "offsets that do not follow from the lengths"
    else:
        return
    raise UserError(f"{folder / name}.idx: damaged, or of another store: found {problem}; {COPY_AGAIN}")


def hash_files(folder: Path) -> dict[str, str]:
    """Compute the SHA-256 of every file in the folder, by name."""
    return {path.name: _sha256(path) for path in sorted(folder.iterdir())}


def combine_hashes(hashes: dict[str, str]) -> str:
    """Compute the SHA-256 of tokens and supervision from the hashes of the files."""
    return hashlib.sha256(b"".join(bytes.fromhex(hashes[name]) for name in _DIGESTED)).hexdigest()


def check_contents(folder: Path, cache_folder: Path, say: Callable[[str], None] = print) -> None:
    """Compare the files' checksums with the manifest (a second per GB), once for each state (size, mtime, inode) of the
    files: an empty file in `cache_folder`, named by a hash of manifest and state, records it. Raises UserError if a
    file was replaced or damaged."""
    manifest = read_manifest(folder)
    check_files(folder, manifest["files"])
    mark = cache_folder / "verified" / _hash_state(folder, manifest)
    if mark.is_file():
        return
    num_bytes = sum(manifest["files"].values())
    if num_bytes >= _LARGE_BYTES:
        say(f"Data: {folder}: computing the checksums of {num_bytes / 1e9:.1f} GB, once")
    if "sha256" in manifest:
        for name, expected in manifest["sha256"].items():
            if _sha256(folder / name) != expected:
                raise UserError(
                    f"{folder / name}: damaged, or of another store: its size is right, and its SHA-256 is not the one "
                    f"in {MANIFEST}; {COPY_AGAIN}"
                )
    elif combine_hashes({name: _sha256(folder / name) for name in _DIGESTED}) != manifest["digest"]:
        raise UserError(
            f"{folder}: {', '.join(_DIGESTED)}: damaged, or of different stores: their sizes are right, and their "
            f"digest is not the one in {MANIFEST}; {COPY_AGAIN}"
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
