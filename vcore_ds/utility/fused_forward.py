"""The fused forward: losses with a graph and utilities from one main forward.

With gradients enabled, PyTorch's forward mode also records a graph of the tangents and keeps all of them: 2.7 times the
memory. Here each function of dual tensors is computed in two parts: its value from values, with the graph of a plain
training forward, and its tangent from values and tangents, without a graph and freed as soon as the forward no longer
needs it. So losses and gradients equal those of the plain forward bit for bit.

With activation checkpointing a layer's forward builds no graph, so PyTorch's forward mode is used inside the layers
(see `checkpoint_with_tangent`), and the split outside them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.attention import FUSED_ATTENTION  # from there, since that import registers it
from vcore_ds.models.dual_tensors import make_dual_if_any
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.forward_mode import checkpoint_with_tangent, dual_parameters


@contextmanager
def forward_mode_with_graph(engine: Engine, direction: Direction) -> Iterator[None]:
    """A context in which the losses of `compute_losses_and_utilities` have a graph, so that one forward is enough.
    Leave it before the backward. `why_not_fused` must be None for the engine."""
    # Hugging Face's GradientCheckpointingLayer; type checkers only see a module.
    layers: list[Any] = [layer for layer in engine.module.layers if getattr(layer, "gradient_checkpointing", False)]
    checkpoints_before = [layer._gradient_checkpointing_func for layer in layers]
    for layer in layers:
        options = {key: x for key, x in layer._gradient_checkpointing_func.keywords.items() if key == "context_fn"}
        layer._gradient_checkpointing_func = partial(checkpoint_with_tangent, **options)
    try:
        with dual_parameters(engine, direction, attention=FUSED_ATTENTION, with_graph=True), UnrecordedTangents():
            yield
    finally:
        for layer, checkpoint in zip(layers, checkpoints_before, strict=True):
            layer._gradient_checkpointing_func = checkpoint


_HANDLED_BY_PYTORCH = frozenset(
    "__get__ _make_dual _unpack_dual backward expand permute register_hook requires_grad_ retain_grad select squeeze "
    "transpose unsqueeze view view_as".split()
)
"""Tensor methods and views for which PyTorch's forward mode takes no extra memory."""

_LINEAR = frozenset(
    "__getitem__ add cat chunk contiguous flatten float mean neg repeat_interleave reshape split stack sub sum to "
    "unflatten".split()
)
"""Functions whose tangent is the same function of the tangents, provided that all summands have one."""

Function = Callable[..., Any]


class UnrecordedTangents(TorchFunctionMode):
    """A mode in which autograd records the values of dual tensors but not their tangents. In-place functions are left
    to PyTorch: the result is right, the graph larger."""

    def __torch_function__(
        self, function: Function, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        is_mul = name == "mul" and not kwargs
        # PyTorch would add a tensor of zeros to the tangent, whose shape a Python kernel works out in 0.1 to 0.2 ms.
        adds_number = name in ("add", "sub") and not kwargs and isinstance(args[1], int | float)
        # Checked first, since every function that is called without a graph passes through here.
        if not (is_mul or adds_number or torch.is_grad_enabled()):
            return function(*args, **kwargs)
        if name in _HANDLED_BY_PYTORCH or _is_below_autograd() or _is_in_place(name, kwargs):
            return function(*args, **kwargs)
        duals = _DualArguments()
        values, named_values = duals.split(args), {key: duals.split(x) for key, x in kwargs.items()}
        value = function(*values, **named_values)
        if duals.num_duals == 0 or not isinstance(value, Tensor | list | tuple):
            return value
        if values and value is values[0]:
            # A conversion to its present dtype. A new dual tensor would accumulate its gradients separately, so they
            # would be summed in another order than without tangents.
            return args[0]
        with torch.no_grad():
            if adds_number:
                # A copy, since an in-place operation on the sum would write into the argument's tangent.
                tangent = duals.tangents(args[0]).clone()
            elif is_mul:
                tangent = _product_rule(*(duals.unpack(x) for x in args))
            elif name in _LINEAR and duals.num_constants == 0 and (name not in ("add", "sub") or duals.num_duals == 2):
                tangent = function(*duals.tangents(args), **{key: duals.tangents(x) for key, x in kwargs.items()})
            else:
                dual = function(*duals.detached(args), **{key: duals.detached(x) for key, x in kwargs.items()})
                tangent = _extract_tangents(dual)
        return _attach_tangents(value, tangent)


def _is_below_autograd() -> bool:
    """Whether the call comes from below autograd, where tensors are plain, as in a mode that counts operations."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


def _is_in_place(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function writes into an argument."""
    return "out" in kwargs or name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


class _DualArguments:
    """The arguments of a function, split into values and tangents."""

    def __init__(self) -> None:
        self.num_duals = self.num_constants = 0
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}

    def split(self, x: Any) -> Any:
        """Return the values of `x`, with their graph; count dual and constant tensors."""
        if type(x) in (list, tuple):
            return type(x)(map(self.split, x))
        value, tangent = forward_ad.unpack_dual(x) if isinstance(x, Tensor) else (x, None)
        if tangent is None:
            self.num_constants += isinstance(x, Tensor) and x.is_floating_point()
            return x
        self.num_duals += 1
        self._parts[id(x)] = value, tangent
        return value

    def unpack(self, x: Any) -> tuple[Any, Tensor | None]:
        return self._parts.get(id(x), (x, None))

    def tangents(self, x: Any) -> Any:
        if type(x) in (list, tuple):
            return type(x)(map(self.tangents, x))
        return self._parts[id(x)][1] if id(x) in self._parts else x

    def detached(self, x: Any) -> Any:
        """Return `x` with its dual tensors, without a graph."""
        if type(x) in (list, tuple):
            return type(x)(map(self.detached, x))
        value, tangent = self.unpack(x)
        if tangent is not None:
            return forward_ad.make_dual(value.detach(), tangent)
        return x.detach() if isinstance(x, Tensor) else x


def _product_rule(left: tuple[Any, Tensor | None], right: tuple[Any, Tensor | None]) -> Tensor:
    """Tangent of `x * y`. PyTorch would compute the value again."""
    (x, d_x), (y, d_y) = left, right
    if d_x is None:
        return x * d_y
    return d_x * y if d_y is None else (d_x * y).addcmul_(x, d_y)


def _extract_tangents(result: Any) -> Any:
    if isinstance(result, list | tuple):
        return [_extract_tangents(x) for x in result]
    return forward_ad.unpack_dual(result).tangent if isinstance(result, Tensor) else None


def _attach_tangents(value: Any, tangent: Any) -> Any:
    if isinstance(value, Tensor):
        return make_dual_if_any(value, tangent)
    if not isinstance(value, list | tuple):
        return value
    parts = [_attach_tangents(x, d_x) for x, d_x in zip(value, tangent, strict=True)]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
