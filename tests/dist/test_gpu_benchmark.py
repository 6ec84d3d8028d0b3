"""The benchmark for GPUs, on a CPU and with a tiny shape: that it runs what it says, and what it writes."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import gpu
from tests.helpers import step_runs
from tests.helpers.ranks import run_ranks
from vcore_ds.engine.zero3 import Engine
from vcore_ds.train.step_metrics import StepRecorder

pytestmark = pytest.mark.dist

ROUNDS, ROWS = 1, 1
FORWARDS = {
    "sft": {"main": 1},
    "jvp": {"probe": 1, "utility": 1, "main": 1},
    "jvp, fused": {"probe": 1, "main": 1},
    "finite difference": {"probe": 1, "utility": 1, "main": 1},
}
"""Of the model, in each part of a step."""


class CountingRecorder(StepRecorder):
    """Knows the forwards of each part."""

    def __init__(self, engine: Engine):
        super().__init__(engine.device)
        self.forwards: Counter[str] = Counter()
        self._part = "outside"
        self._hook = engine.module.register_forward_hook(lambda *_: self.forwards.update([self._part]))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._part = name
        with super().part(name):
            yield
        self._part = "outside"
        if name == "step":
            self._hook.remove()


def run(folder: str) -> list[tuple[Any, dict[str, int]]]:
    """The recipe of each step and its forwards."""
    found, train_step = [], step_runs.train_step

    def counted(engine: Engine, recipe: Any, *arguments: Any) -> Any:
        recorder = CountingRecorder(engine)
        metrics = train_step(engine, recipe, *arguments, recorder=recorder)
        found.append((recipe, dict(recorder.forwards)))
        return metrics

    step_runs.train_step = counted
    sizes = ["--layers", "1", "--rounds", str(ROUNDS), "--rows", str(ROWS)]
    sys.argv = ["gpu", "--shape", "tiny", *sizes, "--output", folder]
    gpu.main()
    return found


def run_without_room() -> dict:
    gpu.available_memory_bytes = lambda: 10**6
    return gpu.measure_steps(gpu.SHAPES["tiny"], 128, 1, 1)[0]


def test_it_runs_and_writes_a_table(tmp_path: Path) -> None:
    (steps,) = run_ranks(run, 1, str(tmp_path))
    assert len(steps) == (ROUNDS + 1) * len(gpu.METHODS)
    for name in gpu.METHODS:
        own = [forwards for recipe, forwards in steps if recipe == gpu.make_recipe(name)]
        assert own == [FORWARDS[name]] * (ROUNDS + 1), name
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert list(found["steps"]) == list(gpu.METHODS)
    for name, row in found["steps"].items():
        assert row["seconds"] > 0 and row["tokens_per_second_per_rank"] > 0 and row["over_sft"] > 0, name
        assert row["peak_memory_bytes"] > 0
        parts = [row[f"seconds_{part}"] for part in ("probe", "utility", "main", "step")]
        assert all(seconds >= 0 for seconds in parts)
    assert found["fidelity_in_bf16"]["spearman"] > 0.99
    assert {"date", "device", "versions", "commit"} <= set(found) and found["sizes"]["num_hidden_layers"] == 1
    text = (tmp_path / "gpu.md").read_text()
    ways = ("plain forward", "with tangents, in blocks", "with tangents, beside the plain forward")
    assert all(found["attention"][way] > 0 for way in ways)
    assert all(f"| {name} | " in text for name in (*gpu.METHODS, *ways))
    assert found["date"] in text and "Spearman" in text


def test_what_has_no_room_is_skipped_with_a_message() -> None:
    (found,) = run_ranks(run_without_room, 1)
    assert set(found) == set(gpu.METHODS)
    assert all("GiB by the estimate" in row["skipped"] for row in found.values())
