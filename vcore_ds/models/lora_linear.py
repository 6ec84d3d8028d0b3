"""LoRA layers in bf16 that round once, after adding the adapter.

peft adds an adapter's output to a base output that is already rounded. Close to B = 0 it is below half an ulp of the
base output, so the sum rounds back to the same number: the model computes as if it had hardly been trained.
Here the adapter's output is added in the fp32 accumulator of the base matrix multiplication:

    out = round(x W^T + scaling * B A x)

`B A x` is itself rounded, an error relative to the adapter alone. Nothing of the output's size is saved for the
backward. Experts do the same in their grouped GEMM: peft would add `(alpha / r) B A` to the weights, and lose updates
below half an ulp of a weight.

Tangents may be multiplied in FP8, which keeps utilities accurate; FP8 values would not.
"""

from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.functional import pad

from vcore_ds.distributed.device import device
from vcore_ds.models.dual_tensors import LowRank
from vcore_ds.models.experts import ExpertsAdapter, use_adapter, uses_our_experts

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


_RANK_MULTIPLE = 8
"""Adapter ranks of experts are zero-padded to this multiple: the kernels need rows of a multiple of 16 bytes."""


class LoraExperts(ParamWrapper):
    """peft's adapter on a parameter of experts that compute by `experts_forward`; for other experts, or with the
    adapter disabled or merged, the forward is peft's."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        experts = self.get_base_layer()
        if not uses_our_experts(experts) or self.disable_adapters or self.merged:
            return super().forward(x, *args, **options)
        (name,) = self.active_adapters
        left, right, scaling = self.get_delta_factors(name)
        rows = -self.r[name] % _RANK_MULTIPLE
        left, right = pad(left, (0, rows)), pad(right, (0, 0, 0, rows))
        down, up = (left, right) if experts.is_transposed else (right, left)
        with use_adapter(experts, self.parameter_name, ExpertsAdapter(down, up, scaling)):
            return self.base_layer(x, *args, **options)


def linear_with_addend(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None, scaling: float) -> Tensor:
    """Compute `x W^T + scaling * addend`, rounded once, then `+ bias`; without an addend a plain linear layer.

    `addmm` takes only one addend, so the bias is rounded separately. That rounding does not lose the adapter, whose
    output varies with the token like the base output, so that the errors average out. `addend` and result are `[...,
    out]` in the dtype of `x [..., in]`.
    """
    if addend is None:
        return nn.functional.linear(x, weight, bias)
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
        x, d_weight = nn.functional.linear(x, d_weight.right), d_weight.left
    if d_weight is not None:
        if tangent is None:
            tangent = nn.functional.linear(x, d_weight)
        else:  # accumulated by the matmul: one tensor and one rounding less
            tangent.flatten(0, -2).addmm_(x.flatten(0, -2), d_weight.t())
    if d_bias is not None:
        tangent = d_bias.expand(*x.shape[:-1], -1) if tangent is None else tangent.add_(d_bias)
    return tangent


class BaseLinear(nn.Linear):
    """The frozen layer under an adapter, which takes the adapter's output as an argument: ZeRO-3 gathers the weight
    only while this module runs."""

    def forward(self, x: Tensor, addend: Tensor | None = None, scaling: float = 1.0) -> Tensor:
        return linear_with_addend(x, self.weight, self.bias, addend, scaling)


class LoraLinear(lora.Linear):
    """peft's LoRA layer, which rounds once in bf16. In other dtypes, or with the adapter disabled or merged, the
    forward is peft's."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16 or self.disable_adapters or self.merged:
            return super().forward(x)
        (adapter,) = self.active_adapters
        lora_a, lora_b = self.lora_A[adapter], self.lora_B[adapter]
        assert isinstance(lora_a, nn.Linear)
        dropped = self.lora_dropout[adapter](self._cast_input_dtype(x, lora_a.weight.dtype))
        return self.base_layer(x, lora_b(lora_a(dropped)).to(x.dtype), self.scaling[adapter])


def round_adapters_once(adapted: nn.Module) -> None:
    """Make the LoRA layers of a peft model round once, in place. Only classes change, so saved adapters do not."""
    for module in adapted.modules():
        if type(module) is lora.Linear and type(module.base_layer) is nn.Linear:
            module.__class__ = LoraLinear
            module.base_layer.__class__ = BaseLinear
        elif type(module) is lora.layer.ParamWrapper:
            module.__class__ = LoraExperts
