"""Attention of every pass: causal, each sequence of a row by itself, heads shared out over the ranks of a row.

Hugging Face's models find the functions below by name and hand them what the decoder was called with. So the layout of
the rows comes as a keyword argument, and a layer that is recomputed in a backward finds the layout it ran with.

No mask is made. A row of packed sequences under Hugging Face's own attention has one of `[T, T]`, 0.8 GB a call at
16,384 tokens, and loses the fused kernel.

Shapes: b rows, A query heads, K key/value heads, t tokens of a rank, T of a row, D head dimension.
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import to_device
from vcore_ds.models.attention_kernels import (
    TAKES_GROUPED_HEADS,
    CpuFlash,
    CudaFlash,
    explicit_attention,
    flash_attention,
)
from vcore_ds.models.block_attention import block_attention, block_attention_tangent
from vcore_ds.models.dual_tensors import make_dual
from vcore_ds.models.sequence_exchange import exchange_with_tangents, heads_to_tokens, take_local_heads, tokens_to_heads

# Which sequences a batch's rows hold, as attention and other functions of a layer need to know it.


@dataclass(frozen=True)
class RowLayout:
    """The sequences in a batch's rows, and the sequence-parallel degree; made once for each pass."""

    lengths: Sequence[Sequence[int]]
    """Tokens of the sequences in each row, in order; T together. Padding counts as a sequence."""
    sequence_parallel: int
    """Sequence-parallel degree: each rank of a group has `t = T / sequence_parallel` columns of its rows."""
    cu_seqlens: Tensor
    """int32 `[num_sequences + 1]`, on the device: 0, and where each sequence ends in the rows put end to end."""

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[Sequence[int]], sequence_parallel: int, device: torch.device
    ) -> "RowLayout":
        """The layout with its tensor, made on the host: no layer waits for the device to learn it."""
        flat = torch.tensor([0, *(n for row in lengths for n in row)], dtype=torch.int32)
        return cls(lengths, sequence_parallel, to_device(flat.cumsum(0, dtype=torch.int32), device))

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence."""
        return max(n for row in self.lengths for n in row)

    @property
    def is_unpacked(self) -> bool:
        """Whether no row is packed."""
        return all(len(row) == 1 for row in self.lengths)

    def split_into_chunks(self, num_tokens: int) -> "RowLayout":
        """That of the sequences cut into chunks of so many tokens, none of which sees another (Llama 4)."""
        if self.max_seqlen <= num_tokens:
            return self
        lengths = [
            [min(num_tokens, n - start) for n in row for start in range(0, n, num_tokens)] for row in self.lengths
        ]
        return RowLayout.from_lengths(lengths, self.sequence_parallel, self.cu_seqlens.device)

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of what can be computed together: all rows where each is one sequence, else a sequence."""
        if self.is_unpacked:
            yield slice(None), slice(None)
            return
        for row, lengths in enumerate(self.lengths):
            start = 0
            for n in lengths:
                yield slice(row, row + 1), slice(start, start + n)
                start += n


TRAINING_ATTENTION = "vcore_training"
"""Name under which Hugging Face models find `training_attention`."""

FORWARD_MODE_ATTENTION = "vcore_forward_mode"
"""Name under which Hugging Face models find `forward_mode_attention`."""

FUSED_ATTENTION = "vcore_fused"
"""Name under which they find the attention of `vcore_ds.models.attention`."""

OUR_ATTENTION = (TRAINING_ATTENTION, FORWARD_MODE_ATTENTION, FUSED_ATTENTION)
"""Those that know the layout of the rows."""

MAX_KERNEL_HEAD_DIM = 256
"""Beyond it, the sums of a block of queries and of its tangent do not fit the registers of the kernel."""

MAX_FLASH_HEAD_DIM = 256
"""Of PyTorch's flash kernel."""


@dataclass(frozen=True)
class Scoring:
    """How a layer's queries score its keys."""

    scale: float
    """Factor on the scores."""
    sliding_window: int | None = None
    """A query sees this many last keys, itself included; None for all."""
    softcap: float | None = None
    """Scaled scores become `softcap * tanh(scores / softcap)` (Gemma 2); None to leave them."""


Parts = Sequence[Tensor | None]
"""Of query `[b, A, T, D]`, key and value `[b, K, T, D]`, and attention sinks `[A]`: the values, where None stands for
no sinks, or the tangents, where it stands for zero."""

Attend = Callable[[Parts, Parts, RowLayout, Scoring], tuple[Tensor, Tensor | None]]
"""Takes values and tangents; gives the output `[b, A, T, D]` and its tangent, None where all tangents are."""

_NOT_COMPUTED = {
    "position_bias": "adds a bias of positions to its scores",
    "sinks": "has sinks of another kind",
    "indices": "selects the keys of each query",
    "block_indices": "selects the keys of each query",
}
"""What some architectures (Inkling, MiniMax-M3) hand to their attention beside its usual arguments: left out, it would
be silently wrong."""


