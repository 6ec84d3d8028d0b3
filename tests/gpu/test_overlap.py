"""Steps with all-gathers and reduce-scatters on separate streams (`overlap_comm`), on two GPUs or the only one.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.gpu.test_overlap on FILE

runs the steps and writes their measurements. `tests/dist/test_overlap.py` tests the ordering without a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.commands import REPOSITORY
from tests.helpers.step_cases import CASES, steps
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import start_process_group

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA: overlap_comm, its races are untested on a GPU"),
]

MEASURED = ("loss", "grad_norm")


def main(overlap: bool, file: Path) -> None:
    start_process_group(timeout_minutes=5)
    measured = {}
    for case in CASES:
        with steps(case, num_layers=6, overlap=overlap) as run:
            values = [run.take().values for _ in range(3)]
        measured[case] = [[step[name] for name in MEASURED] for step in values]
    if layout.is_first():
        file.write_text(json.dumps(measured))


def run(overlap: bool, file: Path, sanitizer: bool) -> dict[str, list[list[float]]]:
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


def test_steps_are_the_same_on_one_stream(tmp_path: Path) -> None:
    overlapping = run(True, tmp_path / "on.json", sanitizer=False)
    one_stream = run(False, tmp_path / "off.json", sanitizer=False)
    for case in CASES:
        # An all-gather of stale or half-written parameters changes losses in the first digits.
        tolerance = 1e-2 if "bf16" in case else 1e-4
        for measured, expected in zip(overlapping[case], one_stream[case], strict=True):
            assert measured == pytest.approx(expected, rel=tolerance), case


def test_pytorchs_sanitizer_finds_no_race(tmp_path: Path) -> None:
    run(True, tmp_path / "sanitized.json", sanitizer=True)


if __name__ == "__main__":
    main(sys.argv[1] == "on", Path(sys.argv[2]))
