"""The main forward with tangents beside it: losses with a graph, and utilities, of one forward.

PyTorch's forward mode with gradients enabled records a graph of the tangents too, and keeps every one of them: 2.7
times the memory. Here each function of dual numbers is taken apart. Its value is computed from values, with the graph
that training has; its tangent is computed from values and tangents without a graph, and lives as long as the forward
needs it. So losses and gradients are those of the plain forward, bit for bit.

With activation checkpoints a layer's forward builds no graph, so ordinary forward mode serves inside the layers (see
`dual_checkpoint`), and what is said above holds for what lies outside them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.attention import FUSED_ATTENTION  # from there, since that import registers it
from vcore_ds.models.dual_tensors import make_dual
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.forward_mode import checkpoint_with_tangent, dual_parameters


@contextmanager
def forward_mode_with_graph(engine: Engine, direction: Direction) -> Iterator[None]:
    """A context in which `losses_and_utilities` gives losses with a graph, so that one forward serves both.

    Only for an engine for which `why_not_fused` finds no reason. Leave the context before the backward.
    """
    # Hugging Face's GradientCheckpointingLayer, of which type checkers know nothing but that it is a module.
    layers: list[Any] = [layer for layer in engine.module.layers if getattr(layer, "gradient_checkpointing", False)]
    checkpoints_before = [layer._gradient_checkpointing_func for layer in layers]
    for layer in layers:
        layer._gradient_checkpointing_func = checkpoint_with_tangent
    try:
        with dual_parameters(engine, direction, attention=FUSED_ATTENTION, with_graph=True), TangentsBesideGraph():
            yield
    finally:
        for layer, checkpoint in zip(layers, checkpoints_before, strict=True):
            layer._gradient_checkpointing_func = checkpoint


_LEFT_ALONE = frozenset(
    "__get__ _make_dual _unpack_dual backward expand permute register_hook requires_grad_ retain_grad select squeeze "
    "transpose unsqueeze view view_as".split()
)
"""Functions about the tensor itself, and views: PyTorch's forward mode does what is wanted."""

_LINEAR = frozenset(
    "__getitem__ add cat chunk contiguous flatten float mean neg repeat_interleave reshape split stack sub sum to "
    "unflatten".split()
)
"""Functions whose tangent is the same function of the tangents, where all that they add up has one."""

Function = Callable[..., Any]


class TangentsBesideGraph(TorchFunctionMode):
    """Within it a function of dual numbers records a graph of its value and none of its tangent.

    Functions that write into an argument are left to PyTorch: the result is right, and the graph larger.
    """

    def __torch_function__(
        self, function: Function, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        is_product = name == "mul" and not kwargs
        if name in _LEFT_ALONE or _is_below_autograd() or _writes(name, kwargs):
            return function(*args, **kwargs)
        if not torch.is_grad_enabled() and not is_product:
            return function(*args, **kwargs)
        parts = _Parts()
        values, named_values = parts.take(args), {key: parts.take(x) for key, x in kwargs.items()}
        value = function(*values, **named_values)
        if parts.num_duals == 0 or not isinstance(value, Tensor | list | tuple):
            return value
        if values and value is values[0]:
            # A conversion to what it is already. As a number of its own it would collect gradients by itself, and they
            # would be summed in another order than without tangents.
            return args[0]
        with torch.no_grad():
            if is_product:
                tangent = _product_rule(*(parts.of(x) for x in args))
            elif name in _LINEAR and parts.num_constants == 0 and (name not in ("add", "sub") or parts.num_duals == 2):
                tangent = function(*parts.tangents(args), **{key: parts.tangents(x) for key, x in kwargs.items()})
            else:
                tangent = _tangent(function(*parts.detached(args), **{k: parts.detached(x) for k, x in kwargs.items()}))
        return _with_tangent(value, tangent)


def _is_below_autograd() -> bool:
    """Whether autograd has done its part already: a mode that counts operations runs there, on plain tensors."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of that name writes into an argument."""
    return "out" in kwargs or name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


class _Parts:
    """Arguments of a function taken apart into values and tangents."""

    def __init__(self) -> None:
        self.num_duals = self.num_constants = 0
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, x: Any) -> Any:
        """The values, with their graph."""
        if type(x) in (list, tuple):
            return type(x)(map(self.take, x))
        value, tangent = forward_ad.unpack_dual(x) if isinstance(x, Tensor) else (x, None)
        if tangent is None:
            self.num_constants += isinstance(x, Tensor) and x.is_floating_point()
            return x
        self.num_duals += 1
        self._parts[id(x)] = value, tangent
        return value

    def of(self, x: Any) -> tuple[Any, Tensor | None]:
        return self._parts.get(id(x), (x, None))

    def tangents(self, x: Any) -> Any:
        if type(x) in (list, tuple):
            return type(x)(map(self.tangents, x))
        return self._parts[id(x)][1] if id(x) in self._parts else x

    def detached(self, x: Any) -> Any:
        """The dual numbers, without a graph."""
        if type(x) in (list, tuple):
            return type(x)(map(self.detached, x))
        value, tangent = self.of(x)
        if tangent is not None:
            return forward_ad.make_dual(value.detach(), tangent)
        return x.detach() if isinstance(x, Tensor) else x


def _product_rule(left: tuple[Any, Tensor | None], right: tuple[Any, Tensor | None]) -> Tensor:
    """The value is there already, and PyTorch would compute it again."""
    (x, d_x), (y, d_y) = left, right
    if d_x is None:
        return x * d_y
    return d_x * y if d_y is None else (d_x * y).addcmul_(x, d_y)


def _tangent(result: Any) -> Any:
    if isinstance(result, list | tuple):
        return [_tangent(x) for x in result]
    return forward_ad.unpack_dual(result).tangent if isinstance(result, Tensor) else None


def _with_tangent(value: Any, tangent: Any) -> Any:
    if isinstance(value, Tensor):
        return value if tangent is None else make_dual(value, tangent)
    if not isinstance(value, list | tuple):
        return value
    parts = [_with_tangent(x, d_x) for x, d_x in zip(value, tangent, strict=True)]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
