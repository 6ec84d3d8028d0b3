"""Host time of the all-gather of a layer of Qwen3-32B in DeepSpeed's Python, by ranks: coalesced, and in place.

    python -m tests.benchmarks.gather_host_time

Runs DeepSpeed's handles on seven parameters with as many parts as a layer's matrices have, but little data, so that
Python and dispatch count. The two take turns. CPU milliseconds of the thread, lower quartile. On a GPU the launches of
NCCL come on top: one, or seven in place.
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


def measure_host_time(num_ranks: int) -> tuple[float, float]:
    """Milliseconds of a layer's all-gather: coalesced, in place."""
    part = sum(math.ceil(n / num_ranks) for n in NUM_ELEMENTS)
    parts = list(torch.empty(num_ranks * part).split(part))
    buffers = [torch.empty(n) for n in NUM_ELEMENTS]
    coalesced, in_place = [], []
    for _ in range(NUM_ROUNDS):
        parameters = make_parameters(num_ranks)
        start = time.thread_time()
        AllGatherCoalescedHandle(DONE, parameters, parts, num_ranks).wait()
        coalesced.append(time.thread_time() - start)
        parameters = make_parameters(num_ranks)
        start = time.thread_time()
        for parameter, buffer in zip(parameters, buffers, strict=True):
            parameter.data = buffer
            AllGatherHandle(DONE, parameter).wait()
        in_place.append(time.thread_time() - start)
    first, second = (1e3 * sorted(seconds)[NUM_ROUNDS // 4] for seconds in (coalesced, in_place))
    return first, second


if __name__ == "__main__":
    torch.set_num_threads(1)
    for ranks in (8, 16, 64, 128):
        print("{:4d} ranks: coalesced {:.3f} ms, in place {:.3f} ms".format(ranks, *measure_host_time(ranks)))
