"""Attention of a forward that has both a graph and tangents: the tangent is beside the graph, and none of it in it."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from transformers import AttentionInterface

from vcore_ds.models.attention import (
    FUSED_ATTENTION,
    RowLayout,
    as_wide,
    attend_on_cpu,
    attend_with_graph,
    attend_with_tangents,
    by_sequence,
    causal_attention,
    hugging_face_attention,
)
from vcore_ds.models.block_attention import block_attention_tangent
from vcore_ds.models.dual_numbers import make_dual
from vcore_ds.models.sequence_exchange import to_heads, to_tokens


def attend_with_graph_beside_tangents(
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """The output and graph of `attend_with_graph`, with a tangent that has none; see `hugging_face_attention`.

    Its value is always that of the training kernel, within activation checkpoints too: the loss of such a forward is
    that of plain fine-tuning, bit for bit, and what the backward recomputes is what the forward had.
    """
    primals: Sequence[Tensor]
    tangents: Sequence[Tensor | None]
    primals, tangents = zip(*(forward_ad.unpack_dual(x) for x in (query, key, value)), strict=True)
    if all(tangent is None for tangent in tangents):
        return attend_with_graph(query, key, value, layout, scaling, sliding_window)
    k, value_dim = layout.sequence_parallel, value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    primals = to_heads([*primals[:2], as_wide(primals[2], primals[1])], k)
    with torch.no_grad():
        wide = [None if tangent is None else as_wide(tangent, primals[1]) for tangent in tangents]
        exchanged = iter(to_heads([tangent for tangent in wide if tangent is not None], k))
        tangents = [None if tangent is None else next(exchanged) for tangent in wide]
    output, d_output = _value_and_tangent(primals, tangents, layout, scale, sliding_window)
    (output,) = to_tokens([output[..., :value_dim]], k)
    with torch.no_grad():
        (d_output,) = to_tokens([d_output[..., :value_dim]], k)
        d_output = d_output.transpose(1, 2).contiguous()
    return make_dual(output.transpose(1, 2).contiguous(), d_output)


def _value_and_tangent(
    primals: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    layout: RowLayout,
    scale: float,
    sliding_window: int | None,
) -> tuple[Tensor, Tensor]:
    """`[b, A, T, D]` with a graph where gradients are enabled, and its tangent without one."""
    has_log_sum_exp = primals[0].device.type == "cpu" and (sliding_window is None or layout.longest <= sliding_window)
    if not has_log_sum_exp:
        query, key, value = primals
        output = causal_attention(query, key, value, layout, scale, sliding_window)
        with torch.no_grad():
            _, d_output = attend_with_tangents([x.detach() for x in primals], tangents, layout, scale, sliding_window)
        assert d_output is not None  # as there is a tangent
        return output, d_output
    # What `causal_attention` gives on a CPU, and what it keeps to itself there.
    output, log_sum_exp = by_sequence(partial(attend_on_cpu, scale=scale), primals, layout)
    with torch.no_grad():
        d_output = torch.empty_like(output)
        for rows, columns in layout.sequences():
            query, key, value = (x.detach()[rows, :, columns] for x in primals)
            d_query, d_key, d_value = (None if x is None else x.detach()[rows, :, columns] for x in tangents)
            d_output[rows, :, columns] = block_attention_tangent(
                query,
                key,
                value,
                (d_query, d_key, d_value),
                output.detach()[rows, :, columns],
                log_sum_exp[rows, :, columns],
                scale=scale,
            )
    return output, d_output


AttentionInterface.register(FUSED_ATTENTION, hugging_face_attention(attend_with_graph_beside_tangents))
