r"""Token stores: tokenized sequences on disk, memory-mapped, so that the ranks of a node share their pages.

A store is a folder, written once by one process:

    manifest.json                    its origin: hashes of tokenizer and chat template, filters, seed, counts
    tokens.bin, tokens.idx           int32, token ids of all sequences, in megatron-core's IndexedDataset format
    marks.bin, marks.idx             uint8, for each token: 1 supervised, 2 inside \boxed{...}
    sequence_id.npy                  int64 [n], the position of each sequence among all rows read, from 0
    num_supervised_tokens.npy        int32 [n]
"""

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.imports import without_compiler
from vcore_ds.common.paths import parse_json, reading, write_atomically
from vcore_ds.data.conversations import check_tokenizer
from vcore_ds.data.tokenization import TokenizedSequence, TokenizedSequences

if TYPE_CHECKING:
    from types import ModuleType

    from transformers import PreTrainedTokenizerBase

MANIFEST = "manifest.json"
FORMAT: Literal["vcore_ds token store, version 1"] = "vcore_ds token store, version 1"

REMEDY = "make it again with `vcore-ds prepare`"
COPY_AGAIN = f"copy the whole folder again, or {REMEDY}"

SUPERVISED, IN_ANSWER = 1, 2  # bits of a mark

_INDEX_HEADER_BYTES = 34  # of megatron-core's index; then lengths (int32), places (int64), documents (int64)

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


