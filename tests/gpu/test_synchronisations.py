"""Host-device synchronisations of a step, by place, as CUDA reports them.

On a CPU: tests/dist/test_synchronisations.py.
"""

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.helpers.step_cases import CASES, steps
from vcore_ds.distributed.process_group import start_process_group

ALONE = "partition_parameters.py"
"""On one rank DeepSpeed gathers nothing, but its handles (`NoGatherHandle`) synchronise the stream of the all-gathers,
which has no work, at each fetch. On several ranks there are no such handles."""


@contextmanager
def recorded_waits() -> Iterator[Counter[str]]:
    """Count synchronising calls by the innermost frames outside of PyTorch."""
    waits: Counter[str] = Counter()

    def record(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
            places = [
                f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
                for frame in frames
                if "warnings.py" not in frame.filename
            ]
            waits[" < ".join(reversed(places[-5:-1]))] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def count_waits(case: str, num_layers: int) -> Counter[str]:
    """Synchronising calls of the third step. In the first two, DeepSpeed compares its order of parameters between
    ranks."""
    with steps(case, num_layers=num_layers, overlap=True) as run:
        run.take()
        run.take()
        with recorded_waits() as waits:
            run.take()
    return Counter({place: number for place, number in waits.items() if ALONE not in place})


@pytest.mark.parametrize("case", CASES)
def test_more_layers_cause_no_more_waits(case: str) -> None:
    start_process_group(timeout_minutes=10)
    few, many = (count_waits(case, layers) for layers in (2, 6))
    print(f"ok {case}: {few.total()} synchronising calls with 2 layers, {many.total()} with 6")
    for place in (few | many) if few != many else ():
        print(f"   {few[place]} {many[place]} {place}")
    assert few and few == many
