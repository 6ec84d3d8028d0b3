"""Attention of a forward that has both a graph and tangents: the tangent is beside the graph, and none of it in it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from transformers import AttentionInterface

from vcore_ds.models.attention import (
    FUSED_ATTENTION,
    RowLayout,
    as_wide,
    attend_with_tangents,
    causal_attention,
    check_call,
    forward_mode_attention,
    training_attention,
)
from vcore_ds.models.block_attention import block_attention
from vcore_ds.models.dual_numbers import make_dual
from vcore_ds.models.sequence_exchange import to_heads, to_tokens


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    row_layout: RowLayout | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface, see `training_attention`: its output and graph, with a tangent that has none.

    Where gradients are disabled, as within an activation checkpoint, it is `forward_mode_attention`.
    """
    layout = check_call(module, attention_mask, row_layout, softcap, s_aux)
    primals, tangents = zip(*(forward_ad.unpack_dual(x) for x in (query, key, value)), strict=True)
    if not torch.is_grad_enabled() or all(tangent is None for tangent in tangents):
        plain = forward_mode_attention if not torch.is_grad_enabled() else training_attention
        return plain(module, query, key, value, None, scaling, sliding_window, row_layout=layout)
    k, value_dim = layout.sequence_parallel, value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    primals = to_heads([*primals[:2], as_wide(primals[2], primals[1])], k)
    with torch.no_grad():
        wide = [None if tangent is None else as_wide(tangent, primals[1]) for tangent in tangents]
        exchanged = iter(to_heads([tangent for tangent in wide if tangent is not None], k))
        tangents = [None if tangent is None else next(exchanged) for tangent in wide]
    if _blocks_serve(primals[0], layout, sliding_window):
        output, d_output = _BlockAttention.apply(*primals, *tangents, layout, scale)
    else:
        output = causal_attention(*primals, layout, scale, sliding_window)
        with torch.no_grad():
            _, d_output = attend_with_tangents([x.detach() for x in primals], tangents, layout, scale, sliding_window)
    (output,) = to_tokens([output[..., :value_dim]], k)
    with torch.no_grad():
        (d_output,) = to_tokens([d_output[..., :value_dim]], k)
        d_output = d_output.transpose(1, 2).contiguous()
    return make_dual(output.transpose(1, 2).contiguous(), d_output), None


def _blocks_serve(query: Tensor, layout: RowLayout, sliding_window: int | None) -> bool:
    """Whether the value may come with the tangent: where a backward exists that takes another forward's results."""
    return query.device.type == "cpu" and (sliding_window is None or layout.longest <= sliding_window)


class _BlockAttention(torch.autograd.Function):
    """Value and tangent in one pass over blocks, which a CPU computes as fast as the fused kernel does the value; the
    gradient by that kernel's backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        d_query: Tensor | None,
        d_key: Tensor | None,
        d_value: Tensor | None,
        layout: RowLayout,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        output, d_output = torch.empty_like(query), torch.empty_like(query)
        accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
        log_normalizers = torch.empty(query.shape[:3], dtype=accumulate)
        for rows, columns in layout.sequences():
            output[rows, :, columns], d_output[rows, :, columns] = block_attention(
                *_parts((query, key, value), rows, columns),
                tuple(_parts((d_query, d_key, d_value), rows, columns)),
                scale=scale,
                log_normalizers=log_normalizers[rows, :, columns],
            )
        ctx.save_for_backward(query, key, value, output, log_normalizers)
        ctx.layout, ctx.scale = layout, scale
        ctx.mark_non_differentiable(d_output)
        return output, d_output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in saved[:3]]
        for rows, columns in ctx.layout.sequences():
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[rows, :, columns], *_parts(saved, rows, columns), 0.0, True, scale=ctx.scale
            )
            for whole, own in zip(gradients, found, strict=True):
                whole[rows, :, columns] = own
        return *gradients, *(None,) * 5


def _parts(tensors: Sequence[Tensor | None], rows: slice, columns: slice) -> list[Any]:
    return [None if x is None else x[rows, :, columns] for x in tensors]


AttentionInterface.register(FUSED_ATTENTION, fused_attention)
