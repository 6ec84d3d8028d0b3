"""Norms of the decoder layers, whose weight all ranks of a tensor group have. Its gradient is a part of a sum on each:
that of the rank's own tokens or heads.

On a GPU where TransformerEngine is installed, its kernels compute values and gradients. Elsewhere PyTorch does, as
Hugging Face's models do, to the last bit. One rule gives the tangents of both: TransformerEngine's kernels have none,
and PyTorch's own differentiates one small operation after the other.
"""

import importlib.util

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from transformers.modeling_utils import local_torch_dtype

from vcore_ds.distributed.device import uses_gpu
from vcore_ds.errors import UserError
from vcore_ds.models.dual_numbers import value_and_tangent
from vcore_ds.models.megatron.configuration import TransformerConfig
from vcore_ds.models.megatron.token_exchange import dual_or_plain


class TakesDualNumbers(nn.Module):
    """Put before the class of a norm of plain numbers, it takes values from that class and tangents from
    `rms_norm_tangent`.

    The class needs `weight`, `eps` and a forward. That may be an autograd Function without a rule for tangents, and its
    backward may read the weight from the module again.
    """

    weight: nn.Parameter
    eps: float

    def forward(self, hidden: Tensor) -> Tensor:
        value, d_value = forward_ad.unpack_dual(hidden)
        weight, d_weight = value_and_tangent(self, "weight")
        is_reference = weight.dtype == torch.float64  # a pass for which there may be no kernel
        found = rms_norm(value, weight, self.eps) if is_reference else self._plain(value, weight)
        return dual_or_plain(found, rms_norm_tangent(value, weight, self.eps, d_x=d_value, d_weight=d_weight))

    def _plain(self, x: Tensor, weight: Tensor) -> Tensor:
        # While the module runs, its weight may be hidden by a dual number (`vcore_ds.utility.forward_mode`), in whose
        # place the forward finds that number's value.
        stand_in = self.__dict__.get("weight")
        if stand_in is None:
            return super().forward(x)
        self.__dict__["weight"] = weight
        try:
            return super().forward(x)
        finally:
            self.__dict__["weight"] = stand_in


class PlainRMSNorm(nn.Module):
    """Root mean square norm of the last dimension, in PyTorch's operations."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class RMSNorm(TakesDualNumbers, PlainRMSNorm):
    """The norm where TransformerEngine is not used."""


def norm(config: TransformerConfig, size: int) -> nn.Module:
    """An RMSNorm of `size` features.

    Raises:
        UserError: see `norm_class`.
    """
    with local_torch_dtype(config.params_dtype):
        return norm_class()(size, config.layernorm_epsilon)


def norm_class() -> type[nn.Module]:
    """The class of the norms: TransformerEngine's on a GPU where it is installed.

    Raises:
        UserError: it is installed, and cannot be imported.
    """
    if not uses_gpu() or importlib.util.find_spec("transformer_engine") is None:
        return RMSNorm
    try:
        from vcore_ds.models.megatron.transformer_engine_norm import TransformerEngineNorm
    except Exception as error:  # its libraries raise whatever they find missing
        raise UserError(
            f"model.provider: found megatron and TransformerEngine, which cannot be imported ({type(error).__name__}: "
            f"{error}); expected a build for torch {torch.__version__} (pip install --no-build-isolation "
            "'transformer_engine[pytorch]'), or none: without it PyTorch computes the norms (pip uninstall "
            "transformer_engine)"
        ) from error
    return TransformerEngineNorm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`w x / sqrt(mean(x^2) + eps)` over the last dimension, rounded where Hugging Face's models round, in fp32 or the
    dtype of `x` where it is the more precise one.

    Args:
        x: `[..., size]`.
        weight: `[size]`, of the dtype of `x`.
    """
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (exact * _inverse_root_mean_square(exact, eps)).to(x.dtype)


@torch.no_grad()
def rms_norm_tangent(
    x: Tensor, weight: Tensor, eps: float, *, d_x: Tensor | None = None, d_weight: Tensor | None = None
) -> Tensor | None:
    """The tangent of `rms_norm`, without a graph; None where all tangents are missing.

    With `r = 1 / sqrt(mean(x^2) + eps)` and `n = r x`, that of n is `r (dx - n mean(n dx))`.
    """
    if d_x is None and d_weight is None:
        return None
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = _inverse_root_mean_square(exact, eps)
    normalized, found = exact * inverse, None
    if d_x is not None:
        d_exact = d_x.to(exact.dtype)
        along = (normalized * d_exact).mean(-1, keepdim=True)
        d_normalized = torch.addcmul(d_exact, normalized, along, value=-1).mul_(inverse)
        found = weight * d_normalized.to(x.dtype)
    if d_weight is not None:
        of_weight = d_weight * normalized.to(x.dtype)
        found = of_weight if found is None else found.add_(of_weight)
    return found


def _inverse_root_mean_square(exact: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
