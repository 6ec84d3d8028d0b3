"""Allocated memory, and bytes received from other ranks, counted tensor by tensor: the same on every machine, unlike
the size of a process and the counters of a network."""

import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Counts the tensors that operations inside the block create. Views and in-place results create none.

    Attributes:
        peak_bytes: largest sum over the tensors created inside that were alive at the same time.
        largest_numel: number of elements of the largest created tensor.
        shapes: shapes of all created tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self.largest_numel = 0
        self.shapes: set[tuple[int, ...]] = set()
        self._live: dict[int, int] = {}
        self._live_bytes = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage()._cdata for tensor in _tensors_in((args, kwargs))}
        for tensor in _tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata in known or tensor.is_meta:  # meta tensors have a size but no memory
                continue
            self._count(storage)
            self.largest_numel = max(self.largest_numel, storage.nbytes() // tensor.element_size())
            self.shapes.add(tuple(tensor.shape))
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        return result

    def live_bytes(self) -> int:
        """Bytes of the tensors created inside that are alive now."""
        return self._live_bytes

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._live:
            return
        self._live[storage._cdata] = storage.nbytes()
        self._live_bytes += storage.nbytes()
        # The Python object of a storage lives as long as the storage, whoever holds it.
        weakref.finalize(storage, self._forget, storage._cdata).atexit = False

    def _forget(self, address: int) -> None:
        self._live_bytes -= self._live.pop(address)

    def restart(self) -> None:
        """Reset the peak to the tensors that are alive now."""
        self.peak_bytes = self._live_bytes


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in an operation's arguments or results. PyTorch's `tree_leaves` would take as long as the rest of a
    step."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)


def _received(name: str, args: tuple[Any, ...]) -> tuple[str, float] | None:
    """Kind of a collective and the bytes that each rank receives; None for other operations, and for collectives that
    move no parameters, gradients or tokens (sums of a few numbers, barriers)."""

    def size(tensors: Any) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors_in(tensors))

    match name:
        case "c10d::_allgather_base_" | "c10d::allgather_" | "c10d::allgather_into_tensor_coalesced_":
            return "gathers", size(args[0]) - size(args[1])
        case "c10d::_reduce_scatter_base_" | "c10d::reduce_scatter_" | "c10d::reduce_scatter_tensor_coalesced_":
            return "reductions", size(args[1]) - size(args[0])
        case "c10d::alltoall_base_" | "c10d::alltoall_":
            return "exchanges", size(args[0])
    return None


class ReceivedBytes(TorchDispatchMode):
    """Counts the bytes that this rank receives by collectives inside the block. All-gathers and reduce-scatters count
    without the part of the rank itself, all-to-alls with the part that stays.

    Attributes:
        received: bytes by kind: `gathers` (all-gather), `reductions` (reduce-scatter), `exchanges` (all-to-all).
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: dict[str, float] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        collective = _received(func._schema.name, args)
        if collective is not None:
            kind, num_bytes = collective
            self.received[kind] = self.received.get(kind, 0.0) + num_bytes
        return func(*args, **(kwargs or {}))
