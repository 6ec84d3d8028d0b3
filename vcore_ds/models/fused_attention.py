"""Attention of a forward that has both a graph and tangents: the tangent is beside the graph, and none of it in it."""

import torch
from torch import Tensor
from transformers import AttentionInterface

from vcore_ds.models.attention import (
    FUSED_ATTENTION,
    Parts,
    Scoring,
    attend_with_graph,
    attend_with_tangents,
    by_sequence,
    causal_attention,
    hugging_face_attention,
)
from vcore_ds.models.block_attention import block_attention_tangent
from vcore_ds.models.flash_attention import CpuFlash, flash_attention
from vcore_ds.models.row_layout import RowLayout


def attend_with_graph_beside_tangents(
    primals: Parts, tangents: Parts, layout: RowLayout, scoring: Scoring
) -> tuple[Tensor, Tensor | None]:
    """The output and graph of `attend_with_graph`, and a tangent that has none.

    The value is always that of the training kernel, within activation checkpoints too: the loss of such a forward is
    that of plain fine-tuning, bit for bit, and what the backward recomputes is what the forward had.
    """
    if all(tangent is None for tangent in tangents):
        return attend_with_graph(primals, tangents, layout, scoring)
    (query, key, value, sink), (d_query, d_key, d_value, d_sink) = primals, tangents
    assert query is not None and key is not None and value is not None
    is_windowed = scoring.sliding_window is not None and layout.longest > scoring.sliding_window
    if query.device.type != "cpu" or is_windowed or scoring.softcap is not None:
        output = causal_attention(primals, layout, scoring)
        with torch.no_grad():
            detached = [None if x is None else x.detach() for x in primals]
            _, d_output = attend_with_tangents(detached, tangents, layout, scoring)
        return output, d_output

    # What `causal_attention` gives on a CPU, and the log-sum-exp that it keeps to itself.
    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attention(query, key, value, sink, CpuFlash(scoring.scale))

    output, log_sum_exp = by_sequence(attend, (query, key, value), layout)
    sinks = None if sink is None else (sink.detach(), d_sink)
    with torch.no_grad():
        d_output = torch.empty_like(output)
        for rows, columns in layout.sequences():
            q, k, v, out = (x.detach()[rows, :, columns] for x in (query, key, value, output))
            d_parts = [None if x is None else x.detach()[rows, :, columns] for x in (d_query, d_key, d_value)]
            d_output[rows, :, columns] = block_attention_tangent(
                q, k, v, d_parts, out, log_sum_exp[rows, :, columns], scale=scoring.scale, sinks=sinks
            )
    return output, d_output


AttentionInterface.register(FUSED_ATTENTION, hugging_face_attention(attend_with_graph_beside_tangents))
