"""Helpers for PyTorch's dual tensors that do not keep tangents alive, linear maps of them, and parameters that may be
dual."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn


def make_dual(value: Tensor, tangent: Tensor) -> Tensor:
    """`forward_ad.make_dual`, but without attaching the tangent to `value` itself.

    The dual tensor is a view of `value`, and PyTorch propagates a view's tangent to its base. If the autograd graph
    saves the base, the tangent would live until the dual level ends. The primal returned by `unpack_dual` is a view
    that is exempt from this, so it is used as the base.
    """
    return forward_ad.make_dual(forward_ad.unpack_dual(value).primal, tangent)


def make_dual_if_any(value: Tensor, tangent: Tensor | None) -> Tensor:
    """Return a dual tensor, or the value if the tangent is None."""
    return value if tangent is None else make_dual(value, tangent)


def apply_linear_map(
    x: Tensor,
    apply: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]],
    adjoint: Callable[[Tensor], Tensor],
) -> Tensor:
    """Apply a linear map to a tensor that may be dual. `apply` maps value and tangent together (None to None), so that
    one collective moves both; `adjoint` maps gradients back. Autograd records the value but not the tangent."""
    return make_dual_if_any(*_LinearMap.apply(*forward_ad.unpack_dual(x), apply, adjoint))


class _LinearMap(torch.autograd.Function):
    """The gradient of an unused result is zeros, not None: other ranks may wait for a collective of the backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, tangent: Tensor | None, apply: Any, adjoint: Any) -> Any:
        ctx.adjoint = adjoint
        results = apply(value, None if tangent is None else tangent.detach())
        if tangent is not None:
            ctx.mark_non_differentiable(results[1])
        return results

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None]:
        return ctx.adjoint(gradient), None, None, None


def unpack_parameter(module: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """Return the value and the tangent (or None) of a parameter, while its module runs.

    With gradients enabled the value is the parameter itself: the primal of a dual tensor would be a view of it, and the
    graph would keep the memory of the gathered parameter until the backward.
    """
    value, tangent = forward_ad.unpack_dual(getattr(module, name))
    if not torch.is_grad_enabled():
        return value, tangent
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter, tangent


class LowRank(NamedTuple):
    """A weight's tangent in low-rank factors, or a stack of such tangents."""

    left: Tensor  # `[..., out, r]`
    right: Tensor  # `[..., r, in]`

    def matrix(self) -> Tensor:
        """The full matrix, `[..., out, in]`."""
        return self.left @ self.right

    def to(self, dtype: torch.dtype) -> "LowRank":
        """The same factors in another dtype."""
        return LowRank(self.left.to(dtype), self.right.to(dtype))


_LOW_RANK_TANGENTS = "_low_rank_tangents"
"""Attribute of a running module that holds its parameters' low-rank tangents, by name."""


def set_low_rank_tangent(module: nn.Module, name: str, tangent: LowRank, on_read: Callable[[], None]) -> None:
    """Give a parameter of a running module a low-rank tangent; only for modules that read it themselves.

    Args:
        on_read: called at each read. A tangent that is never read would silently be missing from the utilities.
    """
    module.__dict__.setdefault(_LOW_RANK_TANGENTS, {})[name] = tangent, on_read


def unpack_weight(module: nn.Module, name: str) -> tuple[Tensor, Tensor | LowRank | None]:
    """`unpack_parameter` of a weight whose tangent may be low-rank."""
    weight, tangent = unpack_parameter(module, name)
    return weight, read_low_rank_tangent(module, name) or tangent


def clear_low_rank_tangents(module: nn.Module) -> None:
    """Remove the module's low-rank tangents."""
    module.__dict__.pop(_LOW_RANK_TANGENTS, None)


def read_low_rank_tangent(module: nn.Module, name: str) -> LowRank | None:
    """Return a parameter's low-rank tangent, or None."""
    tangents = module.__dict__.get(_LOW_RANK_TANGENTS)
    if tangents is None or name not in tangents:
        return None
    tangent, on_read = tangents[name]
    on_read()
    return tangent
