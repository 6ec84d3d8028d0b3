"""The estimate of a rank's memory against the allocator of a GPU."""

import gc

import pytest
import torch

from tests.benchmarks import gpu as benchmark
from tests.benchmarks.gpu_plan import estimate_peak_bytes
from tests.helpers import step_runs
from vcore_ds.data.batches import StepBatches
from vcore_ds.distributed.process_group import start_process_group
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import NoUtilities

SIZES = benchmark.SHAPES["0.6b"] | {"num_hidden_layers": 12}
NUM_TOKENS = 8192


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
    phases = [values[f"peak_memory_bytes_{phase}"] for phase in ("probe", "utility", "main", "step")]
    measured = max(peak for peak in phases if peak is not None) - before
    estimate = estimate_peak_bytes(method, SIZES, NUM_TOKENS)
    engine.close()
    print(f"{method}: measured {measured / 2**30:.2f} GiB, estimated {estimate / 2**30:.2f}")
    assert estimate == pytest.approx(measured, rel=0.1)
