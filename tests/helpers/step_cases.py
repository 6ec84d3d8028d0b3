"""Steps of every method and estimator, for tests of how a step runs on its device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.helpers import step_runs, tiny
from tests.helpers.parity import keep_some
from tests.helpers.soak import IS_SOAK
from vcore_ds.config.schema import Recipe
from vcore_ds.data.batches import StepBatches
from vcore_ds.engine.zero3 import Engine, build_optimizer
from vcore_ds.training.step_metrics import StepMetrics
from vcore_ds.utility.estimators import Estimator

VARIANCE = {"temperature": 0.1, "alpha": "variance", "alpha_cap": None}
"""With a temperature, weighting is one pass; the search for a KL budget takes a number of passes that depends on the
utilities."""

CASES: dict[str, dict[str, Any]] = {
    "sft": dict(method={"name": "sft"}),
    "sft, one reduction a step": dict(
        method={"name": "sft"}, engine={"deepspeed_config": "none", "coalesce_gradient_reduction": True}
    ),
    "dft": dict(method={"name": "dft"}),
    "random": dict(method={"name": "random"}),
    "iw_sft, LoRA": dict(method={"name": "iw_sft"}, lora={"rank": 4, "alpha": 8}),
    "vcore, jvp": dict(method=VARIANCE, probe={"direction": "sgd", "clip": None}),
    "vcore, jvp, LoRA": dict(method=VARIANCE, lora={"rank": 4, "alpha": 8}),
    "vcore, jvp, Adam's direction, clipped": dict(method=VARIANCE, probe={"direction": "adam", "clip": 0.01}),
    "vcore, jvp, fused": dict(method=VARIANCE, utility={"fused": True}),
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
"""Case -> sections of its recipe."""

TESTED = [
    name
    for name in CASES
    if IS_SOAK
    or name
    in (
        "sft",
        "iw_sft, LoRA",
        "vcore, jvp, Adam's direction, clipped",
        "vcore, jvp, fused",
        "vcore, finite difference, stochastic rounding, bf16",
    )
]
"""Names of the cases that every run of the tests includes; `make soak` includes all."""


@dataclass(frozen=True)
class Steps:
    """An engine with activation checkpointing, with the recipe and estimator of its steps."""

    recipe: Recipe
    engine: Engine
    estimator: Estimator

    def take(self) -> StepMetrics:
        """Take a step, always on the same data: two micro-batches and, with a direction, two of the probe."""
        probe = step_runs.deal(tiny.make_batch(4, seed=100), 1) if self.estimator.direction is not None else []
        main = tiny.make_batch(4)
        if self.recipe.method.name == "random":
            keep_some(main)
        batches = StepBatches(step_runs.deal(main, 1), probe)
        return step_runs.train_step(self.engine, self.recipe, batches, self.estimator)


@contextmanager
def steps(case: str, *, num_layers: int, overlap: bool) -> Iterator[Steps]:
    """An engine whose layers are prefetched, and not kept gathered for reuse. `overlap`: DeepSpeed's `overlap_comm`."""
    recipe = step_runs.make_recipe(**CASES[case])
    config = tiny.deepspeed_config(bf16=recipe.model.precision == "bf16", gradient_clipping=1.0)
    config["zero_optimization"] |= {
        "overlap_comm": overlap,
        "reduce_bucket_size": 20_000,
        "stage3_prefetch_bucket_size": 20_000,
        "stage3_max_reuse_distance": 0,
    }
    config["timers"] = {"throughput": {"enabled": False}}  # as vcore_ds.planning.deepspeed_json.deepspeed_config does
    model = tiny.token_loss_model(lora=recipe.lora is not None, checkpointing=True, num_hidden_layers=num_layers)
    coalesce = recipe.engine.coalesce_gradient_reduction is True
    engine = Engine(model, build_optimizer(model, recipe.optimizer), config, coalesce_gradient_reduction=coalesce)
    try:
        yield Steps(recipe, engine, step_runs.make_estimator(recipe, engine))
    finally:
        engine.close()
