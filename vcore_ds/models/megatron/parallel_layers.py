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

from vcore_ds.common.imports import without_compiler
from vcore_ds.distributed import layout
from vcore_ds.models.dual_tensors import unpack_parameter
from vcore_ds.models.lora_linear import linear_tangent, linear_with_addend
from vcore_ds.models.megatron.adapters import (
    Adapter,
    Addend,
    addend_gradients,
    column_addends,
    expanded,
    expanded_tangent,
    row_addend,
)
from vcore_ds.models.megatron.token_exchange import (
    all_gather_tokens,
    make_dual_if_any,
    reduce_scatter_both,
    reduce_scatter_tokens,
    scatter_tokens,
)

with warnings.catch_warnings(), without_compiler():
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
            weight, d_weight = unpack_parameter(self, name)
            has_bias = getattr(self, f"{name}_bias") is not None
            bias, d_bias = unpack_parameter(self, f"{name}_bias") if has_bias else (None, None)
            flat += [weight, bias, d_weight, d_bias, *addends.get(name, Addend())]
            if name in addends:
                adapter = self.adapters[name]
                assert isinstance(adapter, Adapter)
                scaling = adapter.scaling
        found = _ColumnMatmuls.apply(scaling, *forward_ad.unpack_dual(x), *flat)
        return [make_dual_if_any(*pair) for pair in zip(found[::2], found[1::2], strict=True)]


class RowLinear(RowParallelLinear):
    """All outputs of this rank's tokens: `[t, b, I / n]` to `[t / n, b, O]`, without a bias. A collective."""

    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, **options)
        self.adapter: Adapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        scaling = 1.0 if self.adapter is None else self.adapter.scaling
        value, d_value = forward_ad.unpack_dual(x)
        pair = unpack_parameter(self, "weight")
        return make_dual_if_any(*_RowMatmul.apply(scaling, value, d_value, *pair, *row_addend(self.adapter, x)))


class TokenEmbedding(VocabParallelEmbedding):
    """`[b, t]` ids to `[t / n, b, H]`, of which each rank knows the rows of some tokens. A collective."""

    def forward(self, ids: Tensor) -> Tensor:
        weight, d_weight = unpack_parameter(self, "weight")
        ids = ids.t()
        is_other = (ids < self.vocab_start_index) | (ids >= self.vocab_end_index)
        rows = (ids - self.vocab_start_index).masked_fill(is_other, 0)
        partial = embedding(rows, weight).masked_fill(is_other[..., None], 0.0)
        d_partial = None
        if d_weight is not None:
            with torch.no_grad():
                d_partial = embedding(rows, d_weight).masked_fill(is_other[..., None], 0.0)
        return scatter_tokens(make_dual_if_any(partial, d_partial))


class _ColumnMatmuls(torch.autograd.Function):
    """`x W^T + scaling * addend + b` of the tokens of all ranks, for each of several layers, of which W and b, their
    tangents, and what makes the addend follow one another. Keeps this rank's tokens for the backward, and gathers them
    again."""

    @staticmethod
    def forward(
        ctx: Any, scaling: float, x: Tensor, d_x: Tensor | None, *layers: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)  # or zeros would be made for each tangent
        ctx.save_for_backward(x, *layers[::8], *layers[4::8], *layers[5::8])
        ctx.scaling = scaling
        whole, d_whole = all_gather_tokens(x, d_x)
        found: list[Tensor | None] = []
        for i in range(0, len(layers), 8):
            weight, bias, d_weight, d_bias = layers[i : i + 4]
            assert weight is not None
            addend = Addend(*layers[i + 4 : i + 8])
            tangents = dict(d_x=d_whole, d_weight=d_weight, d_bias=d_bias)
            # Each addend is released before the next one is made.
            found.append(linear_with_addend(whole, weight, bias, expanded(addend, x.dtype), scaling))
            d_addend = expanded_tangent(addend, x.dtype)
            found.append(linear_tangent(whole, weight, **tangents, d_addend=d_addend, scaling=scaling))
            del d_addend
        ctx.mark_non_differentiable(*(d_out for d_out in found[1::2] if d_out is not None))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        num_layers = len(saved) // 3
        _, needs_x, _, *needs = ctx.needs_input_grad
        whole = all_gather_tokens(x)[0].flatten(0, -2) if any(needs[::8]) else None
        by_x, found = None, []
        for i, (by_out, needs_weight, needs_bias) in enumerate(
            zip(gradients[::2], needs[::8], needs[1::8], strict=True)
        ):
            assert by_out is not None  # the outputs of all layers are used
            weight, reduced, b = saved[i::num_layers]
            gradient = by_out.flatten(0, -2)
            if needs_x:
                by_x = gradient @ weight if by_x is None else by_x.addmm_(gradient, weight)
            by_weight = gradient.t() @ whole if needs_weight and whole is not None else None
            by_addend = addend_gradients(by_out, reduced, b, ctx.scaling)
            found += [by_weight, gradient.sum(0) if needs_bias else None, None, None, *by_addend, None, None]
        del whole
        if by_x is not None:
            by_x = reduce_scatter_tokens(by_x.view(-1, *x.shape[1:]))[0]
        return None, by_x, None, *found


class _RowMatmul(torch.autograd.Function):
    """This rank's tokens of the sum of `x W^T + scaling * addend` over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        scaling: float,
        x: Tensor,
        d_x: Tensor | None,
        weight: Tensor,
        d_weight: Tensor | None,
        *of_adapter: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        addend = Addend(*of_adapter)
        ctx.save_for_backward(x, weight, addend.reduced, addend.b)
        ctx.scaling = scaling
        if d_x is None and d_weight is None and addend.d_reduced is None and addend.d_b is None:
            return reduce_scatter_tokens(linear_with_addend(x, weight, None, expanded(addend, x.dtype), scaling))[
                0
            ], None
        # Each product goes to its place in what is sent before the next one is made.
        sent = x.new_empty(layout.size("tensor"), 2, len(x) // layout.size("tensor"), x.shape[1], len(weight))
        product = linear_with_addend(x, weight, None, expanded(addend, x.dtype), scaling)
        sent[:, 0] = product.view(sent[:, 0].shape)
        del product
        d_addend = expanded_tangent(addend, x.dtype)
        d_product = linear_tangent(x, weight, d_x=d_x, d_weight=d_weight, d_addend=d_addend, scaling=scaling)
        assert d_product is not None  # as there is a tangent
        sent[:, 1] = d_product.view(sent[:, 1].shape)
        del d_product, d_addend
        out, d_out = reduce_scatter_both(sent)
        ctx.mark_non_differentiable(d_out)
        return out, d_out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, reduced, b = ctx.saved_tensors
        _, needs_x, _, needs_weight, *_ = ctx.needs_input_grad
        whole = all_gather_tokens(gradient)[0]
        by_weight = whole.flatten(0, -2).t() @ x.flatten(0, -2) if needs_weight else None
        by_addend = addend_gradients(whole, reduced, b, ctx.scaling)
        return None, whole @ weight if needs_x else None, None, by_weight, None, *by_addend, None, None
