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
import struct
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.paths import parse_json, reading, write_atomically
from vcore_ds.config.data_section import MANIFEST
from vcore_ds.data.conversations import check_tokenizer
from vcore_ds.data.tokenization import TokenizedSequence, TokenizedSequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT: Literal["vcore_ds token store, version 1"] = "vcore_ds token store, version 1"

REMEDY = "make it again with `vcore-ds prepare`"
COPY_AGAIN = f"copy the whole folder again, or {REMEDY}"

SUPERVISED, IN_ANSWER = 1, 2  # bits of a mark

_INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Of megatron-core's index: magic, version, type, numbers of sequences and documents (and one). Then lengths (int32),
places in bytes (int64), first sequences of the documents (int64)."""
_TYPE_CODES = {"tokens": (np.int32, 4), "marks": (np.uint8, 1)}

_DIGESTED = ("tokens.idx", "tokens.bin", "marks.bin")
"""Files with the tokens, the lengths (index) and the supervision."""

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
        """Check the manifest's sums (`check_contents` checks the contents), that the store was made with `tokenizer`
        and its template, and that it fits `cutoff_length` in tokens and `vocabulary_size`, rows of the model's input
        embedding. Raises UserError."""
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        longest, largest = self.manifest["max_length"], self.manifest["max_token_id"]
        if tokenizer is not None:
            self._check_tokenizer(tokenizer)
        if cutoff_length is not None and longest > cutoff_length:
            raise UserError(
                f"{self.folder}: found sequences of up to {longest:,} tokens, expected at most {cutoff_length:,} "
                f"(data.cutoff_length); raise it to {longest}, or {REMEDY} and --cutoff-length {cutoff_length}"
            )
        if vocabulary_size is not None and largest >= vocabulary_size:
            raise UserError(
                f"{self.folder}: found token ids up to {largest:,}, expected ids below {vocabulary_size:,}, the "
                "vocab_size of the model (model.path, config.json), which has no embeddings for them; take the model's "
                f"tokenizer, or add rows to its embeddings, then {REMEDY}"
            )
        self._open_files()

    def _open_files(self) -> None:
        """Map the files. Raises UserError if they cannot be read, or contradict the manifest."""
        folder, number = self.folder, self.manifest["num_sequences"]
        try:
            # Not by megatron-core, whose import takes a second: sequences follow each other, so lengths are enough.
            self.lengths = np.fromfile(folder / "tokens.idx", np.int32, number, offset=_INDEX_HEADER.size)
            self._ends = self.lengths.cumsum(dtype=np.int64)
            self._tokens = np.memmap(folder / "tokens.bin", np.int32, "r")
            self._marks = np.memmap(folder / "marks.bin", np.uint8, "r")
            self.sequence_ids = np.load(folder / "sequence_id.npy", mmap_mode="r")
            self.num_supervised_tokens: np.ndarray = np.load(folder / "num_supervised_tokens.npy", mmap_mode="r")
            sums = {
                "num_sequences": {len(self.lengths), len(self.sequence_ids), len(self.num_supervised_tokens)},
                "num_tokens": {len(self._tokens), len(self._marks), int(self._ends[-1])},
                "max_length": {int(self.lengths.max())},
                "num_supervised_tokens": {int(self.num_supervised_tokens.sum())},
            }
        except Exception as error:  # of any class: numpy evaluates the header of an array as Python
            raise UserError(f"{folder}: cannot be read ({first_line(error)}); {COPY_AGAIN}") from None
        for key, values in sums.items():
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
        rows_read = f" of {counts['rows']:,} rows" if "rows" in counts else ""
        lines = [
            f"{len(self):,}{rows_read} kept: {manifest['num_tokens']:,} tokens, "
            f"{manifest['num_supervised_tokens']:,} of them supervised; "
            f"{manifest['num_tokens'] / len(self):,.0f} tokens a sequence, up to {manifest['max_length']:,}"
        ]
        return "\n".join([*lines, *describe_counts(counts)])

    def __getitem__(self, i: int) -> TokenizedSequence:
        place = slice(self._ends[i] - self.lengths[i], self._ends[i])
        marks = self._marks[place]
        return TokenizedSequence(
            sequence_id=int(self.sequence_ids[i]),
            input_ids=np.array(self._tokens[place]),  # a copy, because torch warns of read-only memory
            supervised=(marks & SUPERVISED).astype(np.bool_),
            in_answer=(marks & IN_ANSWER).astype(np.bool_),
        )

    def _check_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        check_tokenizer(tokenizer)
        name, made_with, expected = tokenizer.name_or_path, self.manifest["tokenizer"], describe_tokenizer(tokenizer)
        for what, key in (("tokenizer", "hash"), ("chat template", "chat_template_hash")):
            if made_with[key] != expected[key]:
                raise UserError(
                    f"{self.folder}: found tokens of another {what} (that of {made_with['name']}, "
                    f"{made_with[key][:12]}), expected the {what} of {name} ({expected[key][:12]}); {REMEDY} and "
                    f"--tokenizer {name}"
                )


def describe_counts(counts: Mapping[str, Any]) -> list[str]:
    """Describe the rows that were dropped, what was noticed, malformed rows too, and how rows were read: a manifest's
    counts."""
    dropped = [f"{number:,} dropped: {rule}" for rule, number in counts.get("dropped", {}).items()]
    noticed = [f"{number:,} {what}" for what, number in counts.get("noticed", {}).items()]
    return [*dropped, *noticed, *counts.get("reading", [])]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest. Raises UserError if there is no store, or it is damaged, of another version, or
    cannot be read."""
    path = folder / MANIFEST
    with reading("", folder, "a token store that can be read"):
        if not path.is_file():
            where = "" if folder.is_dir() else f" (working directory {Path.cwd()})"
            raise UserError(f"{folder}: found no {MANIFEST} there{where}; expected a token store; {REMEDY}")
        checked = parse_json(path.read_bytes(), _MANIFEST, str(path), "the manifest of a token store", COPY_AGAIN)
    return checked.model_dump(exclude_unset=True)


