"""The benchmark for GPUs, on a CPU with a tiny shape: the passes that it runs and the files that it writes."""

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
from vcore_ds.training.step_metrics import StepRecorder

pytestmark = pytest.mark.dist

ROUNDS, PACKS = 1, 1
FORWARDS = {
    "sft": {"main": 1},
    "jvp": {"probe": 1, "utility": 1, "main": 1},
    "jvp, fused": {"probe": 1, "main": 1},
    "finite difference": {"probe": 1, "utility": 1, "main": 1},
}
"""Forwards of the model in each part of a step."""


class CountingRecorder(StepRecorder):
    """Counts the forwards in each part of a step."""

    def __init__(self, engine: Engine):
        super().__init__(engine.device)
        self.forwards: Counter[str] = Counter()
        self._part = "outside"
        self._hook = engine.module.register_forward_hook(lambda *_: self.forwards.update([self._part]))

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        self._part = name
        with super().measuring(name):
            yield
        self._part = "outside"
        if name == "step":
            self._hook.remove()


def run_benchmark(folder: str) -> tuple[list[tuple[Any, dict[str, int]]], dict]:
    """Run it; returns the recipe and the forwards of each step, and its steps where there is no memory."""
    steps, train_step = [], step_runs.train_step

    def train_and_count(engine: Engine, recipe: Any, *arguments: Any) -> Any:
        recorder = CountingRecorder(engine)
        metrics = train_step(engine, recipe, *arguments, recorder=recorder)
        steps.append((recipe, dict(recorder.forwards)))
        return metrics

    step_runs.train_step = train_and_count
    sizes = ["--layers", "1", "--rounds", str(ROUNDS), "--packs", str(PACKS)]
    sys.argv = ["gpu", "--shape", "tiny", *sizes, "--output", folder]
    gpu.main()
    gpu.available_memory_bytes = lambda: 10**6
    return steps, gpu.measure_steps(gpu.SHAPES["tiny"], 128, 1, 1)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("benchmark")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> tuple[list[tuple[Any, dict[str, int]]], dict]:
    return run_ranks(run_benchmark, 1, str(folder))[0]


def test_the_benchmark_measures_every_method_and_writes_a_table(outcomes: tuple[Any, dict], folder: Path) -> None:
    steps, _ = outcomes
    assert len(steps) == (ROUNDS + 1) * len(gpu.METHODS)
    for name in gpu.METHODS:
        counts = [forwards for recipe, forwards in steps if recipe == gpu.make_recipe(name)]
        assert counts == [FORWARDS[name]] * (ROUNDS + 1), name
    results = json.loads((folder / "gpu.json").read_text())
    assert list(results["steps"]) == list(gpu.METHODS)
    for name, row in results["steps"].items():
        assert row["seconds"] > 0 and row["tokens_per_second_per_rank"] > 0 and row["over_sft"] > 0, name
        assert row["peak_memory_bytes"] > 0
        parts = [row[f"seconds_{part}"] for part in ("probe", "utility", "main", "step")]
        assert all(seconds >= 0 for seconds in parts)
    assert results["fidelity_in_bf16"]["spearman"] > 0.99
    assert {"date", "device", "versions", "commit"} <= set(results) and results["sizes"]["num_hidden_layers"] == 1
    text = (folder / "gpu.md").read_text()
    ways = ("plain forward", "with tangents, in blocks", "with tangents, beside the plain forward")
    assert all(results["attention"][way] > 0 for way in ways)
    assert all(f"| {name} | " in text for name in (*gpu.METHODS, *ways))
    assert results["date"] in text and "spearman" in text


def test_methods_without_enough_memory_are_skipped_with_a_message(outcomes: tuple[Any, dict]) -> None:
    _, results = outcomes
    assert set(results) == set(gpu.METHODS)
    assert all("GiB by the estimate" in row["skipped"] for row in results.values())
