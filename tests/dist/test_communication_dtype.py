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


def reduce_gradient(engine: Engine, batch: Batch) -> torch.Tensor:
    """Compute this rank's shard of the reduced gradient, in fp64."""
    with engine.accumulation(1):
        engine.backward(engine.token_losses(batch).sum())
    return torch.cat(engine.shards.gradients()).double()


def measure_deviations() -> dict[str, dict[str, float]]:
    """Relative distances of the reduced gradient from two references, by the dtype of the reduction."""
    batch = step_runs.deal(tiny.make_batch(4 * layout.size("shards")), 4)[0]
    fp32_engine = make_engine("fp32", None)
    in_fp32 = reduce_gradient(fp32_engine, batch)
    fp32_engine.close()
    distances: dict[str, dict[str, float]] = {}
    for dtype in (None, "fp32"):
        engine = make_engine("bf16", dtype)
        reduced = reduce_gradient(engine, batch)
        # A sum with zeros is exact, so these are the gradients of single ranks as they go into the reduction.
        single = [
            reduce_gradient(engine, batch if rank == layout.rank("shards") else idle_batch(0))
            for rank in range(layout.size("shards"))
        ]
        references = {"sum of the ranks' gradients": torch.stack(single).sum(0), "gradient in fp32": in_fp32}
        distances[dtype or "default"] = {
            name: relative_distance(reduced, reference) for name, reference in references.items()
        }
        engine.close()
    return distances


def relative_distance(reduced: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative 2-norm over all shards."""
    squares = [float((reduced - reference).square().sum()), float(reference.square().sum())]
    error, norm = layout.sum_over("shards", squares)
    return (error / norm) ** 0.5


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_an_fp32_reduction_is_exact_where_the_default_rounds(num_ranks: int) -> None:
    for distances in run_ranks(measure_deviations, num_ranks):
        print(distances)
        from_sum = {dtype: errors["sum of the ranks' gradients"] for dtype, errors in distances.items()}
        from_fp32 = {dtype: errors["gradient in fp32"] for dtype, errors in distances.items()}
        assert from_sum["fp32"] < 1e-7 < 1e-3 < from_sum["default"] < 1e-2  # bf16 has 8 bits
        assert from_fp32["fp32"] < from_fp32["default"]
