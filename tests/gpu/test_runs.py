"""Runs on a GPU: their losses equal those of the CPU, and a killed run resumes to the same result."""

from typing import Any

import pytest

from tests.helpers.device_runs import RUNS, largest_difference, measure_on_both_devices


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return measure_on_both_devices("runs", tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", RUNS)
def test_losses_equal_those_of_the_cpu(measured: dict[str, dict[str, Any]], name: str) -> None:
    on_gpu, on_cpu = (measured[kind][name]["straight"] for kind in ("cuda", "cpu"))
    differences = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(on_gpu, on_cpu, strict=True)]
    print(f"{name}: losses differ by {max(differences):.1e} at most")
    assert max(differences) < (1e-3 if "fp32" in name else 1e-2)


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_resumes_to_the_same_result(measured: dict[str, dict[str, Any]], name: str) -> None:
    """Bit for bit on a CPU; on a GPU some sums have no fixed order (docs/gpu.md)."""
    straight, resumed = (measured["cuda"][name][kind] for kind in ("straight", "resumed"))
    differences = [largest_difference(*pair) for pair in zip(resumed, straight, strict=True)]
    print(f"{name}: relative differences after resuming {[f'{difference:.1e}' for difference in differences]}")
    assert max(differences) < (1e-4 if "fp32" in name else 1e-2)
