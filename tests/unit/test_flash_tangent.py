"""Flash attention with tangents: results in Triton's interpreter, compilation for GPUs that are not here, dispatch.

Each part runs in a process of its own, as Triton settles its mode when it is imported, and its driver once a process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vcore_ds.models.attention import _kernel_serves

CASES = Path(__file__).with_name("flash_tangent_cases.py")
REPOSITORY = CASES.parents[2]


def python(*arguments: str, **environment: str) -> str:
    """What Python prints, which must succeed."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=variables | environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_interpreted_kernel_against_fp64() -> None:
    words = python("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(CASES), TRITON_INTERPRET="1")
    print(words)
    assert " passed" in words and "skipped" not in words


COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

class NoDevice(DriverBase):  # what compilation asks of a driver
    capability = 90
    is_active = classmethod(lambda cls: True)
    get_current_target = lambda self: GPUTarget("cuda", self.capability, 32)
    get_current_device = lambda self: self.capability
    get_current_stream = lambda self, device: 0
    get_active_torch_device = lambda self: torch.device("cpu")
    get_benchmarker = get_empty_cache_for_benchmark = map_python_to_cpp_type = None

driver.set_active(NoDevice())
from vcore_ds.models import flash_tangent, flash_tangent_kernel

for NoDevice.capability in (90, 100):
    for head_dim, sliding_window, sinks in ((64, 128, torch.empty(8)), (96, 1024, None), (256, None, None)):
        dim = triton.next_power_of_2(head_dim)
        queries, keys, num_warps, num_stages = flash_tangent.TILES[dim][0]
        query, key = (torch.empty(1, 4096, n, head_dim, dtype=torch.bfloat16).transpose(1, 2) for n in (8, 2))
        tensors = (query, key, key, query, key, key, query, query, torch.empty(1, 8, 4096))
        compiled = flash_tangent_kernel.attend.warmup(
            *tensors, *(x.stride() for x in tensors), sinks, sinks, torch.empty(5, dtype=torch.int32), 4, 4096, 4, 0.1,
            sliding_window or 0, HEAD_DIM=head_dim, DIM=dim, SLIDING=sliding_window is not None, LONG=True,
            UPCAST=False, QUERY_BLOCK=queries, KEY_BLOCK=keys, num_warps=num_warps, num_stages=num_stages, grid=(1, 1),
        )
        made = compiled.metadata
        print(made.target.arch, head_dim, made.shared, made.tmem_size, len(compiled.asm["cubin"]))
"""


def test_first_tiles_compile_and_fit(tmp_path: Path) -> None:
    """For H100 and B200, whose assembler Triton brings: in half precision, with all tangents; once with sinks."""
    lines = python("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    found = [[int(word) for word in line.split()] for line in lines]
    assert [line[:2] for line in found] == [[arch, head_dim] for arch in (90, 100) for head_dim in (64, 96, 256)]
    for arch, head_dim, shared_bytes, tensor_memory_columns, binary_bytes in found:
        print(f"{arch}, head dimension {head_dim}: {shared_bytes:,} B shared, {tensor_memory_columns} TMEM columns")
        assert shared_bytes <= 227 * 1024 and tensor_memory_columns <= 512 and binary_bytes > 0


ABSENT = """
import sys
sys.modules["triton"] = None  # an import of it fails
import torch
from vcore_ds.models.attention import RowLayout
from vcore_ds.models.attention import forward_mode_attention
query = torch.randn(1, 2, 9, 16, dtype=torch.bfloat16)
layout = RowLayout.of([[4, 5]], 1, query.device)
print(*forward_mode_attention(torch.nn.Module(), query, query, query, None, row_layout=layout)[0].shape)
"""


def test_without_triton_attention_runs_in_blocks() -> None:
    assert python("-c", ABSENT, TRITON_INTERPRET="1").split() == ["1", "9", "2", "16"]


def test_the_kernel_serves_half_precision_up_to_its_head_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    def served(dtype: torch.dtype, head_dim: int) -> bool:
        return _kernel_serves(torch.empty(1, 2, 3, head_dim, dtype=dtype))

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not served(torch.bfloat16, 64)  # on a CPU
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert served(torch.bfloat16, 64) and served(torch.float16, 256)
    assert not served(torch.float32, 64) and not served(torch.float64, 64) and not served(torch.bfloat16, 288)
