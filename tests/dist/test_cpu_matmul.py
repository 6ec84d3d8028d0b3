"""Complete steps in bf16 against the oracle in fp32, with the package's matrix multiplications for CPUs without bf16
instructions and with PyTorch's: each forced on the same CPU, and as this CPU has it."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.helpers.parity import Case, run_case
from tests.helpers.ranks import run_ranks
from tests.helpers.soak import soak
from vcore_ds.models import cpu_matmul

pytestmark = pytest.mark.dist

BF16 = {"model": {"path": "none", "precision": "bf16"}}
CASES = {
    "full, tied": Case(tied=True, sections=BF16),
    "full, checkpointed, separate passes": Case(checkpointing=True, sections={**BF16, "utility": {"fused": False}}),
    "lora, checkpointed": Case(lora=True, checkpointing=True, sections=BF16),
} | soak({"sft": Case(sections={**BF16, "method": {"name": "sft"}})})
BOUNDS = {"utilities": 0.08, "weights": 0.02, "alpha": 1e-3, "gradient": 0.03, "loss": 1e-3}
"""bf16 has 8 bits, a relative error of 0.004 for each rounding; a result has gone through several."""


def run_cases(names: Sequence[str]) -> tuple[bool, dict[str, dict[str, float]]]:
    """Run cases; returns whether this rank's kernels are replaced, and the deviations."""
    return cpu_matmul._replaced is not None, {name: run_case(CASES[name]) for name in names}


@pytest.fixture(scope="module")
def deviations() -> dict[str, list[Any]]:
    """Results of `run_cases` on each rank, by the value of the variable."""
    with pytest.MonkeyPatch.context() as patch:
        results: dict[str, list[Any]] = {}
        for value in ("fp32", "native"):
            patch.setenv(cpu_matmul.VARIABLE, value)
            results[value] = run_ranks(run_cases, 2, tuple(CASES))
    return results


def test_the_variable_chooses_the_kernels_on_every_rank(deviations: dict[str, list[Any]]) -> None:
    assert [is_replaced for is_replaced, _ in deviations["fp32"]] == [True, True]
    assert [is_replaced for is_replaced, _ in deviations["native"]] == [False, False]


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_the_oracles_as_closely_as_with_pytorchs_kernels(
    deviations: dict[str, list[Any]], name: str
) -> None:
    for (_, ours), (_, native) in zip(deviations["fp32"], deviations["native"], strict=True):
        print({quantity: f"{ours[name][quantity]:.2e} {native[name][quantity]:.2e}" for quantity in BOUNDS})
        for quantity, bound in BOUNDS.items():
            assert ours[name][quantity] < bound, quantity
            assert ours[name][quantity] < 1.5 * native[name][quantity] + 0.2 * bound, quantity
