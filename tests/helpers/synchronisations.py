"""Host-device synchronisations that a GPU would need, counted on the CPU."""

from collections import Counter
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.streams import AcceleratorWithStreams

READS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select"}
"""Operations whose result the host reads: a number, or a shape that depends on values."""

BRAKES = {"partitioned_param_coordinator._fetch_sub_module_impl", "stage3.__reduce_and_partition_ipg_grads"}
"""Functions of DeepSpeed that keep the host from running too far ahead of the device, so that gathered parameters and
gradients do not fill its memory: with more than two all-gathers in flight, the host waits for the oldest."""


class Synchronisations:
    """Counts synchronisations inside a `with` block, for engines made with an `AcceleratorWithStreams`. Reads of
    tensors that would be in host memory on a GPU machine too (a batch's labels) are also counted: the numbers are upper
    bounds.

    Attributes:
        counts: by operation, or by `module.function` for waits for a stream, an event or the device.
        brakes: like `counts`, for the intended waits of DeepSpeed, whose number grows with the model (`BRAKES`).
    """

    def __init__(self, accelerator: AcceleratorWithStreams) -> None:
        self.counts: Counter[str] = Counter()
        self.brakes: Counter[str] = Counter()
        self._accelerator = accelerator
        self._modes = (_CountsReads(self.counts), _CountsLists(self.counts))

    def __enter__(self) -> Self:
        self._accelerator.host_waits.clear()
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        for function, number in self._accelerator.host_waits.items():
            (self.brakes if function in BRAKES else self.counts)[function] += number


class _CountsReads(TorchDispatchMode):
    def __init__(self, counts: Counter[str]):
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in READS:
            self._counts[name] += 1
        return func(*args, **(kwargs or {}))


class _CountsLists(TorchFunctionMode):
    """Counts `tolist`, which reads a CPU tensor without a dispatched operation."""

    def __init__(self, counts: Counter[str]):
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.tolist:
            self._counts["tolist"] += 1
        return func(*args, **(kwargs or {}))
