"""The dtype in which ranks sum their gradients: DeepSpeed's `communication_data_type`."""

import pytest
import torch

from tests.helpers import step_runs, tiny
from tests.helpers.ranks import run_ranks
from vcore_ds.data.batches import Batch, idle_batch
from vcore_ds.distributed import layout
from vcore_ds.engine.zero3 import Engine, build_optimizer

pytestmark = pytest.mark.dist


def make_engine(precision: str, communication_data_type: str | None) -> Engine:
    recipe = step_runs.make_recipe(model={"path": "none", "precision": precision})
    # The same weights, those of bf16, in both precisions.
    model = tiny.token_loss_model(dtype=torch.bfloat16).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    config = tiny.deepspeed_config(bf16=precision == "bf16")
    if communication_data_type is not None:
        config["communication_data_type"] = communication_data_type
    return Engine(model, build_optimizer(model, recipe.optimizer), config)


def gradient(engine: Engine, batch: Batch) -> torch.Tensor:
    """This rank's shard of the reduced gradient, in fp64."""
    with engine.accumulation(1):
        engine.backward(engine.token_losses(batch).sum())
    return torch.cat(engine.shards.gradients()).double()


def deviations() -> dict[str, dict[str, float]]:
    """Relative distances of the reduced gradient, by the dtype of the reduction."""
    own = step_runs.deal(tiny.make_batch(4 * layout.size("shards")), 4)[0]
    whole = make_engine("fp32", None)
    in_fp32 = gradient(whole, own)
    whole.close()
    found: dict[str, dict[str, float]] = {}
    for dtype in (None, "fp32"):
        engine = make_engine("bf16", dtype)
        reduced = gradient(engine, own)
        # A sum with zeros is exact, so these are the gradients of single ranks as they go into the reduction.
        single = [
            gradient(engine, own if rank == layout.rank("shards") else idle_batch(0))
            for rank in range(layout.size("shards"))
        ]
        references = {"sum of the ranks' gradients": torch.stack(single).sum(0), "gradient in fp32": in_fp32}
        found[dtype or "default"] = {name: distance(reduced, reference) for name, reference in references.items()}
        engine.close()
    return found


def distance(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative 2-norm over all shards."""
    squares = [float((found - reference).square().sum()), float(reference.square().sum())]
    error, norm = layout.sum_over("shards", squares)
    return (error / norm) ** 0.5


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_an_fp32_reduction_is_exact_where_the_default_rounds(num_ranks: int) -> None:
    for found in run_ranks(deviations, num_ranks):
        print(found)
        of_sum = {dtype: errors["sum of the ranks' gradients"] for dtype, errors in found.items()}
        of_fp32 = {dtype: errors["gradient in fp32"] for dtype, errors in found.items()}
        assert of_sum["fp32"] < 1e-7 < 1e-3 < of_sum["default"] < 1e-2  # bf16 has 8 bits
        assert of_fp32["fp32"] < of_fp32["default"]
