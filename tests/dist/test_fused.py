"""One forward for losses and utilities against two: what it gives, what it gathers and what it holds."""

from typing import Any

import pytest
import torch

from tests.helpers import step_runs, tiny
from tests.helpers.allocations import Allocations
from tests.helpers.ranks import run_ranks
from vcore_ds.data import StepBatches
from vcore_ds.setup import build_estimator
from vcore_ds.step import take_direction
from vcore_ds.utility import can_fuse

pytestmark = pytest.mark.dist

SIZES = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=4, vocab_size=128)
NUM_TOKENS = 256


def main_pass(lora: bool, precision: str, fused: bool | None) -> dict[str, Any]:
    """One micro-batch forwards and backwards. `fused` None: without utilities."""
    recipe = step_runs.recipe(model={"path": "none", "precision": precision}, utility={"fused": bool(fused)})
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    engine = step_runs.make_engine(tiny.token_loss_model(lora=lora, checkpointing=True, dtype=dtype, **SIZES), recipe)
    estimator = build_estimator(recipe, engine)
    rows = tiny.rows(8, num_tokens=NUM_TOKENS)
    batch = step_runs.deal(rows, 4)[0]
    take_direction(estimator.direction, recipe, step_runs.deal(tiny.rows(4, num_tokens=NUM_TOKENS, seed=9), 2))
    found: dict[str, Any] = {"can_fuse": can_fuse(engine)}
    for _ in range(2):  # DeepSpeed learns the order of the modules in the first
        with engine.accumulation(1), Allocations() as allocations:
            if fused is None:
                losses, utilities = engine.token_losses(batch), None
            else:
                losses, utilities = estimator.begin([batch])(0)
            weights = 1.0 if utilities is None else torch.softmax(0.3 * utilities, 0)
            engine.backward((weights * losses).sum())
        found |= {"peak": allocations.peak_bytes, "losses": losses.detach(), "utilities": utilities}
        found["gradient"] = torch.cat([g.flatten().float() for g in engine.shards.gradients()])
    # What follows is as before: nothing of the dual forward stays.
    assert all("weight" not in module.__dict__ and "forward" not in module.__dict__ for module in engine.module.modules())
    metrics = step_runs.train_step(engine, recipe, StepBatches([batch], []), estimator)
    found["loss"] = metrics.values["loss"]
    engine.close()
    return found


def run_all() -> dict[tuple[bool, str], dict[bool | None, dict[str, Any]]]:
    return {
        (lora, precision): {fused: main_pass(lora, precision, fused) for fused in (True, False, None)}
        for lora in (False, True)
        for precision in ("fp32", "bf16")
    }


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return run_ranks(run_all, 2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_one_forward_gives_what_two_give(found, lora: bool, precision: str) -> None:
    for of_rank in found:
        one, two, sft = (of_rank[lora, precision][fused] for fused in (True, False, None))
        assert one["can_fuse"]
        utilities, gradient = (step_runs.relative_error(one[key], two[key]) for key in ("utilities", "gradient"))
        peaks = {name: passes["peak"] / 2**10 for name, passes in (("fused", one), ("separate", two), ("sft", sft))}
        print(f"utilities {utilities:.1e}, gradient {gradient:.1e}, " + str({k: round(v) for k, v in peaks.items()}))
        assert utilities <= (1e-6 if precision == "fp32" else 1e-2)
        assert gradient <= (1e-5 if precision == "fp32" else 3e-2)
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5 if precision == "fp32" else 1e-2)
        assert peaks["fused"] <= 1.05 * peaks["sft"]
