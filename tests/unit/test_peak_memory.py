"""The peak memory of a phase, as the metrics have it."""

import os
import subprocess
import sys

import torch

from vcore_ds.distributed.device import PeakMemory

SCRIPT = """
import torch
from vcore_ds.distributed.device import PeakMemory
MIB = 2**20
memory = PeakMemory()
large = torch.ones(100 * MIB)  # 400 MiB, resident because they are written to
del large
highest = memory.process_bytes()
memory.start_phase()
small = torch.ones(25 * MIB)
first = memory.phase_bytes()
del small
memory.start_phase()
second = memory.phase_bytes()
assert first is not None and second is not None
assert highest - first > 200 * MIB and 50 * MIB < first - second < 150 * MIB, (highest, first, second)
assert memory.process_bytes() >= highest
"""


def test_a_phase_counts_its_own_peak_and_the_process_the_highest() -> None:
    # In a separate process: in one that has freed memory before, new tensors may use memory that is resident already.
    # The higher peak of the process that starts it must not be counted.
    highest_here = torch.ones(200 * 2**20)
    del highest_here
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_phase_is_not_counted_where_the_kernel_does_not_offer_it(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("vcore_ds.distributed.device.CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    memory = PeakMemory()
    memory.start_phase()
    assert memory.phase_bytes() is None and memory.process_bytes() > 0