def hugging_face_attention(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    """Hugging Face's attention interface around `attend`.

    It takes query `[b, A, t, D]`; key and value `[b, K, t, D]`, where the values of some architectures have fewer
    dimensions; and sinks `[A]`: any of them dual numbers. It gives `[b, t, A, D]`, a dual number where an input is, and
    None for the attention weights. It raises UserError where the model makes a mask of its own, or does not hand the
    layout through.
    """

    def attention(
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
        **others: object,
    ) -> tuple[Tensor, None]:
        ignored = next((words for name, words in _NOT_COMPUTED.items() if others.get(name) is not None), None)
        if attention_mask is not None or row_layout is None or ignored is not None:
            no_layout = "does not hand keyword arguments from the decoder to its attention"
            found = ignored or (no_layout if attention_mask is None else "makes an attention mask of its own")
            raise UserError(
                f"model.path: {type(module).__name__} {found}, so attention here cannot take its place; expected "
                "another architecture, or model.attention eager with a method without utilities (methods/sft.yaml)"
            )
        row_layout = _layout_of_layer(module, row_layout)
        k, value_dim = row_layout.sequence_parallel, value.shape[-1]
        scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
        parts = [(x, None) if x is None else forward_ad.unpack_dual(x) for x in (query, key, value, s_aux)]
        (*primals, sinks), (*tangents, d_sinks) = zip(*parts, strict=True)

        def exchange(tensors: Sequence[Tensor]) -> list[Tensor]:
            return tokens_to_heads([_filled_up(x, query.shape[-1]) for x in tensors], k)

        primals, tangents = exchange_with_tangents(exchange, primals, tangents)
        sinks, d_sinks = (None if x is None else take_local_heads(x, k) for x in (sinks, d_sinks))
        output, d_output = attend([*primals, sinks], [*tangents, d_sinks], row_layout, scoring)

        def exchange_back(tensors: Sequence[Tensor]) -> list[Tensor]:
            found = heads_to_tokens([x[..., :value_dim] for x in tensors], k)
            return [x.transpose(1, 2).contiguous() for x in found]

        (output,), (d_output,) = exchange_with_tangents(exchange_back, [output], [d_output])
        return output if d_output is None else make_dual(output, d_output), None

    return attention


def _layout_of_layer(module: Any, layout: RowLayout) -> RowLayout:
    """That of chunks where the tokens of a layer see those of their own alone, which no argument says (Llama 4)."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    if "chunked_attention" not in kinds or kinds[module.layer_idx] != "chunked_attention":
        return layout
    return layout.split_into_chunks(module.config.attention_chunk_size)


def _filled_up(tensor: Tensor, dim: int) -> Tensor:
    """With zeros to `dim` dimensions a head: latent attention (DeepSeek) has fewer for values. So queries, keys and
    values travel together, and the flash kernel takes them."""
    missing = dim - tensor.shape[-1]
    return nn.functional.pad(tensor, (0, missing)) if missing else tensor


def attend_with_graph(
    primals: Parts, tangents: Parts, layout: RowLayout, scoring: Scoring
) -> tuple[Tensor, Tensor | None]:
    """By the fused kernels, for passes with a gradient. There must be no tangent, which would be lost."""
    assert all(x is None for x in tangents)
    return causal_attention(primals, layout, scoring), None


def causal_attention(primals: Parts, layout: RowLayout, scoring: Scoring) -> Tensor:
    """Attention within each sequence, `[b, A, T, D]`, differentiable."""
    query, key, value, sinks = primals
    assert query is not None and key is not None and value is not None
    if scoring.softcap is None and _can_use_flash(query):
        if not TAKES_GROUPED_HEADS:
            key, value = _for_each_query_head(query, key, value)
        kernel = CudaFlash(scoring.scale, scoring.sliding_window, layout.cu_seqlens, layout.max_seqlen)
        return flash_attention(query, key, value, sinks, kernel)[0]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor]:
        return (_attend(query, key, value, sinks, scoring),)

    (output,) = apply_per_sequence(attend, (query, key, value), layout)
    return output


def _can_use_flash(query: Tensor) -> bool:
    """Whether PyTorch's flash kernel over variable lengths can take it: unlike `scaled_dot_product_attention` it does
    not fill up head dimensions itself."""
    head_dim = query.shape[-1]
    is_served = query.dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= MAX_FLASH_HEAD_DIM
    return query.is_cuda and is_served


def _for_each_query_head(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Keys or values `[b, K, T, D]` repeated to `[b, A, T, D]`, as they are where each query head has its own."""
    num_heads = query.shape[1]
    return [x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1) for x in tensors]


