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

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from vcore_ds.errors import UserError
from vcore_ds.models.block_attention import block_attention
from vcore_ds.models.sequence_exchange import to_heads, to_tokens

TRAINING_ATTENTION = "vcore_training"
"""Name under which Hugging Face models find `training_attention`."""

FORWARD_MODE_ATTENTION = "vcore_forward_mode"
"""Name under which Hugging Face models find `forward_mode_attention`."""

FUSED_ATTENTION = "vcore_fused"
"""Name under which they find the attention of `vcore_ds.models.fused_attention`."""

OUR_ATTENTION = (TRAINING_ATTENTION, FORWARD_MODE_ATTENTION, FUSED_ATTENTION)
"""Those that know the layout of the rows."""

MAX_KERNEL_HEAD_DIM = 256
"""Beyond it, the sums of a block of queries and of its tangent do not fit the registers of the kernel."""


@dataclass(frozen=True)
class RowLayout:
    """The sequences in a batch's rows, and the sequence-parallel degree; made once for each pass."""

    lengths: Sequence[Sequence[int]]
    """Tokens of the sequences in each row, in order; T together. Padding counts as a sequence."""
    sequence_parallel: int
    """Sequence-parallel degree: each rank of a group has `t = T / sequence_parallel` columns of its rows."""
    ends: Tensor
    """int32 `[num_sequences + 1]`, on the device: 0, and where each sequence ends in the rows put end to end."""

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], sequence_parallel: int, device: torch.device) -> "RowLayout":
        """The layout with its tensor, made on the host: no layer waits for the device to learn it."""
        flat = torch.tensor([0, *(n for row in lengths for n in row)], dtype=torch.int32)
        return cls(lengths, sequence_parallel, flat.cumsum(0, dtype=torch.int32).to(device, non_blocking=True))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(n for row in self.lengths for n in row)

    @property
    def is_one_sequence_a_row(self) -> bool:
        """Whether no row is packed."""
        return all(len(row) == 1 for row in self.lengths)

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of what can be computed together: all rows where each is one sequence, else a sequence."""
        if self.is_one_sequence_a_row:
            yield slice(None), slice(None)
            return
        for row, lengths in enumerate(self.lengths):
            start = 0
            for n in lengths:
                yield slice(row, row + 1), slice(start, start + n)
                start += n


def hugging_face_attention(
    attend: Callable[[Tensor, Tensor, Tensor, RowLayout, float | None, int | None], Tensor],
) -> Callable[..., tuple[Tensor, None]]:
    """Hugging Face's attention interface around `attend(query, key, value, layout, scaling, sliding_window)`.

    Args:
        attend: takes query `[b, A, t, D]`; key and value `[b, K, t, D]`, where the values of some architectures have
            fewer dimensions; the layout of the rows; the factor on the scores, None for `1 / sqrt(D)`; and how many
            last keys a query sees, itself included, None for all. Gives `[b, t, A, D]`.

    Returns what gives that output, and None for the attention weights. It raises UserError where the model caps its
    scores, uses attention sinks or a mask of its own, or does not hand the layout through.
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
        **_: object,
    ) -> tuple[Tensor, None]:
        problems = {
            "caps its attention scores": softcap is not None,
            "uses attention sinks": s_aux is not None,
            "makes an attention mask of its own": attention_mask is not None,
            "does not hand keyword arguments from the decoder to its attention": row_layout is None,
        }
        found = next((words for words, is_so in problems.items() if is_so), None)
        if found is not None or row_layout is None:
            raise UserError(
                f"model.path: {type(module).__name__} {found}, so attention here cannot take its place; expected "
                "another architecture, or model.attention eager with a method or estimator other than vcore by jvp"
            )
        return attend(query, key, value, row_layout, scaling, sliding_window), None

    return attention


def attend_with_graph(
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """By the fused kernels, for passes with a gradient."""
    value_dim = value.shape[-1]
    query, key, value = to_heads([query, key, as_wide(value, key)], layout.sequence_parallel)
    output = causal_attention(query, key, value, layout, scaling, sliding_window)[..., :value_dim]
    (output,) = to_tokens([output], layout.sequence_parallel)
    return output.transpose(1, 2).contiguous()


def attend_on_duals(
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """With tangents, for passes without a gradient; inputs may be dual tensors, and the output is one where an input
    is."""
    k, value_dim = layout.sequence_parallel, value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    primals: Sequence[Tensor]
    tangents: Sequence[Tensor | None]
    primals, tangents = zip(*(forward_ad.unpack_dual(x) for x in (query, key, as_wide(value, key))), strict=True)
    # Values and the tangents that there are travel together, so one exchange serves both.
    exchanged = iter(to_heads([x for x in (*primals, *tangents) if x is not None], k))
    primals = [next(exchanged) for _ in primals]
    tangents = [None if tangent is None else next(exchanged) for tangent in tangents]
    output, d_output = attend_with_tangents(primals, tangents, layout, scale, sliding_window)
    found = to_tokens([x[..., :value_dim] for x in (output, d_output) if x is not None], k)
    found = [x.transpose(1, 2).contiguous() for x in found]
    return found[0] if d_output is None else forward_ad.make_dual(*found)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: RowLayout, scale: float | None, sliding_window: int | None
) -> Tensor:
    """Attention within each sequence, `[b, A, T, D]`; key and value have a divisor of A heads."""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        # One call of the flash kernel for all rows. It knows sequences by their ends, so there is no mask.
        flat_query, flat_key, flat_value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        output = varlen_attn(
            flat_query,
            flat_key,
            flat_value,
            layout.ends,
            layout.ends,
            layout.longest,
            layout.longest,
            scale=scale,
            window_size=window,
            enable_gqa=True,
        )
        assert isinstance(output, Tensor)  # as nothing else is asked for
        return output.view(query.shape[0], query.shape[2], *output.shape[1:]).transpose(1, 2)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor]:
        return (_attend(query, key, value, scale, sliding_window),)

    (output,) = by_sequence(attend, (query, key, value), layout)
    return output


