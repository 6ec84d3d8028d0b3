"""Steps with all-gathers and reduce-scatters on separate streams (`overlap_comm`), on two GPUs or the only one.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.gpu.test_overlap on FILE

runs the steps and writes their measurements. `tests/dist/test_overlap.py` tests the ordering without a GPU.
"""

import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.commands import REPOSITORY
from tests.helpers.packages import path_in_package
from tests.helpers.step_cases import CASES, steps
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import start_process_group

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA: overlap_comm, its races and host waits are untested on a GPU"
    ),
]

NUM_LAYERS = (2, 6)
MEASURED = ("loss", "grad_norm")


def measure(case: str, num_layers: int, overlap: bool) -> dict[str, Any]:
    """Measurements of three steps, and places in the package where the host waited in the third."""
    with steps(case, num_layers=num_layers, overlap=overlap) as run:
        measured = [run.take().values for _ in range(2)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            measured.append(run.take().values)
            torch.cuda.set_sync_debug_mode("default")
    waits = Counter(
        f"{Path(warning.filename).name}:{warning.lineno}"
        for warning in caught
        if "synchronizing CUDA operation" in str(warning.message)
        and path_in_package(warning.filename).startswith("vcore_ds/")
    )
    return {"measured": [[values[name] for name in MEASURED] for values in measured], "waits": dict(waits)}


def main(overlap: bool, file: Path) -> None:
    start_process_group(timeout_minutes=5)
    measured = {case: [measure(case, num_layers, overlap) for num_layers in NUM_LAYERS] for case in CASES}
    if layout.is_first():
        file.write_text(json.dumps(measured))


def run(overlap: bool, file: Path, sanitizer: bool) -> dict[str, list[dict[str, Any]]]:
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    if sanitizer:
        environment["TORCH_CUDA_SANITIZER"] = "1"
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={min(2, torch.cuda.device_count())}"]
    arguments = ["tests.gpu.test_overlap", "on" if overlap else "off", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", *arguments],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data race" not in done.stderr, done.stderr
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    return run(True, tmp_path_factory.mktemp("steps") / "on.json", sanitizer=False)


@pytest.mark.parametrize("case", CASES)
def test_more_layers_make_the_host_wait_no_more_often(overlapped, case: str) -> None:
    few, many = overlapped[case]
    assert few["waits"] and few["waits"] == many["waits"]


def test_steps_are_the_same_on_one_stream(overlapped, tmp_path: Path) -> None:
    one_stream = run(False, tmp_path / "off.json", sanitizer=False)
    for case in CASES:
        # An all-gather of stale or half-written parameters changes losses in the first digits.
        tolerance = 1e-2 if "bf16" in case else 1e-4
        for overlapping, expected in zip(overlapped[case], one_stream[case], strict=True):
            for a, b in zip(overlapping["measured"], expected["measured"], strict=True):
                assert a == pytest.approx(b, rel=tolerance), case


def test_pytorchs_sanitizer_finds_no_race(tmp_path: Path) -> None:
    run(True, tmp_path / "sanitized.json", sanitizer=True)


if __name__ == "__main__":
    main(sys.argv[1] == "on", Path(sys.argv[2]))
