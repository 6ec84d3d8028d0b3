"""The estimate of a rank's memory against the allocator of a GPU."""

import gc

import pytest
import torch

from tests.benchmarks import gpu as benchmark
from tests.benchmarks.gpu_plan import make_memory_settings, make_shape
from tests.helpers import step_runs
from vcore_ds.data.batches import StepBatches
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.planning.memory import estimate_memory
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import NoUtilities

SIZES = benchmark.SHAPES["0.6b"] | {"num_hidden_layers": 12}
NUM_TOKENS = 8192
GIB = 2**30


@pytest.mark.parametrize("method", benchmark.METHODS)
def test_a_step_needs_the_estimated_memory(method: str) -> None:
    start_process_group(timeout_minutes=10)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = benchmark.build_engine(SIZES)
    estimator = NoUtilities(engine) if method == "sft" else benchmark.make_estimator(method, engine, Direction(engine))
    pack = benchmark.make_pack(NUM_TOKENS, SIZES["vocab_size"], 0)
    batches = StepBatches([pack], [] if method == "sft" else [pack])
    for _ in range(3):  # the first compiles kernels and records ZeRO-3's trace
        values = step_runs.train_step(engine, benchmark.make_recipe(method), batches, estimator).values
    peaks = {phase: values[f"peak_memory_bytes_{phase}"] for phase in ("probe", "utility", "main", "step")}
    peaks = {phase: peak - before for phase, peak in peaks.items() if peak is not None}
    measured = max(peaks.values())
    estimate = estimate_memory(make_shape(SIZES), make_memory_settings(method, NUM_TOKENS))
    engine.close()
    for phase, peak in peaks.items():
        parts = dict(estimate.persistent) | dict(estimate.phases.get(phase, {}))
        print(f"{method}, {phase}: {peak / GIB:.2f} GiB;", {k: f"{v / GIB:.2f}" for k, v in parts.items()})
    print(f"ok {method}: measured {measured / GIB:.2f} GiB, estimated {estimate.peak_bytes / GIB:.2f}")
    assert estimate.peak_bytes == pytest.approx(measured, rel=0.1)