class TokenStore(TokenizedSequences):
    """An open store. Indexing reads a sequence from the mapped files, as a copy."""

    def __init__(
        self,
        folder: str | Path,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        cutoff_length: int | None = None,
        vocabulary_size: int | None = None,
    ) -> None:
        """Check the sizes of the files (`check_contents` checks their contents), that the store was made with
        `tokenizer` and its template, and that it fits `cutoff_length` in tokens and `vocabulary_size`, rows of the
        model's input embedding. Raises UserError."""
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        if tokenizer is not None:
            self._check_tokenizer(tokenizer)
        if cutoff_length is not None and self.manifest["max_length"] > cutoff_length:
            raise UserError(
                f"{self.folder}: found sequences of up to {self.manifest['max_length']:,} tokens, expected at most "
                f"{cutoff_length:,} (data.cutoff_length); raise it to {self.manifest['max_length']}, or {REMEDY} "
                f"and --cutoff-length {cutoff_length}"
            )
        self._open_files()
        if vocabulary_size is not None and (largest := self.manifest["max_token_id"]) >= vocabulary_size:
            raise UserError(
                f"{self.folder}: found token ids up to {largest:,}, expected ids below {vocabulary_size:,}, the "
                "vocab_size of the model (model.path, config.json): the tokenizer has tokens that the model has no "
                "embedding for; take the tokenizer that belongs to the model, or add rows to its embeddings, then "
                f"{REMEDY}"
            )

    def _open_files(self) -> None:
        """Map the files. Raises UserError if they cannot be read, or contradict the manifest."""
        folder, number = self.folder, self.manifest["num_sequences"]
        try:
            # Not by megatron-core, whose import takes a second: sequences follow each other, so lengths are enough.
            self.lengths = np.fromfile(folder / "tokens.idx", np.int32, number, offset=_INDEX_HEADER_BYTES)
            self._ends = self.lengths.cumsum(dtype=np.int64)
            self._tokens = np.memmap(folder / "tokens.bin", np.int32, "r")
            self._marks = np.memmap(folder / "marks.bin", np.uint8, "r")
            self.sequence_ids: np.ndarray = np.load(folder / "sequence_id.npy", mmap_mode="r")
            self.num_supervised_tokens: np.ndarray = np.load(folder / "num_supervised_tokens.npy", mmap_mode="r")
            found = {
                "num_sequences": {len(self.lengths), len(self.sequence_ids), len(self.num_supervised_tokens)},
                "num_tokens": {len(self._tokens), len(self._marks), int(self._ends[-1])},
                "max_length": {int(self.lengths.max())},
                "num_supervised_tokens": {int(self.num_supervised_tokens.sum())},
            }
        except Exception as error:  # of any class: numpy evaluates the header of an array as Python
            raise UserError(f"{folder}: cannot be read ({first_line(error)}); {COPY_AGAIN}") from None
        for key, values in found.items():
            if values != {self.manifest[key]} or self.lengths.min() < 1:
                raise UserError(
                    f"{folder}: damaged, or of different stores: found {key} {', '.join(map(str, sorted(values)))}, "
                    f"expected {self.manifest[key]} ({MANIFEST}); {COPY_AGAIN}"
                )

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens and their marks, in order."""
        return self.manifest["digest"]

    def origins(self) -> tuple[list[str], np.ndarray]:
        """Find the source (file or data set) of each sequence, and its row or line there, from 0, int64 [n]."""
        names, starts = zip(*self.manifest.get("first_rows", [(str(self.folder), 0)]), strict=True)
        numbers = np.searchsorted(starts, self.sequence_ids, side="right") - 1
        return [names[i] for i in numbers], self.sequence_ids - np.array(starts, dtype=np.int64)[numbers]

    def count_dropped_rows(self) -> tuple[int | None, dict[str, int]]:
        """Number of rows read to make the store (None if unknown), and of rows dropped for each reason."""
        counts = self.manifest.get("counts", {})
        malformed = {"malformed": counts["malformed"]} if counts.get("malformed") else {}
        return counts.get("rows"), malformed | counts.get("dropped", {})

    def describe(self) -> str:
        """Describe the amount of data, each rule that dropped rows, and each observation, in a line each."""
        manifest, counts = self.manifest, self.manifest.get("counts", {})
        num_rows, dropped = self.count_dropped_rows()
        rows_read = f" of {num_rows:,} rows" if num_rows is not None else ""
        lines = [
            f"{len(self):,}{rows_read} kept: {manifest['num_tokens']:,} tokens, "
            f"{manifest['num_supervised_tokens']:,} of them supervised; "
            f"{manifest['num_tokens'] / len(self):,.0f} tokens a sequence, up to {manifest['max_length']:,}"
        ]
        lines += [f"{number:,} dropped: {rule}" for rule, number in dropped.items()]
        lines += [f"{number:,} {what}" for what, number in counts.get("noticed", {}).items()]
        lines += counts.get("reading", [])
        return "\n".join(lines)

    def __len__(self) -> int:
        return len(self.lengths)

    def read_sequence(self, i: int) -> TokenizedSequence:
        place = slice(self._ends[i] - self.lengths[i], self._ends[i])
        marks = self._marks[place]
        return TokenizedSequence(
            sequence_id=int(self.sequence_ids[i]),
            input_ids=np.array(self._tokens[place]),  # a copy, because torch warns of read-only memory
            supervised=(marks & SUPERVISED).astype(np.bool_),
            in_answer=(marks & IN_ANSWER).astype(np.bool_),
        )

    def __iter__(self) -> Iterator[TokenizedSequence]:
        return (self[i] for i in range(len(self)))

    def _check_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        check_tokenizer(tokenizer)
        made_with = self.manifest["tokenizer"]
        for what, expected, stored in (
            ("tokenizer", hash_tokenizer(tokenizer), made_with["hash"]),
            ("chat template", hash_template(tokenizer), made_with["chat_template_hash"]),
        ):
            if stored != expected:
                raise UserError(
                    f"{self.folder}: found tokens of another {what} (that of {made_with['name']}, {stored[:12]}), "
                    f"expected the {what} of {tokenizer.name_or_path} ({expected[:12]}); {REMEDY} "
                    f"and --tokenizer {tokenizer.name_or_path}"
                )


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


def write_store(
    folder: str | Path, sequences: Iterable[TokenizedSequence], tokenizer: "PreTrainedTokenizerBase", **manifest: Any
) -> None:
    """Write a store under another name, and rename it when it is complete. The same input gives the same bytes.
    `sequences` are iterated once; `manifest`: further entries, as JSON. Raises UserError if the folder exists, there is
    no sequence, or one has no supervised token."""
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"{folder}: is there already; delete it or write the store to another folder")
    with write_atomically(folder) as unfinished:
        unfinished.mkdir()
        entries = _write_sequences(folder, unfinished, sequences)
        entries |= {"tokenizer": describe_tokenizer(tokenizer), **manifest}
        text = json.dumps(entries, indent=2, sort_keys=True, ensure_ascii=False)
        (unfinished / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _write_sequences(folder: Path, unfinished: Path, sequences: Iterable[TokenizedSequence]) -> dict[str, Any]:
    """Write all files but the manifest into `unfinished`; return the manifest's entries about them. `folder`: the
    store, for messages."""
    builder = _import_indexed_dataset().IndexedDatasetBuilder
    tokens = builder(str(unfinished / "tokens.bin"), dtype=np.int32)
    marks = builder(str(unfinished / "marks.bin"), dtype=np.uint8)
    sequence_ids, num_supervised_tokens, lengths, max_token_id = [], [], [], 0
    for sequence in sequences:
        num_supervised = int(sequence.supervised.sum())
        if num_supervised == 0:
            raise UserError(
                f"{folder}: sequence {sequence.sequence_id} ({len(sequence):,} tokens) has no supervised token, so "
                "there is nothing to learn from it; leave it out"
            )
        mark = sequence.supervised.astype(np.uint8) * SUPERVISED
        if sequence.in_answer is not None:
            mark |= sequence.in_answer.astype(np.uint8) * IN_ANSWER
        tokens.add_document(sequence.input_ids, [len(sequence)])
        marks.add_document(mark, [len(sequence)])
        sequence_ids.append(sequence.sequence_id)
        num_supervised_tokens.append(num_supervised)
        lengths.append(len(sequence))
        max_token_id = max(max_token_id, int(sequence.input_ids.max()))
    if not lengths:
        raise UserError(f"{folder}: no sequence to store")
    tokens.finalize(str(unfinished / "tokens.idx"))
    marks.finalize(str(unfinished / "marks.idx"))
    np.save(unfinished / "sequence_id.npy", np.array(sequence_ids, dtype=np.int64))
    np.save(unfinished / "num_supervised_tokens.npy", np.array(num_supervised_tokens, dtype=np.int32))
    hashes = hash_files(unfinished)
    return {
        "format": FORMAT,
        "num_sequences": len(lengths),
        "num_tokens": sum(lengths),
        "num_supervised_tokens": sum(num_supervised_tokens),
        "max_length": max(lengths),
        "max_token_id": max_token_id,
        "digest": combine_hashes(hashes),
        "sha256": hashes,
        "files": {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())},
    }


def describe_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    """Name of the tokenizer, and hashes of everything that affects tokenization."""
    return {
        "name": str(tokenizer.name_or_path),
        "hash": hash_tokenizer(tokenizer),
        "chat_template_hash": hash_template(tokenizer),
    }


def hash_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> str:
    """SHA-256 of vocabulary, merges, normalisation and special tokens; without truncation and padding, which remember
    the last call."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    del parts["truncation"], parts["padding"]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def hash_template(tokenizer: "PreTrainedTokenizerBase") -> str:
    """SHA-256 of the chat template that renders conversations."""
    return hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()


def _import_indexed_dataset() -> "ModuleType":
    """Import megatron-core's module to write a store: it imports 700 others (0.6 s), which warn of missing GPU packages
    and compile functions, and a store needs neither."""
    # It warns in a CUDA build of PyTorch without a visible GPU.
    builder = logging.getLogger("torch.utils.cpp_extension")
    level = builder.level
    builder.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), without_compiler():
            warnings.simplefilter("ignore")
            from megatron.core.datasets import indexed_dataset
    finally:
        builder.setLevel(level)
    return indexed_dataset