def by_sequence(
    attend: Callable[..., Sequence[Tensor]], primals: Sequence[Tensor], layout: RowLayout
) -> Sequence[Tensor]:
    """What `attend` gives of rows of one sequence each, for every sequence of the layout, put together as they lie.

    Args:
        attend: takes query, key and value; its results have the tokens in their third dimension.
    """
    if layout.is_one_sequence_a_row:
        return attend(*primals)
    rows = []
    for row, lengths in enumerate(layout.lengths):
        parts = zip(*(x[row : row + 1].split(list(lengths), 2) for x in primals), strict=True)
        rows.append([torch.cat(found, 2) for found in zip(*(attend(*part) for part in parts), strict=True)])
    return [torch.cat(found) for found in zip(*rows, strict=True)]


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, sliding_window: int | None) -> Tensor:
    """Rows of one sequence each, by the fused kernel of any device and precision."""
    num_tokens = query.shape[2]
    is_grouped = query.shape[1] != key.shape[1]
    if sliding_window is None or num_tokens <= sliding_window:
        if query.device.type == "cpu":
            return attend_on_cpu(query, key, value, scale)[0]
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped)
    # A band of the score matrix at a time: queries of one window's length, and the keys that they see.
    positions, outputs = torch.arange(num_tokens, device=query.device), []
    for start in range(0, num_tokens, sliding_window):
        first, end = max(0, start - sliding_window + 1), min(start + sliding_window, num_tokens)
        distance = positions[start:end, None] - positions[None, first:end]
        seen = (distance >= 0) & (distance < sliding_window)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, first:end],
                value[:, :, first:end],
                attn_mask=seen,
                scale=scale,
                enable_gqa=is_grouped,
            )
        )
    return torch.cat(outputs, 2)


def attend_on_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Causal attention of rows of one sequence each, and the log-sum-exp `[b, A, T]` of the scaled scores.

    The operator that `scaled_dot_product_attention` chooses on a CPU, by its name: that function keeps the log-sum-exp
    to itself, and repeats key and value heads, which the operator does not need.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)


def attend_with_tangents(
    primals: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    layout: RowLayout,
    scale: float,
    sliding_window: int | None,
) -> tuple[Tensor, Tensor | None]:
    """`[b, A, T, D]` and its tangent: one kernel for all rows where there is one, else in blocks by sequence."""
    (query, key, value), (d_query, d_key, d_value) = primals, tangents
    if _kernel_serves(query):
        from vcore_ds.models.flash_tangent import flash_tangent  # here alone, as it needs Triton

        output, d_output, _ = flash_tangent(
            query,
            key,
            value,
            (d_query, d_key, d_value),
            ends=layout.ends,
            longest=layout.longest,
            scale=scale,
            sliding_window=sliding_window,
        )
        return output, d_output
    if layout.is_one_sequence_a_row:
        return block_attention(query, key, value, (d_query, d_key, d_value), scale=scale, sliding_window=sliding_window)
    output = torch.empty_like(query)
    d_output = None if all(tangent is None for tangent in tangents) else torch.empty_like(output)
    for rows, columns in layout.sequences():
        query, key, value = (x[rows, :, columns] for x in primals)
        d_query, d_key, d_value = (None if dx is None else dx[rows, :, columns] for dx in tangents)
        found, d_found = block_attention(
            query, key, value, (d_query, d_key, d_value), scale=scale, sliding_window=sliding_window
        )
        output[rows, :, columns] = found
        if d_output is not None and d_found is not None:
            d_output[rows, :, columns] = d_found
    return output, d_output


def _kernel_serves(query: Tensor) -> bool:
    """Whether `flash_tangent` can take it, and should: products in fp32 are faster and as precise in blocks."""
    runs_kernels = query.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter, on CPUs
    is_served = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= MAX_KERNEL_HEAD_DIM
    return runs_kernels and is_served and _has_triton()


@functools.cache
def _has_triton() -> bool:
    """PyTorch's CUDA wheels bring it, its CPU wheels do not."""
    return importlib.util.find_spec("triton") is not None


def as_wide(value: Tensor, key: Tensor) -> Tensor:
    """Values with as many dimensions as keys, filled up with zeros: latent attention (DeepSeek) has fewer. So all three
    travel together, and the flash kernel takes them."""
    missing = key.shape[-1] - value.shape[-1]
    return nn.functional.pad(value, (0, missing)) if missing else value


training_attention = hugging_face_attention(attend_with_graph)
forward_mode_attention = hugging_face_attention(attend_on_duals)
# Additions under names of our own: no other model of the process is changed. No mask function is registered under them,
# so Hugging Face makes no mask, and does not look at positions for packed rows, which would wait for the device.
AttentionInterface.register(TRAINING_ATTENTION, training_attention)
AttentionInterface.register(FORWARD_MODE_ATTENTION, forward_mode_attention)
