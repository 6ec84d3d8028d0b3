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

from vcore_ds.engine import Engine
from vcore_ds.models import FUSED_ATTENTION
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.dual_checkpoint import checkpoint_with_tangent
from vcore_ds.utility.forward_mode import dual_parameters


@contextmanager
def forward_mode_with_graph(engine: Engine, direction: Direction) -> Iterator[None]:
    """A context in which `losses_and_utilities` gives losses with a graph, so that one forward serves both.

    Only for an engine for which `why_not_fused` finds no reason. Leave the context before the backward.
    """
    layers = [layer for layer in engine.module.layers if getattr(layer, "gradient_checkpointing", False)]
    checkpoints_before = [layer._gradient_checkpointing_func for layer in layers]
    for layer in layers:
        layer._gradient_checkpointing_func = checkpoint_with_tangent
    try:
        with dual_parameters(engine, direction, attention=FUSED_ATTENTION, with_graph=True), TangentsBesideGraph():
            yield
    finally:
        for layer, checkpoint in zip(layers, checkpoints_before, strict=True):
            layer._gradient_checkpointing_func = checkpoint


_LINEAR = frozenset(
    "_make_dual _unpack_dual __get__ __getitem__ __rsub__ add cat chunk contiguous expand flatten float mean narrow neg "
    "permute repeat_interleave requires_grad_ reshape select split squeeze stack sub sum swapaxes to transpose "
    "unflatten unsqueeze view view_as".split()
)
"""Functions whose tangent is that function of the tangents alone, and which keep no input for the backward: PyTorch's
own rule for them records nothing. Any other function may stand here or not; the result is the same."""

_OF_THE_TENSOR_ITSELF = frozenset(("backward", "register_hook", "retain_grad"))


class TangentsBesideGraph(TorchFunctionMode):
    """Within it a function of dual numbers records a graph of its value and none of its tangent.

    Functions that write into an argument are left to PyTorch: the result is right, and the graph larger.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _LINEAR or name in _OF_THE_TENSOR_ITSELF or not torch.is_grad_enabled() or _writes(name, kwargs):
            return function(*args, **kwargs)
        parts = _Parts()
        values, named_values = parts.take(args), {key: parts.take_one(x) for key, x in kwargs.items()}
        value = function(*values, **named_values)
        if not parts.has_tangent or not isinstance(value, (Tensor, list, tuple)):
            return value
        with torch.no_grad():
            if name == "mul" and not kwargs:
                tangent = _product_rule(*(forward_ad.unpack_dual(x) if isinstance(x, Tensor) else (x, None) for x in args))
            else:
                duals = [parts.detached(x) for x in args]
                tangent = _tangent(function(*duals, **{key: parts.detached(x) for key, x in kwargs.items()}))
        return _with_tangent(value, tangent)


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    return name == "__setitem__" or name == "__set__" or "out" in kwargs or (name.endswith("_") and name[-2:] != "__")


class _Parts:
    """Arguments of a function taken apart into values and tangents."""

    def __init__(self) -> None:
        self.has_tangent = False
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, arguments: Sequence[Any]) -> list[Any]:
        return [self.take_one(x) for x in arguments]

    def take_one(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            value, tangent = forward_ad.unpack_dual(x)
            if tangent is None:
                return x
            self.has_tangent = True
            self._parts[id(x)] = value, tangent
            return value
        return type(x)(self.take(x)) if type(x) in (list, tuple) else x

    def detached(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            part = self._parts.get(id(x))
            return x.detach() if part is None else forward_ad.make_dual(part[0].detach(), part[1])
        return type(x)(map(self.detached, x)) if type(x) in (list, tuple) else x


def _product_rule(left: tuple[Any, Tensor | None], right: tuple[Any, Tensor | None]) -> Tensor | None:
    (x, d_x), (y, d_y) = left, right
    if d_x is None:
        return None if d_y is None else x * d_y
    return d_x * y if d_y is None else d_x * y + x * d_y


def _tangent(result: Any) -> Any:
    if isinstance(result, Tensor):
        return forward_ad.unpack_dual(result).tangent
    return [_tangent(x) for x in result] if isinstance(result, (list, tuple)) else None


def _with_tangent(value: Any, tangent: Any) -> Any:
    if isinstance(value, Tensor):
        return value if tangent is None else forward_ad.make_dual(value, tangent)
    if isinstance(value, (list, tuple)):
        parts = [_with_tangent(x, d_x) for x, d_x in zip(value, tangent, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
