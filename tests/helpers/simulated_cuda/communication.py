"""NCCL of the simulated device: gloo on the same memory, only for tensors on the device."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

NAME = "simulated_nccl"

COLLECTIVES = {
    name: name for name in (
        "allgather", "allgather_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier",
        "broadcast", "gather", "reduce", "reduce_scatter", "scatter", "send", "recv", "_allgather_base",
        "_reduce_scatter_base",
    )
} | {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}  # fmt: skip
"""Method names of a process group, before and since torch 2.13, and the corresponding names of gloo."""


def install(on_cpu: Callable[[Tensor], Tensor]) -> None:
    """Register the backend. `on_cpu` returns a CPU tensor over the same memory."""

    def shared(tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            raise RuntimeError("No backend type associated with device type cpu")  # NCCL's message
        return on_cpu(tensor)

    class Nccl(dist.ProcessGroup):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any):
            super().__init__(rank, size)
            self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
            self._name = ""

        @property
        def _device_types(self) -> list[torch.device]:
            return [torch.device("cuda")]

        # Methods that PyTorch's base class for process groups in Python leaves abstract.
        def getBackendName(self) -> str:  # noqa: N802
            return NAME

        def setGroupName(self, name: str) -> None:  # noqa: N802
            self._name = name

        def getGroupName(self) -> str:  # noqa: N802
            return self._name

    def collective(gloos_name: str) -> Callable[..., Any]:
        def run(group: Any, *arguments: Any, **options: Any) -> Any:
            arguments, options = tree_map_only(Tensor, shared, (arguments, options))
            return getattr(group._gloo, gloos_name)(*arguments, **options)

        return run

    for name, gloos_name in COLLECTIVES.items():
        setattr(Nccl, name, collective(gloos_name))
    dist.Backend.register_backend(NAME, Nccl, devices=["cuda"])

    def by_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def start(*arguments: Any, **options: Any) -> Any:
            arguments, options = (
                tree_map_only(str, lambda text: NAME if text == "nccl" else text, part) for part in (arguments, options)
            )
            return function(*arguments, **options)

        return start

    dist.init_process_group = by_gloo(dist.init_process_group)
    dist.new_group = dist.distributed_c10d.new_group = by_gloo(dist.new_group)
    dist.is_nccl_available = lambda: True
