"""TransformerEngine's RMSNorm for dual numbers. Imported only where its kernels can run: see `norms`."""

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from transformer_engine.pytorch import RMSNorm

from vcore_ds.models.dual_numbers import value_and_tangent
from vcore_ds.models.megatron.norms import rms_norm, rms_norm_tangent
from vcore_ds.models.megatron.token_exchange import dual_or_plain


class TransformerEngineNorm(RMSNorm):
    """The norm of `norms.RMSNorm`, in one kernel each for the value and the gradient. In bf16 it rounds once, where
    PyTorch's operations round the normalized values and their product with the weight."""

    def __init__(self, size: int, eps: float):
        # Without one it takes the current GPU, whatever PyTorch's default device is.
        super().__init__(size, eps=eps, device=torch.empty(0).device)

    def forward(self, hidden: Tensor) -> Tensor:
        value, d_value = forward_ad.unpack_dual(hidden)
        weight, d_weight = value_and_tangent(self, "weight")
        if weight.dtype == torch.float64:  # a pass of reference precision, for which there is no kernel
            found = rms_norm(value, weight, self.eps)
        else:
            found = self._value(value, weight)
        return dual_or_plain(found, rms_norm_tangent(value, weight, self.eps, d_x=d_value, d_weight=d_weight))

    def _value(self, x: Tensor, weight: Tensor) -> Tensor:
        # The kernel's Function has no rule for tangents, and reads the weight from the module. What stands in for it
        # while the module runs (`vcore_ds.utility.forward_mode`) is a dual number, and its value takes that place.
        stand_in = self.__dict__.get("weight")
        if stand_in is None:
            return super().forward(x)
        self.__dict__["weight"] = weight
        try:
            return super().forward(x)
        finally:
            self.__dict__["weight"] = stand_in
