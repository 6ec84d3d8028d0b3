"""Reading `name.bin` and `name.idx`: values of many sequences in megatron-core's IndexedDataset format.

megatron-core's own reader reads the same (tests/unit/test_store.py), but importing it would cost every rank 2 s and
130 MiB at its start.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.data.store_checks import COPY_AGAIN, REMEDY
from vcore_ds.errors import UserError

_HEADER = struct.Struct("<9sQBQQ")
"""Beginning of an index: magic, version, type of the values, sequences, documents."""

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1

_TYPES = {np.uint8: 1, np.int32: 4}
"""megatron-core's number of each type."""


class IndexedFile:
    """The values of each sequence, mapped into memory.

    Attributes:
        lengths: int32 [n], number of values of each sequence.
    """

    def __init__(self, folder: Path, name: str, dtype: type[np.generic], manifest: Mapping[str, Any]) -> None:
        """Args:
            name: `tokens` or `marks`.
            dtype: type of the values.
            manifest: of the store; the files have the sizes that it names.

        Raises:
            UserError: the index is of another format or type, leads outside its file or contradicts the manifest: then
                no sequence can be read, or a wrong one.
        """
        path, num_sequences = folder / f"{name}.idx", manifest["num_sequences"]
        _check_header(path, dtype, num_sequences)
        index = np.memmap(path, dtype=np.uint8, mode="r")
        self.lengths = np.frombuffer(index, np.int32, num_sequences, _HEADER.size)
        offset = _HEADER.size + self.lengths.nbytes
        self._places = np.frombuffer(index, np.int64, num_sequences, offset)
        documents = np.frombuffer(index, np.int64, num_sequences + 1, offset + self._places.nbytes)
        num_bytes = manifest["files"][f"{name}.bin"]
        problem = _find_problem(self.lengths, self._places, documents, num_bytes, np.dtype(dtype).itemsize, manifest)
        if problem is not None:
            raise UserError(f"{path}: damaged, or of another store: found {problem}; {COPY_AGAIN}")
        self._values = np.asarray(np.memmap(folder / f"{name}.bin", dtype=dtype, mode="r"))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, position: int) -> np.ndarray:
        """The sequence at a position from 0, [length]; a view of the mapped file."""
        start = self._places[position] // self._values.itemsize
        return self._values[start : start + self.lengths[position]]


def _check_header(path: Path, dtype: type[np.generic], num_sequences: int) -> None:
    """Raises UserError where an index is none of `num_sequences` sequences of this type."""
    with path.open("rb") as file:
        beginning = file.read(_HEADER.size)
    if not beginning.startswith(_MAGIC) or len(beginning) < _HEADER.size:
        raise UserError(f"{path}: not an index of megatron-core's format; {REMEDY}")
    found = _HEADER.unpack(beginning)[1:]
    expected = (_VERSION, _TYPES[dtype], num_sequences, num_sequences + 1)
    num_bytes = _HEADER.size + 12 * num_sequences + 8 * (num_sequences + 1)
    if found != expected or path.stat().st_size != num_bytes:
        raise UserError(
            f"{path}: damaged, or of another store: found version, type, sequences and documents {found} in "
            f"{path.stat().st_size:,} bytes, expected {expected} in {num_bytes:,}; {COPY_AGAIN}"
        )


def _find_problem(
    lengths: np.ndarray,
    places: np.ndarray,
    documents: np.ndarray,
    num_bytes: int,
    itemsize: int,
    manifest: Mapping[str, Any],
) -> str | None:
    """What is wrong with an index; None where every sequence can be found with it.

    Args:
        lengths: of the sequences, in values.
        places: of their beginnings, in bytes.
        documents: number of the first sequence of each document, and the number of sequences; a document each.
        num_bytes: size of the file of values.
        itemsize: bytes of a value.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    if lengths.min() < 1 or lengths.max() != manifest["max_length"]:
        return f"lengths of {lengths.min():,} to {lengths.max():,} tokens, expected 1 to {manifest['max_length']:,}"
    if ends[-1] != manifest["num_tokens"] or ends[-1] * itemsize != num_bytes:
        return f"{ends[-1]:,} tokens, expected {manifest['num_tokens']:,} in {num_bytes:,} bytes"
    if places[0] != 0 or not np.array_equal(places[1:], ends[:-1] * itemsize):
        return "places that do not follow from the lengths"
    if not np.array_equal(documents, np.arange(len(lengths) + 1)):
        return "documents of other than one sequence"
    return None
