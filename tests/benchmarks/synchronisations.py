"""How often the host would wait for the GPU in one step, by method and number of layers, on one CPU rank.

    python -m tests.benchmarks.synchronisations

`tests/dist/test_synchronisations.py` asserts that the numbers do not grow with the number of layers.
"""

from typing import Any

from tests.helpers import step_runs, tiny
from tests.helpers.synchronisations import Synchronisations
from vcore_ds.data import StepBatches
from vcore_ds.distributed.process_group import start_process_group

VARIANCE = {"temperature": 0.1, "alpha": "variance", "alpha_cap": None}
"""A temperature takes one pass, where the search for a KL budget takes as many as the utilities need."""

METHODS: dict[str, dict[str, Any]] = {
    "sft": dict(method={"name": "sft"}),
    "dft": dict(method={"name": "dft"}),
    "vcore, jvp": dict(method=VARIANCE, probe={"direction": "sgd", "clip": None}),
    "vcore, jvp, Adam's direction, clipped": dict(method=VARIANCE, probe={"direction": "adam", "clip": 0.01}),
    "vcore, finite difference": dict(
        method=VARIANCE,
        utility={"estimator": "finite_difference", "epsilon": 0.1},
        probe={"direction": "sgd", "clip": None},
    ),
    "vcore, finite difference, stochastic rounding, bf16": dict(
        model={"path": "none", "precision": "bf16"},
        method=VARIANCE,
        utility={"estimator": "finite_difference", "epsilon": 0.1, "rounding": "stochastic"},
        probe={"direction": "adam", "clip": 0.01},
    ),
}
"""The methods of a step that read or write shards, each by its sections of a recipe."""


def count(sections: dict[str, Any], num_layers: int) -> tuple[dict[str, int], int]:
    """(Synchronisations of the third step by kind, number of trained parameters). In the first two, DeepSpeed compares
    its order of parameters between ranks."""
    recipe = step_runs.recipe(**sections)
    engine = step_runs.make_engine(tiny.token_loss_model(num_hidden_layers=num_layers), recipe)
    estimator = step_runs.make_estimator(recipe, engine)
    probe = step_runs.deal(tiny.rows(4, seed=100), 2) if estimator.direction is not None else []
    batches = StepBatches(step_runs.deal(tiny.rows(4), 2), probe)
    for _ in range(2):
        step_runs.train_step(engine, recipe, batches, estimator)
    with Synchronisations() as synchronisations:
        step_runs.train_step(engine, recipe, batches, estimator)
    num_parameters = len(engine.trainable)
    engine.close()
    return dict(synchronisations.counts), num_parameters


def main() -> None:
    start_process_group(timeout_minutes=30)
    print(f"{'':<54}{'2 layers':>12}{'6 layers':>12}")
    for name, sections in METHODS.items():
        found = [count(sections, num_layers) for num_layers in (2, 6)]
        print(f"{name:<54}" + "".join(f"{sum(counts.values()):>12}" for counts, _ in found))
        for kind in sorted({kind for counts, _ in found for kind in counts}):
            print(f"    {kind:<50}" + "".join(f"{counts.get(kind, 0):>12}" for counts, _ in found))
        print(f"    {'parameters':<50}" + "".join(f"{num_parameters:>12}" for _, num_parameters in found), flush=True)


if __name__ == "__main__":
    main()
