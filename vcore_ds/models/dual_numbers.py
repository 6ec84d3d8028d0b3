"""Dual numbers whose tangent is gone with them, and parameters that may be dual."""

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


def value_and_tangent(module: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
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
