"""Steps of every method and estimator on a GPU, with NCCL, against those on the CPU."""

from typing import Any

import pytest

from tests.helpers.device_runs import largest_difference, measure_on_both_devices
from tests.helpers.step_cases import CASES


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return measure_on_both_devices("steps", tmp_path_factory.mktemp("steps"))


@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_that_of_the_cpu(measured: dict[str, dict[str, Any]], case: str) -> None:
    pairs = zip(measured["cuda"][case], measured["cpu"][case], strict=True)
    differences = [largest_difference(*pair) for pair in pairs]
    print(f"{case}: relative differences of three steps {[f'{difference:.1e}' for difference in differences]}")
    # Stochastic rounding draws other numbers on another device.
    assert max(differences) < (0.1 if "bf16" in case else 1e-3)
