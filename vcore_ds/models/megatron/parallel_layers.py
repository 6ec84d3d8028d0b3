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
from torch.nn.functional import embedding

from vcore_ds.distributed import layout
from vcore_ds.models.lora_linear import linear_sum, linear_tangent
from vcore_ds.models.megatron.adapters import Adapter, column_addends, row_addend
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
        self.adapters = nn.ModuleDict()

    def forward(self, x: Tensor) -> list[Tensor]:
        addends, scaling, flat = column_addends(self.adapters, x), 1.0, []
        for name in self.names:
            (weight, d_weight), (bias, d_bias) = (value_and_tangent(self, n) for n in (name, f"{name}_bias"))
            addend, d_addend = None, None
            if name in addends:
                addend, d_addend = forward_ad.unpack_dual(addends[name])
                scaling = self.adapters[name].scaling
            flat += [weight, bias, addend, d_weight, d_bias, d_addend]
        found = _ColumnProducts.apply(scaling, *forward_ad.unpack_dual(x), *flat)
        return [dual_or_plain(*pair) for pair in zip(found[::2], found[1::2], strict=True)]


class RowLinear(RowParallelLinear):
    """All outputs of this rank's tokens: `[t, b, I / n]` to `[t / n, b, O]`, without a bias. A collective."""

    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        self.adapter: Adapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        addend, d_addend = row_addend(self.adapter, x), None
        if addend is not None:
            addend, d_addend = forward_ad.unpack_dual(addend)
        scaling = 1.0 if self.adapter is None else self.adapter.scaling
        value, d_value = forward_ad.unpack_dual(x)
        weight, d_weight = value_and_tangent(self, "weight")
        return dual_or_plain(*_RowProduct.apply(scaling, value, weight, addend, d_value, d_weight, d_addend))


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


class _ColumnProducts(torch.autograd.Function):
    """`x W^T + scaling * addend + b` of the tokens of all ranks, for each of several layers, whose weight, bias and
    addend, and the tangents of the three, follow one another. Keeps this rank's tokens for the backward, and gathers
    them again."""

    @staticmethod
    def forward(
        ctx: Any, scaling: float, x: Tensor, d_x: Tensor | None, *layers: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)  # or zeros would be made for each tangent
        ctx.save_for_backward(x, *layers[::6])
        ctx.scaling = scaling
        whole, d_whole = all_tokens(x, d_x)
        found: list[Tensor | None] = []
        for weight, bias, addend, d_weight, d_bias, d_addend in zip(*(layers[i::6] for i in range(6)), strict=True):
            tangents = dict(d_x=d_whole, d_weight=d_weight, d_bias=d_bias, d_addend=d_addend)
            found.append(linear_sum(whole, weight, bias, addend, scaling))
            found.append(linear_tangent(whole, weight, **tangents, scaling=scaling))
        ctx.mark_non_differentiable(*(d_out for d_out in found[1::2] if d_out is not None))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        _, needs_x, _, *needs = ctx.needs_input_grad
        whole = all_tokens(x)[0].flatten(0, -2) if any(needs[::6]) else None
        by_x, found = None, []
        for i, weight in enumerate(weights):
            by_out, (needs_weight, needs_bias, needs_addend) = gradients[2 * i], needs[6 * i : 6 * i + 3]
            gradient = by_out.flatten(0, -2)
            if needs_x:
                by_x = gradient @ weight if by_x is None else by_x.addmm_(gradient, weight)
            found += [
                gradient.t() @ whole if needs_weight else None,
                gradient.sum(0) if needs_bias else None,
                ctx.scaling * by_out if needs_addend else None,
                *(None,) * 3,
            ]
        del whole
        if by_x is not None:
            by_x = own_tokens(by_x.view(-1, *x.shape[1:]))[0]
        return None, by_x, None, *found


class _RowProduct(torch.autograd.Function):
    """This rank's tokens of the sum of `x W^T + scaling * addend` over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        scaling: float,
        x: Tensor,
        weight: Tensor,
        addend: Tensor | None,
        d_x: Tensor | None,
        d_weight: Tensor | None,
        d_addend: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.scaling = scaling
        if d_x is None and d_weight is None and d_addend is None:
            return own_tokens(linear_sum(x, weight, None, addend, scaling))[0], None
        # Each product goes to its place in what is sent before the next one is made.
        sent = x.new_empty(layout.size("tensor"), 2, len(x) // layout.size("tensor"), x.shape[1], len(weight))
        tangents = dict(d_x=d_x, d_weight=d_weight, d_addend=d_addend)
        sent[:, 0] = linear_sum(x, weight, None, addend, scaling).view(sent[:, 0].shape)
        sent[:, 1] = linear_tangent(x, weight, **tangents, scaling=scaling).view(sent[:, 1].shape)
        out, d_out = own_of_both(sent)
        ctx.mark_non_differentiable(d_out)
        return out, d_out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, needs_addend, *_ = ctx.needs_input_grad
        whole = all_tokens(gradient)[0]
        return (
            None,
            whole @ weight if needs_x else None,
            whole.flatten(0, -2).t() @ x.flatten(0, -2) if needs_weight else None,
            ctx.scaling * whole if needs_addend else None,
            *(None,) * 3,
        )
