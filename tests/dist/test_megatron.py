"""Parallel layers: TP 2 x DP 2 against the Hugging Face model on one process, quantity by quantity."""

import pytest

from tests.helpers import step_runs
from tests.helpers.parity import Case
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

SGD = {"optimizer": {"learning_rate": step_runs.LEARNING_RATE, "name": "sgd", "gradient_clipping": None}}
CLIPPED = {"optimizer": {"learning_rate": step_runs.LEARNING_RATE, "name": "sgd", "gradient_clipping": 0.1}}
ADAM = {"optimizer": {"learning_rate": step_runs.LEARNING_RATE, "eps": 1e-3}}
SEPARATE = {"utility": {"fused": False}}
FINITE_DIFFERENCE = {"utility": {"estimator": "finite_difference", "epsilon": 5.0}}
CASES = {
    "sft": Case(sections={"method": {"name": "sft"}, **SGD}),
    "jvp": Case(sections=SGD),
}


def run_all() -> dict[str, dict[str, float]]:
    from tests.helpers.megatron import run_parallel_case
    from vcore_ds.distributed import layout

    layout.arrange(tensor=2)
    return {name: run_parallel_case(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict[str, float]]]:
    return run_ranks(run_all, 4)


@pytest.mark.parametrize("name", CASES)
def test_step_equals_reference(found, name):
    for rank, of_rank in enumerate(found):
        worst = of_rank[name]
        print(f"rank {rank}: " + "  ".join(f"{quantity} {value:.1e}" for quantity, value in worst.items()))
        for quantity in ("utilities", "weights", "alpha", "gradient", "loss", "norm"):
            assert worst[quantity] < 1e-5, quantity
        assert worst["parameters"] < 1e-6
        assert worst["drift"] == 0
