"""Host time of a layer's all-gather in Python, Qwen3-32B, by ranks: coalesced, by DeepSpeed's copies and ours, and in
place.

    python -m tests.benchmarks.gather_host_time

Runs the handles on seven parameters, a layer's matrices scaled down, so that Python and dispatch dominate; coalesced
ones with DeepSpeed's division of the buffer among the ranks. The variants take turns. Prints the lower quartile of CPU
milliseconds of the thread. On a GPU the launches of NCCL come on top: one, or seven in place.
"""

import math
import time
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import (
    AllGatherCoalescedHandle,
    AllGatherHandle,
    ZeroParamStatus,
)

from vcore_ds.engine.deepspeed_start import DEEPSPEED_WAIT, copy_gathered_parameters

NUM_ELEMENTS = (8192, 1024, 1024, 8192, 16384, 16384, 16384)
"""Query, key, value, output, gate, up and down, scaled down."""
NUM_ROUNDS = 40
DONE: Any = SimpleNamespace(wait=lambda **_: None)


def make_parameters(num_ranks: int) -> list[Any]:
    return [
        SimpleNamespace(
            ds_status=ZeroParamStatus.INFLIGHT,
            ds_numel=n,
            ds_shape=torch.Size([n]),
            ds_summary=str,
            ds_id=0,
            data=None,
            ds_tensor=SimpleNamespace(ds_numel=math.ceil(n / num_ranks), dtype=torch.float32),
        )
        for n in NUM_ELEMENTS
    ]


def measure_host_time(num_ranks: int) -> list[float]:
    """Milliseconds of a layer's all-gather: coalesced by DeepSpeed, coalesced by us, in place."""
    part = sum(math.ceil(n / num_ranks) for n in NUM_ELEMENTS)
    buffer = torch.empty(num_ranks * part)
    buffers = [torch.empty(n) for n in NUM_ELEMENTS]
    seconds: list[list[float]] = [[], [], []]
    for _ in range(NUM_ROUNDS):
        for wait, times in zip((DEEPSPEED_WAIT, copy_gathered_parameters), seconds[:2], strict=True):
            parameters = make_parameters(num_ranks)
            start = time.thread_time()
            parts = [buffer.narrow(0, part * i, part) for i in range(num_ranks)]
            wait(AllGatherCoalescedHandle(DONE, parameters, parts, num_ranks))
            times.append(time.thread_time() - start)
        parameters = make_parameters(num_ranks)
        start = time.thread_time()
        for parameter, gathered in zip(parameters, buffers, strict=True):
            parameter.data = gathered
            AllGatherHandle(DONE, parameter).wait()
        seconds[2].append(time.thread_time() - start)
    return [1e3 * sorted(times)[NUM_ROUNDS // 4] for times in seconds]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for ranks in (8, 16, 64, 128, 512, 1024):
        line = "{:4d} ranks: coalesced by DeepSpeed {:.3f} ms, by us {:.3f} ms, in place {:.3f} ms"
        print(line.format(ranks, *measure_host_time(ranks)))
