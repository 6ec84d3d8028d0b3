"""The step on 2 ranks of ZeRO-3 against the plain single-process reference, quantity by quantity."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.data import Batch, StepBatches

pytestmark = pytest.mark.dist


@dataclass(frozen=True)
class Case:
    lora: bool = False
    tied: bool = False
    checkpointing: bool = False
    persistence_threshold: int = 0
    coalesce: bool = False
    num_main: int = 8
    num_probe: int = 4
    without_tokens: tuple[int, ...] = ()
    """Rows of the main batch whose tokens are not supervised."""
    batches_per_utility_pass: int = 1
    probe_every: int = 1
    sections: dict[str, Any] = field(default_factory=dict)


# A difference of two fp32 losses carries rounding of 1e-7 / epsilon by its nature: compared where that is small. How
# it converges to the derivative as epsilon falls is tested in fp64 (tests/unit/test_estimators.py).
FINITE_DIFFERENCE = {"utility": {"estimator": "finite_difference", "epsilon": 5.0}}
CASES = {
    "full": Case(),
    "full, tied": Case(tied=True, persistence_threshold=100_000),
    "full, checkpointed": Case(checkpointing=True, coalesce=True),
    "full, tied, checkpointed, merged passes": Case(tied=True, checkpointing=True, batches_per_utility_pass=2),
    "lora": Case(lora=True, coalesce=True),
    "lora, tied, checkpointed": Case(lora=True, tied=True, checkpointing=True, persistence_threshold=100_000),
    "lora, checkpointed, merged passes": Case(lora=True, checkpointing=True, batches_per_utility_pass=2),
    "finite difference": Case(sections=FINITE_DIFFERENCE),
    "finite difference, lora, checkpointed": Case(lora=True, checkpointing=True, sections=FINITE_DIFFERENCE),
    "token normalization, fixed temperature": Case(
        sections={"method": {"temperature": 0.7, "normalization": "token", "alpha_cap": None}}
    ),
    "alpha none, clipped": Case(
        sections={
            "method": {"kl_budget": 0.3, "alpha": "none"},
            "optimizer": {"learning_rate": step_runs.LEARNING_RATE, "gradient_clipping": 0.1},
        }
    ),
    "sgd": Case(sections={"optimizer": {"learning_rate": step_runs.LEARNING_RATE, "name": "sgd"}}),
    "sft": Case(sections={"method": {"name": "sft"}}),
    "sft, token normalization": Case(sections={"method": {"name": "sft", "normalization": "token"}}),
    "alpha variance": Case(sections={"method": {"kl_budget": 0.3, "alpha": "variance", "alpha_cap": None}}),
    "alpha variance, micro-batches, capped": Case(
        sections={
            "method": {"kl_budget": 0.3, "alpha": "variance", "alpha_scope": "micro_batch"},
            "batch": {"micro_batch_size_per_rank": 2},
        }
    ),
    "alpha effective sample size, lora": Case(
        lora=True, sections={"method": {"kl_budget": 0.3, "alpha": "effective_sample_size"}}
    ),
    "released code's reading": Case(
        without_tokens=(1, 3, 5, 7),
        sections={
            "method": {"temperature": 0.5, "normalization": "token", "alpha_scope": "micro_batch"},
            "probe": {"clip": 1.0},
        },
    ),
    "direction adam": Case(sections={"probe": {"direction": "adam", "clip": 1.0}}),
    "direction adam, lora, one probe for two steps": Case(
        lora=True, probe_every=2, sections={"probe": {"direction": "adam"}}
    ),
    "a rank without probe sequences": Case(num_probe=1),
    "a rank without supervised tokens": Case(without_tokens=(1, 3, 5, 7)),
    "an idle micro-batch": Case(num_main=5),
}


def run_case(case: Case) -> dict[str, float]:
    """Worst deviation of each quantity over 3 steps."""
    recipe = step_runs.recipe(**case.sections)
    model = tiny.token_loss_model(lora=case.lora, tied=case.tied, checkpointing=case.checkpointing)
    plain = tiny.qwen3(tied=case.tied)
    reference = step_runs.reference_of(tiny.with_lora(plain) if case.lora else plain, recipe)
    engine = step_runs.make_engine(
        model, recipe, persistence_threshold=case.persistence_threshold, coalesce=case.coalesce
    )
    estimator = step_runs.make_estimator(recipe, engine, case.batches_per_utility_pass)
    worst = dict.fromkeys(("utilities", "weights", "alpha", "gradient", "parameters", "loss"), 0.0)
    for k in range(3):
        main, probe = make_batch(case, 10 + k), tiny.rows(case.num_probe, seed=50 + k)
        if k % case.probe_every != 0:
            probe = None
        dealt_probe = [] if probe is None else step_runs.deal(probe, 2)
        dealt = StepBatches(step_runs.deal(main, 2), dealt_probe)
        recorded = step_runs.Recorder(engine)
        metrics = step_runs.train_step(engine, recipe, dealt, estimator, recorded)
        own_alpha = recipe.method.alpha_scope == "micro_batch"
        groups = step_runs.micro_batch_rows(case.num_main, 2) if own_alpha else None
        expected = reference.step(main, probe, groups=groups, **step_runs.reference_options(recipe))

        def note(quantity: str, deviation: float) -> None:
            assert deviation == deviation, f"{quantity} is nan"
            worst[quantity] = max(worst[quantity], deviation)

        for i, (utilities, weights) in recorded.by_sequence(dealt.main).items():
            if len(weights) == 0:
                continue
            note("weights", step_runs.relative_error(weights, expected["weights"][i]))
            if expected["utilities"] is not None:
                note("utilities", step_runs.relative_error(utilities, expected["utilities"][i]))
        note("alpha", abs(metrics.values["alpha"] - expected["alpha"]))
        note("loss", abs(metrics.values["loss"] - expected["loss"]))
        note(
            "gradient",
            step_runs.relative_error(
                torch.cat([recorded.gradient[name].flatten() for name in expected["gradient"]]),
                torch.cat([g.flatten() for g in expected["gradient"].values()]),
            ),
        )
        for name, parameter in step_runs.whole_parameters(engine).items():
            note("parameters", float((parameter - reference.trained[name]).abs().max()))
    engine.close()
    return worst


def make_batch(case: Case, seed: int) -> Batch:
    batch = copy.copy(tiny.rows(case.num_main, seed=seed))
    for row in case.without_tokens:
        batch.labels[row] = -100
    return batch


def run_all_cases() -> dict[str, dict[str, float]]:
    return {name: run_case(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def deviations() -> list[dict[str, dict[str, float]]]:
    return run_ranks(run_all_cases, 2)


@pytest.mark.parametrize("name", CASES)
def test_step_equals_reference(deviations, name):
    for rank, of_rank in enumerate(deviations):
        worst = of_rank[name]
        print(f"rank {rank}: " + "  ".join(f"{quantity} {value:.1e}" for quantity, value in worst.items()))
        for quantity in ("utilities", "weights", "alpha", "gradient", "loss"):
            assert worst[quantity] < 1e-5, quantity
        assert worst["parameters"] < 1e-6
