"""Flash attention with tangents: results in Triton's interpreter, compilation for GPUs that are not here, dispatch.

Each part runs in a separate process, as Triton settles its mode when it is imported, and its driver once a process.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.helpers.soak import IS_SOAK
from vcore_ds.distributed.device import use_local_compile_caches
from vcore_ds.models import attention
from vcore_ds.models.attention import _can_use_triton

CASES = Path(__file__).with_name("flash_tangent_cases.py")
REPOSITORY = CASES.parents[2]


def run_python(*arguments: str, **environment: str) -> str:
    """Run Python, which must succeed; returns what it prints."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=variables | environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_interpreted_kernels_against_fp64() -> None:
    """Flash attention, the functions of `test_pointwise.py`, and the token loss."""
    files = [str(CASES), *(str(CASES.with_name(name)) for name in ("test_pointwise.py", "test_token_loss.py"))]
    words = run_python(
        "-m", "pytest", "-v", "-s", "-p", "no:cacheprovider", *files,
        "-k", "flash_tangent_cases or tangent_of or half_precision", TRITON_INTERPRET="1",
    )  # fmt: skip
    print(words)
    assert all(f"{Path(file).name}::" in words for file in files)
    assert " passed" in words and "SKIPPED" not in words and " skipped" not in words


PROGRAMS = ("ptxas", "ptxas-blackwell", "cuobjdump", "nvdisasm")


INSTRUCTIONS = {"H100": "HGMMA", "B200": "UTCHMMA", "B300": "UTCHMMA"}
"""Tensor-core instructions; those of other cards are HMMA, which need no waits."""


def test_tiles_keep_the_tensor_cores_busy(tmp_path: Path) -> None:
    """With all tangents, and for the tangent alone with sinks and a window, each on every card (each with every head
    dimension in `make soak`): the tile fits the card, spills no registers, and multiplies matrices on the tensor cores
    with few waits; and batches of all kinds share one kernel."""
    triton = importlib.util.find_spec("triton")
    folder = Path(triton.origin).parent / "backends" / "nvidia" / "bin" if triton and triton.origin else None
    missing = [name for name in PROGRAMS if folder is None or not (folder / name).is_file()]
    if missing:
        pytest.skip(f"the kernel was not compiled for any card: no {', '.join(missing)} of a Triton with NVIDIA's")
    cards = ["RTX PRO 6000", "A100", "H100", "B200", *(["L40S", "A40", "B300"] if IS_SOAK else [])]
    head_dims = (64, 96, 256) if IS_SOAK else (128, 256)
    words = map(str, head_dims)
    options = () if IS_SOAK else ("--quick",)
    command = ("-m", "tests.benchmarks.kernel_compiles", *options, "--gpu", *cards, "--head-dim", *words)
    report = json.loads(run_python(*command, TRITON_CACHE_DIR=str(tmp_path)))
    assert [(entry["gpu"], entry["head_dim"]) for entry in report["tiles"]] == [
        (gpu, head_dim) for gpu in cards for head_dim in head_dims for _ in range(4 if IS_SOAK else 1)
    ]
    for entry in report["tiles"]:
        print(entry)
        assert entry["fits"] and not entry["is_serialized"] and entry["spilled_bytes"] == 0, entry
        number, name = entry["products"].split()
        assert name == INSTRUCTIONS.get(entry["gpu"], "HMMA"), entry
        if name == "HMMA":
            assert 1 <= entry["repeated"] < 1.7, entry
        else:  # each takes 16 dimensions of a product of scores, or 16 keys of a product with values
            dim, keys = 1 << (entry["head_dim"] - 1).bit_length(), int(entry["tile"].split()[1])
            assert int(number) == (3 * dim + (2 if entry["value_is_given"] else 3) * keys) // 16, entry
            assert 0 < entry["num_waits"] <= {"HGMMA": 4, "UTCHMMA": 6}[name], entry
    assert {spilled for entry in report["pointwise"].values() for _, spilled in entry.values()} == {0}
    assert report["num_compiles"] == {str(head_dim): 1 for head_dim in head_dims}


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


def test_a_missing_compiler_is_reported(tmp_path: Path) -> None:
    output = run_python(
        "-c", NO_COMPILER, TRITON_CACHE_DIR=str(tmp_path), TRITON_LIBCUDA_PATH="/nowhere", CC="/no/compiler"
    )
    assert "/no/compiler" in output and "apt-get install gcc python3-dev" in output


def test_each_rank_compiles_into_a_folder_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with patch.dict(os.environ, {"LOCAL_RANK": "1"}):
        os.environ.pop("TRITON_CACHE_DIR", None)
        use_local_compile_caches()
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / f"vcore_ds_{os.getuid()}" / "triton" / "rank_1")


def test_without_triton_attention_runs_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # type: ignore[arg-type]  # any import of it fails
    monkeypatch.setattr(attention, "has_triton", attention.has_triton.__wrapped__)  # what this process found is cached
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    query = torch.randn(1, 2, 9, 16, dtype=torch.bfloat16)
    layout = attention.SequenceLayout.from_lengths([[4, 5]], 1, query.device)
    output, _ = attention.forward_mode_attention(torch.nn.Module(), query, query, query, None, sequence_layout=layout)
    assert output.shape == (1, 9, 2, 16)


@pytest.mark.parametrize(("shared_kib", "serves"), [(64, False), (99, True)], ids=["Tesla T4", "RTX PRO 6000"])
def test_a_card_with_too_little_shared_memory_computes_in_blocks(
    shared_kib: int, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=shared_kib * 1024, major=12)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = torch.device("cuda", shared_kib)  # answers are cached by device
    query = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(1, 2, 3, 128), device=device)
    assert _can_use_triton(query) == serves


def test_the_kernel_serves_half_precision_up_to_its_head_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_served(dtype: torch.dtype, head_dim: int) -> bool:
        return _can_use_triton(torch.empty(1, 2, 3, head_dim, dtype=dtype))

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not is_served(torch.bfloat16, 64)  # on a CPU
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert is_served(torch.bfloat16, 64) and is_served(torch.float16, 256)
    assert not is_served(torch.float32, 64) and not is_served(torch.float64, 64) and not is_served(torch.bfloat16, 288)
