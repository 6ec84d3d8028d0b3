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
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vcore_ds.common.errors import UserError
from vcore_ds.common.imports import without_compiler
from vcore_ds.common.paths import reading, write_atomically
from vcore_ds.data.conversations import check_tokenizer
from vcore_ds.data.store_checks import (
    COPY_AGAIN,
    FORMAT,
    MANIFEST,
    REMEDY,
    check_files,
    check_index,
    check_index_header,
    combine_hashes,
    hash_files,
    load_array,
    read_manifest,
)
from vcore_ds.data.tokenization import TokenizedSequence, TokenizedSequences

if TYPE_CHECKING:
    from types import ModuleType

    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from transformers import PreTrainedTokenizerBase

SUPERVISED, IN_ANSWER = 1, 2  # bits of a mark

_CHUNK_TOKENS = 2**24  # tokens read at once from stores without `max_token_id`; 64 MiB


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
        """Check everything that does not need reading the tokens (`check_contents` checks the rest): also that the
        store was made with `tokenizer` and its template, and fits `cutoff_length` in tokens and `vocabulary_size`, rows
        of the model's input embedding. Raises UserError."""
        self.folder = Path(folder)
        with reading("", self.folder, "a token store that can be read"):
            self.manifest = read_manifest(self.folder)
            check_files(self.folder, self.manifest["files"])
        if tokenizer is not None:
            self._check_tokenizer(tokenizer)
        if cutoff_length is not None and self.manifest["max_length"] > cutoff_length:
            raise UserError(
                f"{self.folder}: found sequences of up to {self.manifest['max_length']:,} tokens, expected at most "
                f"{cutoff_length:,} (data.cutoff_length); raise it to {self.manifest['max_length']}, or {REMEDY} "
                f"and --cutoff-length {cutoff_length}"
            )
        self._tokens = self._open_index("tokens", np.int32)
        self._marks = self._open_index("marks", np.uint8)
        self.sequence_ids: np.ndarray = load_array(self.folder / "sequence_id.npy", np.int64)
        self.num_supervised_tokens: np.ndarray = load_array(self.folder / "num_supervised_tokens.npy", np.int32)
        sizes = {len(self.sequence_ids), len(self.num_supervised_tokens)}
        if sizes != {self.manifest["num_sequences"]}:
            raise UserError(
                f"{self.folder}: found arrays of {' and '.join(f'{n:,}' for n in sorted(sizes))} sequences, expected "
                f"{self.manifest['num_sequences']:,} ({MANIFEST}); {REMEDY}"
            )
        if vocabulary_size is not None:
            self._check_vocabulary(vocabulary_size)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [n], the tokens of each sequence; from the index."""
        # A copy: megatron-core unmaps the index when it frees the data set, and reading the array would then crash.
        return np.array(self._tokens.sequence_lengths)

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens and their marks, in order."""
        return self.manifest["digest"]

    def origins(self) -> tuple[list[str], np.ndarray]:
        """Find the source (file or data set) of each sequence, and its row or line there, from 0, int64 [n]. A store of
        an early version, whose manifest lacks the first rows of several sources, counts as one source."""
        first_rows = self.manifest.get("first_rows")
        if first_rows is None:
            sources = self.manifest.get("source", [])
            only = sources[0] if len(sources) == 1 else {}
            first_rows = [(only.get("file") or only.get("hub") or str(self.folder), 0)]
        names, starts = zip(*first_rows, strict=True)
        numbers = np.searchsorted(starts, self.sequence_ids, side="right") - 1
        return [names[i] for i in numbers], self.sequence_ids - np.array(starts, dtype=np.int64)[numbers]

    def count_dropped_rows(self) -> tuple[int | None, dict[str, int]]:
        """Number of rows read to make the store (None if unknown), and of rows dropped for each reason."""
        counts = self.manifest.get("counts", {})
        malformed = {"malformed": counts["malformed"]} if counts.get("malformed") else {}
        return counts.get("rows"), malformed | counts.get("dropped", {})

    def max_token_id(self) -> int:
        """Find the largest token id. Stores of early versions, whose manifest lacks it, are read completely: 0.3 s per
        GB."""
        if "max_token_id" in self.manifest:
            return self.manifest["max_token_id"]
        tokens = np.memmap(self.folder / "tokens.bin", dtype=np.int32, mode="r")
        return max(int(tokens[i : i + _CHUNK_TOKENS].max()) for i in range(0, len(tokens), _CHUNK_TOKENS))

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
        return len(self._tokens)

    def read_sequence(self, i: int) -> TokenizedSequence:
        marks = self._marks[i]
        return TokenizedSequence(
            sequence_id=int(self.sequence_ids[i]),
            input_ids=np.array(self._tokens[i]),  # a copy, because torch warns of read-only memory
            supervised=(marks & SUPERVISED).astype(np.bool_),
            in_answer=(marks & IN_ANSWER).astype(np.bool_),
        )

    def __iter__(self) -> Iterator[TokenizedSequence]:
        return (self[i] for i in range(len(self)))

    def _open_index(self, name: str, dtype: type[np.generic]) -> "IndexedDataset":
        """Open `name`.bin and `name`.idx with megatron-core, after checking the index."""
        check_index_header(self.folder / f"{name}.idx", dtype, self.manifest["num_sequences"])
        try:
            dataset = _import_indexed_dataset().IndexedDataset(str(self.folder / name))
        except AssertionError as error:
            raise UserError(f"{self.folder / name}.idx: no readable index ({error}); {COPY_AGAIN}") from None
        check_index(self.folder, name, dataset.index, dtype, self.manifest)
        return dataset

    def _check_vocabulary(self, size: int) -> None:
        largest = self.max_token_id()
        if largest >= size:
            raise UserError(
                f"{self.folder}: found token ids up to {largest:,}, expected ids below {size:,}, the vocab_size of the "
                "model (model.path, config.json): the tokenizer has tokens that the model has no embedding for; take "
                f"the tokenizer that belongs to the model, or add rows to its embeddings, then {REMEDY}"
            )

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
    return _sha256(json.dumps(parts, sort_keys=True))


def hash_template(tokenizer: "PreTrainedTokenizerBase") -> str:
    """SHA-256 of the chat template that renders conversations."""
    return _sha256(tokenizer.get_chat_template())


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _import_indexed_dataset() -> "ModuleType":
    """Import megatron-core's module on first use: it imports 700 others (0.6 s), which warn of missing GPU packages and
    compile functions, and a store needs neither."""
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
