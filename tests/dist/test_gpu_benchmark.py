"""The benchmark for GPUs, on a CPU and with a tiny shape: that it runs, and what it writes."""

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks import gpu
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


def run(folder: str) -> None:
    sys.argv = ["gpu", "--shape", "tiny", "--layers", "1", "--rounds", "1", "--rows", "1", "--output", folder]
    gpu.main()


def run_without_room() -> dict:
    gpu.available_memory_bytes = lambda: 10**6
    return gpu.measure_steps(gpu.SHAPES["tiny"], 128, 1, 1)[0]


def test_it_runs_and_writes_a_table(tmp_path: Path) -> None:
    run_ranks(run, 1, str(tmp_path))
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert list(found["steps"]) == list(gpu.METHODS)
    for name, row in found["steps"].items():
        assert row["seconds"] > 0 and row["tokens_per_second_per_rank"] > 0 and row["over_sft"] > 0, name
        assert row["peak_memory_bytes"] > 0
        assert (row["seconds_utility"] > 0.001) == (name in ("jvp", "finite difference"))
    assert found["fidelity_in_bf16"]["spearman"] > 0.99
    assert {"date", "device", "versions", "commit"} <= set(found) and found["sizes"]["num_hidden_layers"] == 1
    text = (tmp_path / "gpu.md").read_text()
    assert all(f"| {name} | " in text for name in (*gpu.METHODS, "plain forward", "with tangents, in blocks"))
    assert found["date"] in text and "Spearman" in text


def test_what_has_no_room_is_skipped_with_a_message() -> None:
    (found,) = run_ranks(run_without_room, 1)
    assert set(found) == set(gpu.METHODS)
    assert all("GiB by the estimate" in row["skipped"] for row in found.values())
