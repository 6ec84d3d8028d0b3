"""Whole runs on a GPU: their losses are those of the CPU, and a run that was killed comes to the same end."""

from typing import Any

import pytest

from tests.helpers.device_runs import RUNS, largest_difference, measure_on_device


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    found = {kind: measure_on_device(kind, "runs", folder / kind) for kind in ("cuda", "cpu")}
    assert [found[kind]["device"] for kind in found] == list(found)
    return {kind: numbers["measured"] for kind, numbers in found.items()}


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_the_cpu(measured: dict[str, dict[str, Any]], name: str) -> None:
    on_gpu, on_cpu = (measured[kind][name]["straight"] for kind in ("cuda", "cpu"))
    differences = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(on_gpu, on_cpu, strict=True)]
    print(f"{name}: losses differ by {max(differences):.1e} at most")
    assert max(differences) < (1e-3 if "fp32" in name else 1e-2)


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_comes_to_the_same_end(measured: dict[str, dict[str, Any]], name: str) -> None:
    """To the last bit on a CPU; on a GPU some sums have no fixed order (docs/gpu.md)."""
    straight, resumed = (measured["cuda"][name][kind] for kind in ("straight", "resumed"))
    differences = [largest_difference(*pair) for pair in zip(resumed, straight, strict=True)]
    print(f"{name}: relative differences after resuming {[f'{difference:.1e}' for difference in differences]}")
    assert max(differences) < (1e-4 if "fp32" in name else 1e-2)
