"""Checks for machines with GPUs that need none: the decision to use GPUs, tests that stay on the CPU, cores, copies
without waits, and versions that an image provides."""

import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import conftest
from vcore_ds.data import batches
from vcore_ds.data.batches import IGNORED_LABEL, supervised_tokens
from vcore_ds.distributed import process_group
from vcore_ds.training.run_folder import describe_environment

REPOSITORY = Path(__file__).resolve().parents[2]

DECIDE = {
    "vcore_ds/distributed/device.py",  # uses_gpu, for all others
    "vcore_ds/training/run_folder.py",  # on a level without `distributed`
}
"""Files that ask for GPUs themselves. All others ask `uses_gpu`: with DS_ACCELERATOR=cpu ranks stay on the CPU, and a
GPU that one of them would take after all may not even exist."""


def test_one_function_decides_whether_gpus_are_used() -> None:
    asks = re.compile(r"cuda\.(is_available|device_count)\(")
    files = (REPOSITORY / "vcore_ds").rglob("*.py")
    assert {str(file.relative_to(REPOSITORY)) for file in files if asks.search(file.read_text())} == DECIDE


def test_a_run_that_was_kept_on_the_cpu_names_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA H200")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert describe_environment(world_size=1)["devices"] == [platform.machine()]
    monkeypatch.delenv("DS_ACCELERATOR")
    assert describe_environment(world_size=1)["devices"] == ["NVIDIA H200"] * 2


@pytest.mark.parametrize(
    ("arguments", "stays"),
    [
        (["tests"], True),
        (["tests/unit/test_weights.py::test_x", "tests/gpu"], True),
        (["tests/gpu_not"], True),
        (["tests/gpu"], False),
        (["tests/gpu/test_attention.py::test_x[a::b]", "tests/gpu/"], False),
    ],
)
def test_tests_stay_on_the_cpu_except_those_of_gpus(
    arguments: list[str], stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    conftest.pytest_configure(SimpleNamespace(invocation_params=SimpleNamespace(dir=REPOSITORY), args=arguments))
    devices = os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("DS_ACCELERATOR")
    assert devices == (("", "cpu") if stays else ("0,1", None))


def test_processes_of_tests_see_no_gpu() -> None:
    code = "import os; print([os.environ.get(name) for name in ('CUDA_VISIBLE_DEVICES', 'DS_ACCELERATOR')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['', 'cpu']"


@pytest.mark.parametrize(
    ("on_gpu", "num_cores", "variables", "num_threads"),
    [
        # A node has 32 cores for 8 ranks, all of which the launcher may use; a rank is bound to those of its GPU.
        (False, 16, {}, 4),
        (False, 4, {}, 4),
        (False, 2, {}, 2),
        # An optimizer offloaded from a GPU has its share of the cores.
        (True, 32, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "run"}, 4),  # torchrun's own choice
        (True, 32, {}, 4),
        (True, 32, {"OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "run"}, None),
        (True, 32, {"OMP_NUM_THREADS": "1"}, None),
        (False, 32, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "run"}, None),
    ],
)
def test_ranks_share_the_cores_of_their_node(
    on_gpu: bool, num_cores: int, variables: dict[str, str], num_threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables | {"LOCAL_WORLD_SIZE": "8"}).items():
        monkeypatch.setenv(name, value)
    chosen: list[int] = []
    monkeypatch.setattr(process_group, "uses_gpu", lambda: on_gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(num_cores if process == 0 else 32)))
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    process_group.share_cores_among_ranks()
    assert chosen == ([] if num_threads is None else [num_threads])


def test_supervised_tokens_are_selected_without_asking_the_device() -> None:
    """A fake tensor has no values: whatever the host would read from a device, and wait for, is an error."""
    hidden = torch.randn(2, 5, 3)
    targets = torch.tensor([[7, IGNORED_LABEL, 3, 4, IGNORED_LABEL], [IGNORED_LABEL, IGNORED_LABEL, 1, 2, 0]])
    supervised, supervised_targets = supervised_tokens(hidden, targets)
    assert torch.equal(supervised, hidden[targets != IGNORED_LABEL])
    assert supervised_targets.tolist() == [7, 3, 4, 1, 2, 0]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(hidden)
    assert supervised_tokens(fake, targets)[0].shape == (6, 3)


def test_copies_to_a_gpu_use_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, copies = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **options: copies.append(options) or tensor)
    batches.to_device(torch.zeros(3), torch.device("cuda", 0))
    assert len(pinned) == 1 and copies == [{"non_blocking": True}]
    batches.to_device(torch.zeros(3), torch.device("cpu"))
    assert len(pinned) == 1


def test_no_requirement_replaces_the_torch_of_an_image() -> None:
    """torch's wheels for GPUs name their triton exactly: another one brings another torch."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    listed = sum(project["optional-dependencies"].values(), project["dependencies"])
    assert not [name for name in listed if re.match(r"(torch|triton|transformers)==", name)]
