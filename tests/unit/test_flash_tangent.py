"""Flash attention with tangents: results in Triton's interpreter, compilation for GPUs that are not here, dispatch.

Each part runs in a process of its own, as Triton settles its mode when it is imported, and its driver once a process.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.soak import IS_SOAK
from vcore_ds.models import attention
from vcore_ds.models.attention import _can_use_triton

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


def test_interpreted_kernels_against_fp64() -> None:
    """Flash attention, and the tangents of `test_pointwise.py`."""
    files = [str(CASES), str(CASES.with_name("test_pointwise.py"))]
    words = python(
        "-m", "pytest", "-v", "-s", "-p", "no:cacheprovider", *files, "-k", "flash_tangent_cases or tangent_of",
        TRITON_INTERPRET="1",
    )  # fmt: skip
    print(words)
    assert all(f"{Path(file).name}::" in words for file in files)
    assert " passed" in words and "SKIPPED" not in words and " skipped" not in words


PROGRAMS = ("ptxas", "ptxas-blackwell", "cuobjdump", "nvdisasm")


def test_first_tiles_keep_the_tensor_cores_busy(tmp_path: Path) -> None:
    """For H100 and B200, with all tangents, and for the tangent alone with sinks and a window: nothing in memory that
    belongs into registers, products on the tensor cores, and few waits for them. And one kernel for batches of all
    kinds."""
    triton = importlib.util.find_spec("triton")
    folder = Path(triton.origin).parent / "backends" / "nvidia" / "bin" if triton and triton.origin else None
    missing = [name for name in PROGRAMS if folder is None or not (folder / name).is_file()]
    if missing:
        pytest.skip(f"the kernel was not compiled for H100 and B200: no {', '.join(missing)} of a Triton with NVIDIA's")
    head_dims = (96, 256) if IS_SOAK else (256,)
    words = " ".join(map(str, head_dims))
    options = ("--first", "--json") if IS_SOAK else ("--first", "--json", "--quick")
    command = ("-m", "tests.benchmarks.kernel_compiles", *options, "--head-dim", *words.split())
    found = json.loads(python(*command, TRITON_CACHE_DIR=str(tmp_path)))
    assert [(one["gpu"], one["head_dim"]) for one in found["tiles"]] == [
        (gpu, head_dim) for gpu in ("H100", "B200") for head_dim in head_dims for _ in range(4 if IS_SOAK else 2)
    ]
    for one in found["tiles"]:
        print(one)
        assert one["fits"] and not one["is_serialized"] and one["spilled_bytes"] == 0, one
        number, name = one["products"].split()
        assert name == {"H100": "HGMMA", "B200": "UTCHMMA"}[one["gpu"]] and int(number) >= 20, one
        assert 0 < one["num_waits"] <= {"H100": 4, "B200": 6}[one["gpu"]], one
    assert {spilled for one in found["pointwise"].values() for _, spilled in one.values()} == {0}
    assert found["num_compiles"] == {str(head_dim): 1 for head_dim in head_dims}


NO_COMPILER = """
from triton.backends import backends
from vcore_ds.common.errors import UserError
from vcore_ds.models.flash_tangent import _check_driver
backends["nvidia"].driver.is_active = staticmethod(lambda: True)
try:
    _check_driver()
except UserError as error:
    print(error)
"""


def test_a_compiler_that_is_missing_is_said(tmp_path: Path) -> None:
    found = python("-c", NO_COMPILER, TRITON_CACHE_DIR=str(tmp_path), TRITON_LIBCUDA_PATH="/nowhere", CC="/no/compiler")
    assert "/no/compiler" in found and "apt-get install gcc python3-dev" in found


def test_without_triton_attention_runs_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # type: ignore[arg-type]  # any import of it fails
    monkeypatch.setattr(attention, "has_triton", attention.has_triton.__wrapped__)  # what this process found is cached
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    query = torch.randn(1, 2, 9, 16, dtype=torch.bfloat16)
    layout = attention.SequenceLayout.from_lengths([[4, 5]], 1, query.device)
    output, _ = attention.forward_mode_attention(torch.nn.Module(), query, query, query, None, sequence_layout=layout)
    assert output.shape == (1, 9, 2, 16)


def test_the_kernel_serves_half_precision_up_to_its_head_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    def served(dtype: torch.dtype, head_dim: int) -> bool:
        return _can_use_triton(torch.empty(1, 2, 3, head_dim, dtype=dtype))

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not served(torch.bfloat16, 64)  # on a CPU
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert served(torch.bfloat16, 64) and served(torch.float16, 256)
    assert not served(torch.float32, 64) and not served(torch.float64, 64) and not served(torch.bfloat16, 288)
