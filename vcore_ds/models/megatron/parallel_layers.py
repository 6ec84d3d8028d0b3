"""megatron-core's parallel layers with forwards that take dual numbers.

megatron-core decides which part of a weight a rank has, and makes it. Its own forwards end in autograd Functions
without a rule for tangents, and take their buffers from a global one on the current CUDA device. The forwards here run
wherever PyTorch runs, and compute the same value with tangents as without, so that one forward can serve for losses
and utilities (`vcore_ds.utility.fused_forward`).

Between layers a rank has a part of the tokens, see `token_exchange`. Shapes as there; I input, O output size.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from vcore_ds.distributed import layout
from vcore_ds.models.megatron.token_exchange import (
    all_tokens,
    dual_or_plain,
    own_of_both,
    own_tokens,
    scatter_tokens,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer.transformer_config import TransformerConfig


class ColumnLinears(nn.Module):
    """Linear layers with the same input, a part of the outputs of each for all tokens: `[t / n, b, I]` to
    `[t, b, O / n]`. A collective: the tokens are gathered once.

    A parameter has the name of its layer, a bias that name and `_bias`. Each layer has a weight of its own, so that an
    output is released as soon as it is used.
    """

    def __init__(
        self, config: TransformerConfig, num_inputs: int, num_outputs: Mapping[str, int], *, bias: bool = False
    ):
        """`num_outputs`: of all ranks, by the layer's name."""
        super().__init__()
        self.names = tuple(num_outputs)
        for name in self.names:
            made = ColumnParallelLinear(
                num_inputs,
                num_outputs[name],
                config=config,
                init_method=nn.init.zeros_,
                bias=bias,
                tp_group=layout.group("tensor"),
            )
            self.register_parameter(name, made.weight)
            self.register_parameter(f"{name}_bias", made.bias)

    def forward(self, x: Tensor) -> list[Tensor]:
        flat = []
        for name in self.names:
            (weight, d_weight), (bias, d_bias) = (value_and_tangent(self, n) for n in (name, f"{name}_bias"))
            flat += [weight, bias, d_weight, d_bias]
        found = _ColumnProducts.apply(*forward_ad.unpack_dual(x), *flat)
        return [dual_or_plain(*pair) for pair in zip(found[::2], found[1::2], strict=True)]


class RowLinear(RowParallelLinear):
    """All outputs of this rank's tokens: `[t, b, I / n]` to `[t / n, b, O]`, without a bias. A collective."""

    def forward(self, x: Tensor) -> Tensor:
        value, d_value = forward_ad.unpack_dual(x)
        weight, d_weight = value_and_tangent(self, "weight")
        return dual_or_plain(*_RowProduct.apply(value, weight, d_value, d_weight))


class TokenEmbedding(VocabParallelEmbedding):
    """`[b, t]` ids to `[t / n, b, H]`, of which each rank knows the rows of some tokens. A collective."""

    def forward(self, ids: Tensor) -> Tensor:
        weight, d_weight = value_and_tangent(self, "weight")
        ids = ids.t()
        is_other = (ids < self.vocab_start_index) | (ids >= self.vocab_end_index)
        rows = (ids - self.vocab_start_index).masked_fill(is_other, 0)
        partial = embedding(rows, weight).masked_fill(is_other[..., None], 0.0)
        d_partial = None
        if d_weight is not None:
            with torch.no_grad():
                d_partial = embedding(rows, d_weight).masked_fill(is_other[..., None], 0.0)
        return scatter_tokens(dual_or_plain(partial, d_partial))


def value_and_tangent(module: nn.Module, name: str) -> tuple[Tensor | None, Tensor | None]:
    """A parameter of a module that runs, and its tangent, if any.

    With a graph the value is the parameter itself: a view of it, as a dual number's value is, would keep the memory of
    the gathered parameter until the backward.
    """
    found = getattr(module, name)
    if found is None:
        return None, None
    value, tangent = forward_ad.unpack_dual(found)
    return module._parameters[name] if torch.is_grad_enabled() else value, tangent


def product_tangent(x: Tensor, weight: Tensor, d_x: Tensor | None, d_weight: Tensor | None) -> Tensor | None:
    """The tangent of `x W^T`, without a graph; None where neither has one."""
    found = None if d_x is None else linear(d_x, weight)
    if d_weight is None:
        return found
    if found is None:
        return linear(x, d_weight)
    found.flatten(0, -2).addmm_(x.flatten(0, -2), d_weight.t())  # added inside the product, to what is there
    return found


class _ColumnProducts(torch.autograd.Function):
    """`x W^T + b` of the tokens of all ranks, for each of several layers, whose weight, bias and their tangents follow
    one another. Keeps this rank's tokens for the backward, and gathers them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, d_x: Tensor | None, *layers: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)  # or zeros would be made for each tangent
        ctx.save_for_backward(x, *layers[::4])
        whole, d_whole = all_tokens(x, d_x)
        found: list[Tensor | None] = []
        for weight, bias, d_weight, d_bias in zip(*(layers[i::4] for i in range(4)), strict=True):
            out, d_out = linear(whole, weight, bias), product_tangent(whole, weight, d_whole, d_weight)
            if d_bias is not None:
                d_out = d_bias.expand_as(out) if d_out is None else d_out + d_bias
            found += [out, d_out]
        ctx.mark_non_differentiable(*(d_out for d_out in found[1::2] if d_out is not None))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        whole = all_tokens(x)[0].flatten(0, -2) if any(needs[::4]) else None
        by_x, found = None, []
        for i, weight in enumerate(weights):
            gradient = gradients[2 * i].flatten(0, -2)
            if needs_x:
                by_x = gradient @ weight if by_x is None else by_x.addmm_(gradient, weight)
            by_weight = None if whole is None or not needs[4 * i] else gradient.t() @ whole
            found += [by_weight, gradient.sum(0) if needs[4 * i + 1] else None, None, None]
        if by_x is not None:
            del whole
            by_x = own_tokens(by_x.view(-1, *x.shape[1:]))[0]
        return by_x, None, *found


class _RowProduct(torch.autograd.Function):
    """This rank's tokens of the sum of `x W^T` over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, d_x: Tensor | None, d_weight: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        if d_x is None and d_weight is None:
            return own_tokens(linear(x, weight))[0], None
        # Each product goes to its place in what is sent before the next one is made.
        sent = x.new_empty(layout.size("tensor"), 2, len(x) // layout.size("tensor"), x.shape[1], len(weight))
        sent[:, 0] = linear(x, weight).view(sent[:, 0].shape)
        sent[:, 1] = product_tangent(x, weight, d_x, d_weight).view(sent[:, 1].shape)
        out, d_out = own_of_both(sent)
        ctx.mark_non_differentiable(d_out)
        return out, d_out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        whole = all_tokens(gradient)[0]
        return (
            whole @ weight if needs_x else None,
            whole.flatten(0, -2).t() @ x.flatten(0, -2) if needs_weight else None,
            None,
            None,
        )
