"""Dual numbers whose tangent is gone with them."""

import torch.autograd.forward_ad as forward_ad
from torch import Tensor


def make_dual(value: Tensor, tangent: Tensor) -> Tensor:
    """`forward_ad.make_dual`, without a tangent that outlives the result.

    The result is a view of `value`, and PyTorch gives a view's tangent to what it is a view of. Where a graph keeps
    that, it would keep the tangent too, until the dual level ends. The primal of a dual number is a view that has no
    part in this, so a view of it stands between.
    """
    return forward_ad.make_dual(forward_ad.unpack_dual(value).primal, tangent)
