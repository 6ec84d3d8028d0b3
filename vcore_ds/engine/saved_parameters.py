"""A graph that refers to parameters instead of keeping what was gathered of them.

The backward of a product needs its weight, so autograd saves a view of it, and with that the memory into which ZeRO-3
gathered the layer. Without activation checkpoints every rank would keep the whole model from the forward to the
backward. DeepSpeed's `memory_efficient_linear` has a Function of its own against this, which has no forward-mode rule.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class _View:
    """A view of a whole parameter."""

    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]


class SavedParameters:
    """Keeps gathered parameters of `model` out of graphs. ZeRO-3 gathers them again before a module's backward."""

    def __init__(self, model: nn.Module):
        """`model` has ZeRO-3's hooks, which gather parameters: this one has to be younger, to find them whole."""
        self._by_address: dict[int, nn.Parameter] = {}
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._note)

    @contextmanager
    def as_references(self) -> Iterator[None]:
        """The context of a forward. Its backward may be anywhere."""
        self._by_address.clear()  # gathers come to new addresses, so what is noted would grow with every pass
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _note(self, module: nn.Module, _: object) -> None:
        if not torch.is_grad_enabled():  # nothing is saved
            return
        for parameter in module.parameters(recurse=False):
            self._by_address[parameter.data_ptr()] = parameter

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        address = tensor.data_ptr()
        parameter = self._by_address.get(address)
        # A parameter may have been released since it was noted, and an activation may lie there now: only one that is
        # still there is what the tensor is a view of.
        if parameter is None or address != parameter.data_ptr() or tensor.numel() != parameter.numel():
            return tensor
        if tensor.dtype != parameter.dtype or tensor.numel() == 0:
            return tensor
        return _View(parameter, tensor.size(), tensor.stride())

    def _unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return saved.parameter.data.as_strided(saved.size, saved.stride)
