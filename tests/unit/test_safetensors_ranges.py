"""Safetensors files read by byte range, against the library, and headers that do not describe their file."""

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vcore_ds.common.errors import UserError
from vcore_ds.models import safetensors_ranges
from vcore_ds.models.safetensors_ranges import DTYPES, ReadRequest, read_header, read_ranges

TENSORS = {
    "a": torch.randn(7, 5, generator=torch.Generator().manual_seed(0)),
    "b": torch.randn(64, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_every_dtype_is_read_as_by_the_library(tmp_path: Path) -> None:
    tensors = {name: torch.ones(3, 2).to(dtype) for name, dtype in DTYPES.items()}
    save_file(tensors, tmp_path / "all.safetensors")
    for name, stored in read_header(tmp_path / "all.safetensors").items():
        assert (stored.dtype, stored.shape) == (name, (3, 2))
        target = torch.empty(6, dtype=DTYPES[name])
        read_ranges([ReadRequest(stored, 0, target)])
        assert torch.equal(target, tensors[name].flatten())


@pytest.mark.parametrize("window_bytes", [8, 24, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranges_are_slices_of_the_tensor(
    file: Path, monkeypatch: pytest.MonkeyPatch, window_bytes: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(safetensors_ranges, "WINDOW_BYTES", window_bytes)
    stored, wanted, expected, windows = read_header(file), [], [], []
    for name, start, numel in [("b", 3, 50), ("a", 0, 35), ("a", 11, 13), ("scalar", 0, 1), ("empty", 0, 0)]:
        wanted.append(ReadRequest(stored[name], start, torch.full((numel,), torch.nan, dtype=dtype)))
        expected.append(TENSORS[name].flatten()[start : start + numel].to(dtype))
    read_ranges(wanted, windows.append)
    assert all(torch.equal(request.target, values) for request, values in zip(wanted, expected, strict=True))
    assert sum(windows) == sum(request.num_bytes for request in wanted) == 50 * 2 + 48 * 4 + 8
    assert max(windows) <= window_bytes


def test_a_file_that_has_become_shorter_is_reported(file: Path) -> None:
    wanted = [ReadRequest(stored, 0, torch.empty(math.prod(stored.shape))) for stored in read_header(file).values()]
    file.write_bytes(file.read_bytes()[:-16])
    with pytest.raises(OSError, match="ended at byte"):
        read_ranges(wanted)


def change_entry(**changes: Any) -> Callable[[dict], None]:
    return lambda header: header["a"].update(changes)


HEADERS = {
    "a gap": change_entry(data_offsets=[500, 640]),
    "an overlap": change_entry(data_offsets=[4, 144]),
    "too few bytes": change_entry(shape=[7, 6]),
    "another dtype": change_entry(dtype="BF16"),
    "a negative size": change_entry(shape=[-7, -5]),
    "no offsets": lambda header: header["a"].pop("data_offsets"),
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS.keys())
def test_a_header_that_the_library_refuses_is_refused(file: Path, change: Callable) -> None:
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    change(header)
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + size :])
    with pytest.raises(UserError, match="model.safetensors: "):
        read_header(file)
