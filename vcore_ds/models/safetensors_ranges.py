"""Reading byte ranges of safetensors files: headers, and contiguous elements of a flattened tensor.

The library's `safe_open(...).get_slice` takes ranges of rows and columns, and maps the entire file. A ZeRO-3 shard is a
contiguous range of elements of the flattened tensor: one byte range, read here directly into its final memory.

Format: https://github.com/huggingface/safetensors#format
"""

import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vcore_ds.common.errors import last_line

WINDOW_BYTES = 32 * 2**20
"""Largest read. Values that are cast or moved to a GPU pass through one buffer of this size."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes that can be read. Quantized formats use others, which may occur in headers."""

_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""


class BadSafetensors(ValueError):
    """Not a safetensors file, or a truncated one; the message completes "FILE: ..."."""


class StoredTensor(NamedTuple):
    """Position of a tensor in a file."""

    file: Path
    dtype: str
    """Name in the header; `DTYPES` has those that can be read."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""


class ReadRequest(NamedTuple):
    """A contiguous range of a stored tensor's elements, to be read into `target`."""

    stored: StoredTensor
    start: int
    """Index of the first element in the flattened tensor."""
    target: Tensor
    """`[n]`, contiguous, on any device; values are cast to its dtype."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.target.numel() * DTYPES[self.stored.dtype].itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the positions of a file's tensors, by name.

    Raises:
        BadSafetensors: the header cannot be read, or does not describe this file.
        OSError: the file cannot be read.
    """
    num_bytes = path.stat().st_size
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > min(_MAX_HEADER_BYTES, num_bytes - 8):
                raise ValueError(f"a header of {header_bytes:,} bytes in a file of {num_bytes:,}")
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        tensors = {name: _parse_entry(path, 8 + header_bytes, name, entry) for name, entry in header.items()}
        end = _count_data_bytes(header)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise BadSafetensors(f"not a readable safetensors file ({type(error).__name__}: {last_line(error)})") from None
    expected = 8 + header_bytes + end
    if num_bytes != expected:
        state = "truncated" if num_bytes < expected else "longer than its header says"
        raise BadSafetensors(f"{state}: found {num_bytes:,} bytes, expected {expected:,}")
    return tensors


def _parse_entry(path: Path, data_start: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"{name}: shape {shape} at {begin} to {end}")
    dtype = DTYPES.get(entry["dtype"])
    if dtype is not None and end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: {end - begin:,} bytes for {entry['dtype']} {list(shape)}")
    return StoredTensor(path, entry["dtype"], shape, data_start + begin)


def _count_data_bytes(header: dict[str, Any]) -> int:
    """Return the number of bytes of all tensors, which must be contiguous."""
    end = 0
    for begin, next_end in sorted(tuple(entry["data_offsets"]) for entry in header.values()):
        if begin != end or next_end < begin:
            raise ValueError(f"data at {begin:,} to {next_end:,} after {end:,}")
        end = next_end
    return end


def read_ranges(requests: Iterable[ReadRequest], progress: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Read the ranges, ordered by file and offset, in windows of at most `WINDOW_BYTES`.

    Args:
        progress: called with the number of bytes of each window.

    Raises:
        OSError: a file cannot be read, or was truncated since its header was read.
    """
    ordered = sorted(requests, key=lambda item: (item.stored.file, item.stored.offset, item.start))
    buffer: Tensor | None = None
    for path, group in itertools.groupby(ordered, key=lambda item: item.stored.file):
        with path.open("rb", buffering=0) as file:
            for stored, start, target in group:
                dtype = DTYPES[stored.dtype]
                in_place = target.dtype == dtype and target.device.type == "cpu"
                for first in range(0, target.numel(), WINDOW_BYTES // dtype.itemsize):
                    part = target[first : first + WINDOW_BYTES // dtype.itemsize]
                    if in_place:
                        window = part
                    else:
                        if buffer is None:
                            buffer = torch.empty(WINDOW_BYTES, dtype=torch.uint8)
                        window = buffer[: part.numel() * dtype.itemsize].view(dtype)
                    _read(file.fileno(), path, stored.offset + (start + first) * dtype.itemsize, window)
                    if not in_place:
                        part.copy_(window)
                    progress(window.nbytes)


def _read(descriptor: int, path: Path, offset: int, target: Tensor) -> None:
    """Fill a contiguous CPU tensor with the bytes at `offset`."""
    remaining = memoryview(target.view(torch.uint8).numpy().data)
    while remaining:
        num_bytes = os.preadv(descriptor, [remaining], offset)
        if num_bytes == 0:
            raise OSError(f"{path}: ended at byte {offset:,}, {len(remaining):,} bytes early")
        remaining, offset = remaining[num_bytes:], offset + num_bytes