def check_supervision(folder: Path, supervise: str) -> None:
    """Raise UserError for a store of conversations that was made with another value of `data.supervise`."""
    manifest = read_manifest(folder)
    if "filters" not in manifest or manifest.get("kind", "chat") != "chat":  # before 0.8 stores had kinds
        return
    if (made_with := manifest["filters"].get("supervise", "all")) != supervise:
        raise UserError(
            f"{folder}: found a store made with --supervise {made_with}, expected {supervise} (data.supervise); set "
            f"data.supervise={made_with}, or {REMEDY} and --supervise {supervise}"
        )


def check_contents(folder: Path, cache_folder: Path) -> None:
    """Compare the files' checksums with the manifest (a second per GB), once for each state (size, mtime, inode) of the
    files: an empty file in `cache_folder`, named by a hash of manifest and state, records it where it can be written.
    Raises UserError if a file was replaced or damaged, or cannot be read."""
    manifest = read_manifest(folder)
    expected = manifest["sha256"]
    with reading("", folder, "a token store that can be read"):
        stats = [(folder / name).stat() for name in expected]
        state = [(stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats]
        text = json.dumps([str(folder.resolve()), manifest, state], sort_keys=True)
        mark = cache_folder / "verified" / hashlib.sha256(text.encode()).hexdigest()[:32]
        if mark.is_file():
            return
        hashes = {name: _sha256(folder / name) for name in expected}
    damaged = [name for name in expected if hashes[name] != expected[name]]
    if damaged or _combine_hashes(hashes) != manifest["digest"]:
        raise UserError(
            f"{folder / (damaged or [MANIFEST])[0]}: damaged, or of another store: its SHA-256 is not that of the "
            f"manifest; {COPY_AGAIN}"
        )
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _combine_hashes(hashes: Mapping[str, str]) -> str:
    """Compute the SHA-256 of tokens and supervision from the hashes of the files."""
    return hashlib.sha256(b"".join(bytes.fromhex(hashes[name]) for name in _DIGESTED)).hexdigest()


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
    sequence_ids, num_supervised_tokens, lengths, max_token_id = [], [], [], 0
    with ExitStack() as stack:
        tokens, marks = (stack.enter_context((unfinished / f"{name}.bin").open("wb")) for name in _TYPE_CODES)
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
            tokens.write(sequence.input_ids.astype(np.int32).tobytes())
            marks.write(mark.tobytes())
            sequence_ids.append(sequence.sequence_id)
            num_supervised_tokens.append(num_supervised)
            lengths.append(len(sequence))
            max_token_id = max(max_token_id, int(sequence.input_ids.max()))
    if not lengths:
        raise UserError(f"{folder}: no sequence to store")
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    for name, (dtype, code) in _TYPE_CODES.items():
        header = _INDEX_HEADER.pack(b"MMIDIDX\0\0", 1, code, len(lengths), len(lengths) + 1)
        places, documents = starts[:-1] * np.dtype(dtype).itemsize, np.arange(len(lengths) + 1, dtype=np.int64)
        index = header + np.array(lengths, np.int32).tobytes() + places.tobytes() + documents.tobytes()
        (unfinished / f"{name}.idx").write_bytes(index)
    np.save(unfinished / "sequence_id.npy", np.array(sequence_ids, dtype=np.int64))
    np.save(unfinished / "num_supervised_tokens.npy", np.array(num_supervised_tokens, dtype=np.int32))
    hashes = {path.name: _sha256(path) for path in sorted(unfinished.iterdir())}
    return {
        "format": FORMAT,
        "num_sequences": len(lengths),
        "num_tokens": sum(lengths),
        "num_supervised_tokens": sum(num_supervised_tokens),
        "max_length": max(lengths),
        "max_token_id": max_token_id,
        "digest": _combine_hashes(hashes),
        "sha256": hashes,
    }


def describe_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    """Name of the tokenizer, and SHA-256 of what affects tokenization: vocabulary, merges, normalisation and special
    tokens; the chat template. Truncation and padding, which remember the last call, are not part of it."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    del parts["truncation"], parts["padding"]
    texts = {"hash": json.dumps(parts, sort_keys=True), "chat_template_hash": tokenizer.get_chat_template()}
    hashes = {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}
    return {"name": str(tokenizer.name_or_path), **hashes}
