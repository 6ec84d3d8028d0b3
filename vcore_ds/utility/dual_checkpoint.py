"""An activation checkpoint whose forward carries tangents."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from vcore_ds.errors import UserError
from vcore_ds.models.dual_numbers import make_dual

Layer = Callable[..., Any]


def checkpoint_with_tangent(layer: Layer, x: Tensor, *others: Any) -> Any:
    """`layer(x, *others)` with only `x` kept for the backward, which runs the layer again without tangents.

    Stands in for the function that Hugging Face's layers call when their activations are checkpointed. The forward
    builds no graph, so the layer's tangents live no longer than the layer.

    Args:
        x: hidden states `[b, t, H]`, dual where the layers below have tangents.
        others: what else the layer takes; nothing that needs a gradient.

    Raises UserError where something else needs one, whose graph every layer would run through again, or where the
    layer gives further activations (Zaya), whose gradient would be lost.
    """
    named = layer.keywords.values() if isinstance(layer, partial) else ()
    if any(isinstance(other, Tensor) and other.requires_grad for other in (*others, *named)):
        raise _not_recomputed()
    value, tangent = forward_ad.unpack_dual(x)
    with torch.no_grad():
        start = value.detach()
        result = layer(start if tangent is None else forward_ad.make_dual(start, tangent.detach()), *others)
        if isinstance(result, tuple) and any(isinstance(x, Tensor) and x.is_floating_point() for x in result[1:]):
            raise _not_recomputed()
        y, d_y = forward_ad.unpack_dual(_hidden(result))
    # A view of the dual result would keep its tangent.
    y = _Recomputed.apply(value, y.data, lambda again: _hidden(layer(again, *others)))
    y = y if d_y is None else make_dual(y, d_y.detach())
    return (y, *result[1:]) if isinstance(result, tuple) else y


def _not_recomputed() -> UserError:
    return UserError(
        "utility.fused: the layers of this architecture exchange activations beside their input and output, which the "
        "forward with a graph and tangents cannot recompute; expected false (utility.fused=false)"
    )


def _hidden(result: Any) -> Tensor:
    """Hidden states that a layer gives, of some architectures (Falcon-H1, Bamba) in a tuple, the rest of it None."""
    return result[0] if isinstance(result, tuple) else result


class _Recomputed(torch.autograd.Function):
    """`y`, as if `layer` had been differentiated when it was computed from `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, layer: Layer) -> Tensor:
        # A view of a dual number would keep its tangent until the dual level ends.
        ctx.save_for_backward(x.data)
        ctx.layer = layer
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.layer(x)
        torch.autograd.backward(y, d_y)
        return x.grad, None, None
