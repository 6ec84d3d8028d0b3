"""Waits for the GPU in a step, as CUDA's own count has them. On a CPU: tests/dist/test_synchronisations.py."""

import warnings
from typing import Any

import pytest
import torch

from tests.benchmarks.synchronisations import METHODS
from tests.helpers import step_runs, tiny
from vcore_ds.data import StepBatches
from vcore_ds.distributed.process_group import start_process_group


def count(sections: dict[str, Any], num_layers: int) -> int:
    """Synchronising calls of the third step."""
    recipe = step_runs.recipe(**sections)
    engine = step_runs.make_engine(tiny.token_loss_model(num_hidden_layers=num_layers), recipe)
    estimator = step_runs.make_estimator(recipe, engine)
    probe = step_runs.deal(tiny.rows(4, seed=100), 2) if estimator.direction is not None else []
    batches = StepBatches(step_runs.deal(tiny.rows(4), 2), probe)
    for _ in range(2):
        step_runs.train_step(engine, recipe, batches, estimator)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step_runs.train_step(engine, recipe, batches, estimator)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    engine.close()
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("method", METHODS)
def test_more_layers_take_no_more_waits(method: str) -> None:
    start_process_group(timeout_minutes=10)
    few, many = (count(METHODS[method], layers) for layers in (2, 6))
    print(f"{method}: {few} synchronising calls with 2 layers, {many} with 6")
    assert 0 < few == many
