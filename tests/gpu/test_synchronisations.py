"""Waits for the GPU in a step, counted by CUDA. On a CPU: tests/dist/test_synchronisations.py."""

import warnings

import pytest
import torch

from tests.helpers.step_cases import CASES, steps
from vcore_ds.distributed.process_group import start_process_group


def count_waits(case: str, num_layers: int) -> int:
    """Synchronising calls of the third step. In the first two, DeepSpeed compares its order of parameters between
    ranks."""
    with steps(case, num_layers=num_layers, overlap=True) as run, warnings.catch_warnings(record=True) as caught:
        run.take()
        run.take()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run.take()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("case", CASES)
def test_more_layers_cause_no_more_waits(case: str) -> None:
    start_process_group(timeout_minutes=10)
    few, many = (count_waits(case, layers) for layers in (2, 6))
    print(f"{case}: {few} synchronising calls with 2 layers, {many} with 6")
    assert 0 < few == many
