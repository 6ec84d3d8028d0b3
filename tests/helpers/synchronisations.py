"""Points at which the host would wait for a GPU, counted on the CPU."""

import sys
from collections import Counter
from types import FrameType
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select"}
"""Operations whose result the host needs: a number, or a shape that depends on values."""

WAITING_NAMES = {"reduce_and_partition_stream", "synchronize"}
"""A function that uses both names waits for DeepSpeed's stream of gradient reductions, where there is one."""


class Synchronisations:
    """Counts inside a `with` block. Reads of tensors that would be in host memory on a GPU machine too (a batch's
    labels) are counted as well: the numbers are upper bounds.

    Attributes:
        counts: by operation, or by `module.function` for waits for DeepSpeed's stream.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._modes = (_CountsReads(self.counts), _CountsLists(self.counts))

    def __enter__(self) -> Self:
        for mode in self._modes:
            mode.__enter__()
        sys.setprofile(self._count_waits)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def _count_waits(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and WAITING_NAMES <= set(frame.f_code.co_names):
            self.counts[f"{frame.f_globals['__name__'].rpartition('.')[2]}.{frame.f_code.co_name}"] += 1


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
    """`tolist` reads a CPU tensor without an operation."""

    def __init__(self, counts: Counter[str]):
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.tolist:
            self._counts["tolist"] += 1
        return func(*args, **(kwargs or {}))
