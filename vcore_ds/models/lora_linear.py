"""Linear layers whose adapter is added before the output is rounded to bf16.

peft adds an adapter's output to a base output that is already rounded. Just off B = 0 the former is below half an ulp
of the latter, and the sum rounds back to the same number, always: the model computes as if it had hardly been trained.
Here the adapter's output is added inside the base product, which accumulates in fp32:

    out = round(x W^T + scaling * B A x)

The product with B is itself rounded, an error relative to the adapter alone. Nothing of the output's size is saved for
the backward.
"""

from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.functional import pad

from vcore_ds.models.dual_tensors import LowRank
from vcore_ds.models.experts import ExpertsAdapter, adapted, uses_our_experts

# Experts of a mixture whose adapters are added before the output is rounded, as in `lora_linear`.
#
# peft adds `(alpha / r) B A` to the weights, which rounds what is below half an ulp of a weight away: just off B = 0
# a model in bf16 computes as if it had hardly been trained. Here the experts' own product takes it in.


_MULTIPLE = 8
"""Ranks are padded to it with zeros: rows of the kernels' matrices are multiples of 16 bytes."""


class LoraExperts(ParamWrapper):
    """peft's adapter on one parameter of a layer of experts, whose forward is `experts_forward`; peft's own where the
    experts compute otherwise, or the adapter is off or merged."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        experts = self.get_base_layer()
        if not uses_our_experts(experts) or self.disable_adapters or self.merged:
            return super().forward(x, *args, **options)
        (name,) = self.active_adapters
        left, right, scaling = self.get_delta_factors(name)
        rows = -self.r[name] % _MULTIPLE
        left, right = pad(left, (0, rows)), pad(right, (0, 0, 0, rows))
        down, up = (left, right) if experts.is_transposed else (right, left)
        with adapted(experts, self.parameter_name, ExpertsAdapter(down, up, scaling)):
            return self.base_layer(x, *args, **options)


def linear_with_addend(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None, scaling: float) -> Tensor:
    """`x W^T + scaling * addend`, rounded once, `+ bias`; without an addend an ordinary linear layer.

    The bias is rounded separately because a product takes one addend. That costs the accuracy of one more rounding and
    no adapter: the adapter's output varies with the token as the product does, so their rounding errors average out.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]` or None.
        addend: `[..., out]` in the dtype of `x`, or None.

    Returns:
        `[..., out]` in the dtype of `x`.
    """
    if addend is None:
        return nn.functional.linear(x, weight, bias)
    # `beta * addend` joins the fp32 accumulator, in oneDNN (CPU) as in cuBLAS.
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
) -> Tensor | None:
    """The tangent of `linear_with_addend`, without products of tangents that are missing; None where all are.

    PyTorch's own rule replaces a missing tangent by zeros and multiplies by them, which is a third of the work of every
    frozen layer under LoRA.
    """
    found = None
    if d_x is not None:
        found = linear_with_addend(d_x, weight, None, d_addend, scaling)
    elif d_addend is not None:
        found = scaling * d_addend
    if isinstance(d_weight, LowRank):
        inner = nn.functional.linear(x, d_weight.right)
        if found is None:
            found = nn.functional.linear(inner, d_weight.left)
        else:
            found.flatten(0, -2).addmm_(inner.flatten(0, -2), d_weight.left.t())
    elif d_weight is not None:
        if found is None:
            found = nn.functional.linear(x, d_weight)
        else:  # added inside the product, to what is there: one tensor less, and one rounding
            found.flatten(0, -2).addmm_(x.flatten(0, -2), d_weight.t())
    if d_bias is not None:
        found = d_bias.expand(*x.shape[:-1], -1) if found is None else found.add_(d_bias)
    return found


class BaseLinear(nn.Linear):
    """A frozen layer under an adapter. The adapter's output comes to it, because ZeRO-3 gathers its weight when this
    module runs and at no other time."""

    def forward(self, x: Tensor, addend: Tensor | None = None, scaling: float = 1.0) -> Tensor:
        return linear_with_addend(x, self.weight, self.bias, addend, scaling)


class LoraLinear(lora.Linear):
    """peft's adapted layer. In bf16, with the adapter on and not merged, its output is rounded once; otherwise the
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
    """Gives the linear layers of a peft model the forward above, and experts that of `lora_experts`, in place.

    Only their classes change: parameters, names and peft's configuration, and so exported adapters, stay the same.
    """
    for module in adapted.modules():
        if type(module) is lora.Linear and type(module.base_layer) is nn.Linear:
            module.__class__ = LoraLinear
            module.base_layer.__class__ = BaseLinear
        elif type(module) is lora.layer.ParamWrapper:
            module.__class__ = LoraExperts