def apply_per_sequence(
    attend: Callable[..., Sequence[Tensor]], primals: Sequence[Tensor], layout: RowLayout
) -> Sequence[Tensor]:
    """What `attend` gives of rows of one sequence each, for every sequence of the layout, put together as they lie.

    Args:
        attend: takes query, key and value; its results have the tokens in their third dimension.
    """
    if layout.is_unpacked:
        return attend(*primals)
    rows = []
    for row, lengths in enumerate(layout.lengths):
        parts = zip(*(x[row : row + 1].split(list(lengths), 2) for x in primals), strict=True)
        rows.append([torch.cat(found, 2) for found in zip(*(attend(*part) for part in parts), strict=True)])
    return [torch.cat(found) for found in zip(*rows, strict=True)]


def _attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scoring: Scoring) -> Tensor:
    """Rows of one sequence each, by what there is for any device and precision."""
    sees_all = scoring.sliding_window is None or query.shape[2] <= scoring.sliding_window
    if sees_all and scoring.softcap is None:
        if query.device.type == "cpu":
            return flash_attention(query, key, value, sinks, CpuFlash(scoring.scale))[0]
        if sinks is None:
            # The memory-efficient kernel, the one for fp32 on a GPU, takes no grouped heads (enable_gqa): with them
            # PyTorch would fall back to products that hold all scores, [A, T, T].
            key, value = _for_each_query_head(query, key, value)
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scoring.scale)
    return explicit_attention(query, key, value, sinks=sinks, **vars(scoring))


def attend_with_tangents(
    primals: Parts, tangents: Parts, layout: RowLayout, scoring: Scoring
) -> tuple[Tensor, Tensor | None]:
    """For passes without a gradient: one kernel for all rows where there is one, else in blocks by sequence."""
    (query, key, value, sink), (d_query, d_key, d_value, d_sink) = primals, tangents
    assert query is not None and key is not None and value is not None
    if scoring.softcap is not None:
        duals = [x if x is None or dx is None else make_dual(x, dx) for x, dx in zip(primals, tangents, strict=True)]
        output, d_output = forward_ad.unpack_dual(causal_attention(duals, layout, scoring))
        return output, d_output
    sinks = None if sink is None else (sink, d_sink)
    if _can_use_triton(query):
        from vcore_ds.models.flash_tangent import flash_tangent  # here alone, as it needs Triton

        output, d_output, _ = flash_tangent(
            query,
            key,
            value,
            (d_query, d_key, d_value),
            cu_seqlens=layout.cu_seqlens,
            max_seqlen=layout.max_seqlen,
            scale=scoring.scale,
            sliding_window=scoring.sliding_window,
            sinks=sinks,
        )
        return output, d_output

    in_blocks = functools.partial(
        block_attention, scale=scoring.scale, sliding_window=scoring.sliding_window, sinks=sinks
    )
    if layout.is_unpacked:
        return in_blocks(query, key, value, (d_query, d_key, d_value))
    output = torch.empty_like(query)
    d_output = None if all(tangent is None for tangent in tangents) else torch.empty_like(output)
    for rows, columns in layout.sequences():
        q, k, v = (x[rows, :, columns] for x in (query, key, value))
        d_parts = [None if dx is None else dx[rows, :, columns] for dx in (d_query, d_key, d_value)]
        found, d_found = in_blocks(q, k, v, d_parts)
        output[rows, :, columns] = found
        if d_output is not None and d_found is not None:
            d_output[rows, :, columns] = d_found
    return output, d_output


def _can_use_triton(query: Tensor) -> bool:
    """Whether `flash_tangent` can take it, and should: products in fp32 are faster and as precise in blocks."""
    runs_kernels = query.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter, on CPUs
    is_served = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= MAX_KERNEL_HEAD_DIM
    return runs_kernels and is_served and _has_triton()


@functools.cache
def _has_triton() -> bool:
    """PyTorch's CUDA wheels bring it, its CPU wheels do not."""
    return importlib.util.find_spec("triton") is not None


training_attention = hugging_face_attention(attend_with_graph)
forward_mode_attention = hugging_face_attention(attend_with_tangents)
# Additions under names of our own: no other model of the process is changed. No mask function is registered under them,
# so Hugging Face makes no mask, and does not look at positions for packed rows, which would wait for the device.
AttentionInterface.register(TRAINING_ATTENTION, training_attention)
AttentionInterface.register(FORWARD_MODE_ATTENTION, forward_mode_attention)


# Attention of a forward that has both a graph and tangents: the tangent is beside the graph, and none of it in it.


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
    is_windowed = scoring.sliding_window is not None and layout.max_seqlen > scoring.sliding_window
    if query.device.type != "cpu" or is_windowed or scoring.softcap is not None:
        output = causal_attention(primals, layout, scoring)
        with torch.no_grad():
            detached = [None if x is None else x.detach() for x in primals]
            _, d_output = attend_with_tangents(detached, tangents, layout, scoring)
        return output, d_output

    # What `causal_attention` gives on a CPU, and the log-sum-exp that it keeps to itself.
    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attention(query, key, value, sink, CpuFlash(scoring.scale))

    output, log_sum_exp = apply_per_sequence(attend, (query, key, value), layout)
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
