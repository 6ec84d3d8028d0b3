"""Dual-tensor helpers that do not keep tangents alive, and parameters that may be dual."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn


def make_dual(value: Tensor, tangent: Tensor) -> Tensor:
    """`forward_ad.make_dual`, without a tangent that outlives the result.

    The result is a view of `value`, and PyTorch gives a view's tangent to what it is a view of. Where a graph keeps
    that, it would keep the tangent too, until the dual level ends. The primal of a dual number is a view that has no
    part in this, so a view of it stands between.
    """
    return forward_ad.make_dual(forward_ad.unpack_dual(value).primal, tangent)


def unpack_parameter(module: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """A parameter of a module that runs, and its tangent, if any.

    With a graph the value is the parameter itself: a view of it, as a dual number's value is, would keep the memory of
    the gathered parameter until the backward.
    """
    value, tangent = forward_ad.unpack_dual(getattr(module, name))
    if not torch.is_grad_enabled():
        return value, tangent
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter, tangent


class LowRank(NamedTuple):
    """The tangent of a weight as a product of two thin matrices, or of stacks of them."""

    left: Tensor
    """`[..., out, r]`"""
    right: Tensor
    """`[..., r, in]`"""

    def matrix(self) -> Tensor:
        """The product, `[..., out, in]`."""
        return self.left @ self.right

    def to(self, dtype: torch.dtype) -> "LowRank":
        """The same factors in another precision."""
        return LowRank(self.left.to(dtype), self.right.to(dtype))


_LOW_RANK_TANGENTS = "_low_rank_tangents"
"""Attribute of a module that runs: its parameters' low-rank tangents, by name."""


def set_low_rank_tangent(module: nn.Module, name: str, tangent: LowRank, on_read: Callable[[], None]) -> None:
    """Gives a parameter of a module that runs a low-rank tangent; only for modules that read it themselves.

    `on_read` is called when they do: a tangent that nobody reads would be missing from the utilities, silently.
    """
    module.__dict__.setdefault(_LOW_RANK_TANGENTS, {})[name] = tangent, on_read


def clear_low_rank_tangents(module: nn.Module) -> None:
    """Takes the module's low-rank tangents away."""
    module.__dict__.pop(_LOW_RANK_TANGENTS, None)


def read_low_rank_tangent(module: nn.Module, name: str) -> LowRank | None:
    """A parameter's low-rank tangent, if it has one."""
    tangents = module.__dict__.get(_LOW_RANK_TANGENTS)
    if tangents is None or name not in tangents:
        return None
    tangent, on_read = tangents[name]
    on_read()
    return tangent
