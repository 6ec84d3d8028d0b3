"""An accelerator with simulated streams, for tests of ordering on the CPU.

DeepSpeed and the engine treat it as an asynchronous device: they put all-gathers and reduce-scatters on separate
streams and order them with events. The operations run immediately, so results are those of the CPU. A race on a GPU is
detected from the recorded order: two accesses to the same memory, at least one of them a write, that no chain of waits
orders.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.packages import path_in_package

Clock = Counter["Stream | None"]
"""Vector clock: the number of operations of each stream that have certainly completed."""


class Stream:
    """The interface of a stream that DeepSpeed uses."""

    def __init__(self, accelerator: "AcceleratorWithStreams"):
        self._accelerator = accelerator
        self.clock: Clock = Counter()

    def wait_stream(self, other: "Stream") -> None:
        self.clock |= other.clock

    def synchronize(self) -> None:
        self._accelerator.hold_host(self.clock)


class Event:
    """The interface of an event that DeepSpeed uses. `query` is always False, so the host waits as often as it can."""

    def __init__(self, accelerator: "AcceleratorWithStreams"):
        self._accelerator = accelerator
        self._clock: Clock = Counter()

    def record(self) -> None:
        self._clock = self._accelerator.current_stream().clock.copy()

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._accelerator.hold_host(self._clock)


class AcceleratorWithStreams(CPU_Accelerator):
    """The CPU, presented to DeepSpeed as an asynchronous device.

    Attributes:
        host_waits: number of waits for a stream, an event or the device, by `module.function`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._default = self._current = Stream(self)
        self.host_clock: Clock = Counter()
        self.host_waits: Counter[str] = Counter()

    def is_synchronized_device(self) -> bool:
        return False

    def Stream(self) -> Stream:  # noqa: N802, an attribute that DeepSpeed calls
        return Stream(self)

    def Event(self) -> Event:  # noqa: N802
        return Event(self)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def current_stream(self, device_index: int | None = None) -> Stream:
        return self._current

    def default_stream(self, device_index: int | None = None) -> Stream:
        return self._default

    def synchronize(self, device_index: int | None = None) -> None:
        self.hold_host(self._default.clock)

    def hold_host(self, clock: Clock) -> None:
        self.host_clock |= clock
        frame = sys._getframe(2)
        self.host_waits[f"{frame.f_globals['__name__'].rpartition('.')[2]}.{frame.f_code.co_name}"] += 1


@contextmanager
def accelerator_with_streams() -> Iterator[AcceleratorWithStreams]:
    """Use such an accelerator for the engines that are made and closed inside the block."""
    before, accelerator = get_accelerator(), AcceleratorWithStreams()
    record_stream = torch.Tensor.record_stream
    torch.Tensor.record_stream = lambda tensor, stream: None  # the CPU's allocator never reuses memory in use
    set_accelerator(accelerator)
    try:
        yield accelerator
    finally:
        set_accelerator(before)
        torch.Tensor.record_stream = record_stream


class Races(TorchDispatchMode):
    """Detects unordered accesses to tensors that live from step to step.

    Attributes:
        races: for each race, the operations and where each was called.
        num_accesses: by name and whether the access was on another stream than the default one.
    """

    def __init__(self, accelerator: AcceleratorWithStreams, watched: dict[str, Iterable[torch.Tensor]]):
        """`watched`: tensors by name; accesses to any part of their memory count."""
        super().__init__()
        self._accelerator = accelerator
        self._names = {t.untyped_storage().data_ptr(): name for name, tensors in watched.items() for t in tensors}
        self._writes: dict[int, tuple[Stream, int, str]] = {}
        self._reads: dict[int, list[tuple[Stream, int, str]]] = {}
        self.races: list[str] = []
        self.num_accesses: Counter[tuple[str, bool]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        if not func.is_view:
            for place, value in enumerate(args):
                self._access(value, schema.arguments[place], schema.name)
            by_name = {argument.name: argument for argument in schema.arguments}
            for name, value in kwargs.items():
                self._access(value, by_name[name], schema.name)
        return func(*args, **kwargs)

    def _access(self, value: Any, argument: Any, operation: str) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                self._access(item, argument, operation)
        if not isinstance(value, torch.Tensor):
            return
        address = value.untyped_storage().data_ptr()
        name = self._names.get(address)
        if name is None:
            return
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        stream = self._accelerator.current_stream()
        stream.clock |= self._accelerator.host_clock  # launched after everything that the host has waited for
        stream.clock[stream] += 1
        self.num_accesses[name, stream is not self._accelerator.default_stream()] += 1
        access = (stream, stream.clock[stream], f"{operation} at {_caller()}")
        earlier = [self._writes[address]] if address in self._writes else []
        if is_write:
            earlier += self._reads.pop(address, [])
            self._writes[address] = access
        else:
            self._reads.setdefault(address, []).append(access)
        for other, number, where in earlier:
            if stream.clock[other] < number:
                self.races.append(f"{name}: {where}, then without a wait {access[2]}")


def _caller() -> str:
    """The innermost functions of the package and of DeepSpeed on the call stack."""
    frame, functions = sys._getframe(3), []
    while frame is not None and len(functions) < 4:
        file = frame.f_code.co_filename
        if path_in_package(file).startswith(("vcore_ds/", "deepspeed/runtime/")):
            functions.append(f"{Path(file).stem}.{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(functions)
