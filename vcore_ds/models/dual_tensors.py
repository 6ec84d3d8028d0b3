"""Dual tensors that do not keep tangents alive, parameters that may be dual, and linear maps of dual tensors.

Tangents of linear layers may be multiplied in FP8, which keeps utilities accurate; FP8 values would not.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.functional import linear

from vcore_ds.distributed.device import device


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
    return make_dual_if_any(*LinearMap.apply(*forward_ad.unpack_dual(x), apply, adjoint))


class LinearMap(torch.autograd.Function):
    """`apply_linear_map` of a value and its tangent. The gradient of an unused result is zeros, not None: other ranks
    may wait for a collective of the backward."""

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
    """Give a parameter of a running module a low-rank tangent; only for modules that read it themselves. `on_read` is
    called at each read: a tangent that is never read would silently be missing from the utilities."""
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


def linear_with_addend(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None, scaling: float) -> Tensor:
    """Compute `x W^T + scaling * addend`, rounded once, then `+ bias`; without an addend a plain linear layer.

    `addmm` takes only one addend, so the bias is rounded separately. That rounding does not lose the adapter, whose
    output varies with the token like the base output, so that the errors average out. `addend` and result are `[...,
    out]` in the dtype of `x [..., in]`.
    """
    if addend is None:
        return linear(x, weight, bias)
    # `beta * addend` is added in the fp32 accumulator, both in oneDNN (CPU) and in cuBLAS.
    out = torch.addmm(addend.flatten(0, -2), x.flatten(0, -2), weight.t(), beta=scaling).view(addend.shape)
    return out if bias is None else out + bias


def linear_tangent(
    x: Tensor,
    weight: Tensor,
    *,
    d_x: Tensor | None = None,
    d_weight: Tensor | LowRank | None = None,
    d_bias: Tensor | None = None,
    d_addend: Tensor | None = None,
    scaling: float = 1.0,
    in_fp8: bool = False,
) -> Tensor | None:
    """Compute the tangent of `linear_with_addend`, skipping inputs without a tangent; None if none has one. PyTorch's
    own rule multiplies by zeros in place of missing tangents, a third of the work of a frozen layer under LoRA.
    `in_fp8`: compute `d_x W^T` by `fp8_linear`, where it takes the weight."""
    tangent = None
    if d_x is not None and in_fp8 and is_supported(weight):
        tangent = fp8_linear(d_x, weight)
        if d_addend is not None:
            tangent.add_(d_addend, alpha=scaling)
    elif d_x is not None:
        tangent = linear_with_addend(d_x, weight, None, d_addend, scaling)
    elif d_addend is not None:
        tangent = scaling * d_addend
    if isinstance(d_weight, LowRank):
        x, d_weight = linear(x, d_weight.right), d_weight.left
    if d_weight is not None:
        if tangent is None:
            tangent = linear(x, d_weight)
        else:  # accumulated by the matmul: one tensor and one rounding less
            tangent.flatten(0, -2).addmm_(x.flatten(0, -2), d_weight.t())
    if d_bias is not None:
        tangent = d_bias.expand(*x.shape[:-1], -1) if tangent is None else tangent.add_(d_bias)
    return tangent


_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SIZE_MULTIPLE = 16
"""cuBLAS needs rows of a multiple of 16 bytes in both factors and the result."""


def is_supported(weight: Tensor) -> bool:
    """Whether `fp8_linear` takes a weight of this shape and dtype."""
    return weight.dtype == torch.bfloat16 and all(size % _SIZE_MULTIPLE == 0 for size in weight.shape)


def has_fp8_units() -> bool:
    """Whether this rank's device computes `fp8_linear`: GPUs from Ada and Hopper on, depending on PyTorch's version and
    CUDA's libraries, and CPUs, slowly. Multiplies once, since the capability alone does not tell for RTX PRO 6000
    (https://github.com/pytorch/pytorch/issues/192707)."""
    ones = torch.ones(_SIZE_MULTIPLE, _SIZE_MULTIPLE, dtype=torch.bfloat16, device=device())
    try:
        fp8_linear(ones, ones)
    except (RuntimeError, ValueError):
        return False
    return True


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T`, bf16, summed in fp32, with both factors rounded to `float8_e4m3fn`, each row scaled to the largest
    number of that format. `x [..., in]` and `weight [out, in]` are bf16; `is_supported` of the weight."""
    (rows, row_scales), (columns, column_scales) = _quantize(x.flatten(0, -2)), _quantize(weight)
    if x.is_cuda:
        output = torch._scaled_mm(
            rows, columns.t(), scale_a=row_scales, scale_b=column_scales.t().contiguous(), out_dtype=x.dtype
        )
    else:  # on CPUs, PyTorch 2.11 takes only one scale for a whole factor
        output = (rows.float() @ columns.float().t()).mul_(row_scales).mul_(column_scales.t()).to(x.dtype)
    return output.view(*x.shape[:-1], len(weight))


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to FP8; returns the rows and their fp32 scales `[N, 1]`, by which to multiply them."""
    scales = x.abs().amax(-1, keepdim=True).float().clamp_(min=torch.finfo(torch.float32).tiny) / _LARGEST
    return (x / scales).to(torch.float8_e4m3fn), scales
