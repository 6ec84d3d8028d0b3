"""Reading safetensors files: indexes, headers, and contiguous elements of a flattened tensor.

The library's `safe_open(...).get_slice` takes ranges of rows and columns. A ZeRO-3 shard is a contiguous range of
elements of the flattened tensor: one byte range, read here directly into its final memory. It is not mapped, since a
file system that fails or a file that becomes shorter would kill the process, without a message.

Format: https://github.com/huggingface/safetensors#format
"""

import itertools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vcore_ds.common.errors import UserError, last_line

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


class StoredTensor(NamedTuple):
    """Position of a tensor in a file."""

    file: Path
    dtype: str  # its name in the header; `DTYPES` has those that can be read
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


class ReadRequest(NamedTuple):
    """A contiguous range of a stored tensor's elements, to be read into `target`."""

    stored: StoredTensor
    start: int  # index of the first element in the flattened tensor
    target: Tensor  # `[n]`, contiguous, on any device; values are cast to its dtype

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.target.numel() * DTYPES[self.stored.dtype].itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the positions of a file's tensors, by name. Raises OSError; UserError if the library refuses the file, as
    one that is not complete."""
    try:
        with safe_open(path, framework="pt"):  # checks the header against the file, but tells no positions
            pass
    except SafetensorError as error:
        raise UserError(
            f"model.path: {path.parent}: {path.name}: not a complete safetensors file ({last_line(error)}); is the "
            "download complete?"
        ) from None
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(path, entry["dtype"], tuple(entry["shape"]), 8 + header_bytes + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def read_tensor(stored: StoredTensor, name: str) -> Tensor:
    """Read a whole tensor."""
    with safe_open(stored.file, framework="pt") as file:
        return file.get_tensor(name)


def read_weight_map(index: Path) -> dict[str, str]:
    """Read the file name of each weight from an index of sharded weights. Raises UserError if it has none."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        if not weight_map or any(name != Path(name).name for name in weight_map.values()):
            raise ValueError("weight_map names no files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"model.path: {index.parent}: {index.name}: found no weight_map of names to files "
            f"({type(error).__name__}: {last_line(error)}); download the model again"
        ) from None
    return weight_map


def read_ranges(requests: Iterable[ReadRequest], progress: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Read the ranges, ordered by file and offset, in windows of at most `WINDOW_BYTES`, and pass the number of bytes
    of each to `progress`. Raises OSError if a file cannot be read, or was truncated since its header was read."""
    ordered = sorted(requests, key=lambda item: (item.stored.file, item.stored.offset, item.start))
    buffer = torch.empty(WINDOW_BYTES, dtype=torch.uint8)
    for path, group in itertools.groupby(ordered, key=lambda item: item.stored.file):
        with path.open("rb", buffering=0) as file:
            for stored, start, target in group:
                dtype = DTYPES[stored.dtype]
                in_place = target.dtype == dtype and target.device.type == "cpu"
                offset = stored.offset + start * dtype.itemsize
                for window in target.split(WINDOW_BYTES // dtype.itemsize) if len(target) else ():
                    read = window if in_place else buffer[: len(window) * dtype.itemsize].view(dtype)
                    _read(file.fileno(), path, offset, read)
                    if not in_place:
                        window.copy_(read)
                    offset += read.nbytes
                    progress(read.nbytes)


def _read(descriptor: int, path: Path, offset: int, target: Tensor) -> None:
    """Fill a contiguous CPU tensor with the bytes at `offset`."""
    remaining = memoryview(target.view(torch.uint8).numpy().data)
    while remaining:
        num_bytes = os.preadv(descriptor, [remaining], offset)
        if num_bytes == 0:
            raise OSError(f"{path}: ended at byte {offset:,}, {len(remaining):,} bytes early")
        remaining, offset = remaining[num_bytes:], offset + num_bytes
