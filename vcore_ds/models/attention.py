"""Causal attention that carries a tangent, in blocks.

PyTorch's fused attention kernels have no forward-mode rule (https://github.com/pytorch/pytorch/issues/165530) and
the unfused one stores `[T, T]`. This one keeps the flash-attention scheme, an online softmax over blocks of keys,
and adds the tangent inside it, so the memory grows linearly with T:

    S = scale * Q K^T                 dS = scale * (dQ K^T + Q dK^T)
    O = P V                           dO = P dV + (P * dS) V - rowsum(P * dS) * O

Every sum on the right is linear in the unnormalised `exp(S - m)`, so all of them are rescaled by the same
`exp(m_old - m_new)` when a new block raises the running maximum.

Used for gradient-free passes only; the passes with a gradient use the fused kernels.

Shapes: B batch, A query heads, K key/value heads, G = A / K, T tokens, D head dimension.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

FORWARD_MODE_ATTENTION = "vcore_forward_mode"
"""Name under which Hugging Face models find `forward_mode_attention`."""

BLOCK_TOKENS = {"cpu": 128, "cuda": 512}
"""Side of a score block. Small blocks skip more of what causality hides; on GPUs each block costs kernel launches."""

Result = TypeVar("Result")


def once_per_tensor(function: Callable[[Tensor], Result]) -> Callable[[Tensor], Result]:
    """Keeps a function's result for as long as its argument lives. All layers of a pass ask about the same positions,
    and every answer that is a number waits for the device."""
    results = WeakIdKeyDictionary()

    def remembered(tensor: Tensor) -> Result:
        if tensor not in results:
            results[tensor] = function(tensor)
        return results[tensor]

    return remembered


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    *,
    scale: float,
    key_mask: Tensor | None = None,
    segment_starts: Tensor | None = None,
    sliding_window: int | None = None,
    block_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention output and its tangent.

    Args:
        query: `[B, A, T, D]`.
        key, value: `[B, K, T, D]`; A is a multiple of K (grouped-query attention).
        tangents: of query, key and value, each shaped like it or None for zero.
        scale: factor on the scores.
        key_mask: `[B, T]` bool, False where a key is padding. A query without any visible key gives 0.
        segment_starts: `[B, T]`, the first token that each query may see, where a row holds several sequences; it does
            not fall along a row. None for one sequence a row.
        sliding_window: a query sees this many last keys, itself included; None for all.
        block_tokens: side of a score block; None takes that of the device.

    Returns:
        output `[B, A, T, D]` in the dtype of `query`, and its tangent, None where all tangents are None.
    """
    batch, num_heads, num_tokens, head_dim = query.shape
    block_tokens = block_tokens or BLOCK_TOKENS[query.device.type]
    num_kv_heads = key.shape[1]
    with_tangent = any(tangent is not None for tangent in tangents)
    d_query, d_key, d_value = tangents
    accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32

    # [B, A, T, D] -> [B*K, G*t, D]: one product serves a group of heads
    def rows(tensor: Tensor, block: slice) -> Tensor:
        return tensor[:, :, block].reshape(batch * num_kv_heads, -1, head_dim)

    key, value, d_key, d_value = (
        None if tensor is None else tensor.reshape(batch * num_kv_heads, num_tokens, head_dim)
        for tensor in (key, value, d_key, d_value)
    )
    output = torch.empty_like(query)
    d_output = torch.empty_like(query) if with_tangent else None
    positions = torch.arange(num_tokens, device=query.device)
    first_visible = [] if segment_starts is None else _first_visible(segment_starts)

    for query_start in range(0, num_tokens, block_tokens):
        query_block = slice(query_start, min(query_start + block_tokens, num_tokens))
        num_queries = query_block.stop - query_block.start
        q = rows(query, query_block)
        dq = None if d_query is None else rows(d_query, query_block)
        row_max = q.new_full((*q.shape[:2], 1), -torch.inf, dtype=accumulate)
        row_sum = torch.zeros_like(row_max)
        weighted_value = torch.zeros(q.shape, dtype=accumulate, device=q.device)
        d_row_sum = torch.zeros_like(row_max)  # sum of exp(S - m) * dS
        d_weighted_value = torch.zeros_like(weighted_value) if with_tangent else None

        first_key = 0 if sliding_window is None else max(0, query_start - sliding_window + 1)
        if segment_starts is not None:  # what lies before is hidden from the whole block
            first_key = max(first_key, first_visible[query_start])
        for key_start in range(first_key // block_tokens * block_tokens, query_block.stop, block_tokens):
            key_block = slice(key_start, min(key_start + block_tokens, query_block.stop))
            k, v = key[:, key_block], value[:, key_block]
            scores = _product(q, k.transpose(1, 2), accumulate).mul_(scale)
            hidden = _hidden(query_block, key_block, positions, key_mask, segment_starts, sliding_window)
            if hidden is not None:  # [b, t, s] -> [B*K, G*t, s]
                hidden = hidden.reshape(-1, 1, num_queries, hidden.shape[-1])
                scores.view(batch, num_heads, num_queries, -1).masked_fill_(hidden, -torch.inf)
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            # A row that has seen no key yet has maximum -inf; -inf - -inf would be nan.
            safe_max = new_max.masked_fill(new_max == -torch.inf, 0.0)
            exp_scores = scores.sub_(safe_max).exp_()
            rescale = (row_max - safe_max).exp_()
            row_max = new_max
            row_sum.mul_(rescale).add_(exp_scores.sum(-1, keepdim=True))
            weighted_value.mul_(rescale).add_(_product(exp_scores, v, accumulate))
            if d_weighted_value is None:
                continue
            d_weighted_value.mul_(rescale)
            d_row_sum.mul_(rescale)
            if d_value is not None:
                d_weighted_value.add_(_product(exp_scores, d_value[:, key_block], accumulate))
            if dq is None and d_key is None:
                continue
            d_scores = None if dq is None else _product(dq, k.transpose(1, 2), accumulate)
            if d_key is not None:
                from_key = _product(q, d_key[:, key_block].transpose(1, 2), accumulate)
                d_scores = from_key if d_scores is None else d_scores.add_(from_key)
            weighted_d_scores = exp_scores.mul_(d_scores).mul_(scale)
            d_row_sum.add_(weighted_d_scores.sum(-1, keepdim=True))
            d_weighted_value.add_(_product(weighted_d_scores, v, accumulate))

        normalizer = row_sum.masked_fill(row_sum == 0, 1.0)
        out = weighted_value / normalizer
        output[:, :, query_block] = out.view(batch, num_heads, num_queries, head_dim)
        if d_output is not None:
            d_out = d_weighted_value.sub_(d_row_sum * out).div_(normalizer)
            d_output[:, :, query_block] = d_out.view(batch, num_heads, num_queries, head_dim)
    return output, d_output


def _product(left: Tensor, right: Tensor, accumulate: torch.dtype) -> Tensor:
    """Batched product in `accumulate` precision, on tensor cores where there are some."""
    if left.is_cuda and right.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(left.to(right.dtype), right, out_dtype=accumulate)
    return torch.bmm(left.to(accumulate), right.to(accumulate))


def _hidden(
    queries: slice,
    keys: slice,
    positions: Tensor,
    key_mask: Tensor | None,
    segment_starts: Tensor | None,
    sliding_window: int | None,
) -> Tensor | None:
    """`[1 or B, t, s]` bool, True where a query may not see a key; None where all may."""
    hidden = None
    distance = positions[queries, None] - positions[None, keys]
    if keys.stop - 1 > queries.start:
        hidden = (distance < 0)[None]
    if sliding_window is not None and queries.stop - 1 - keys.start >= sliding_window:
        too_far = (distance >= sliding_window)[None]
        hidden = too_far if hidden is None else hidden | too_far
    if segment_starts is not None:
        foreign = positions[None, None, keys] < segment_starts[:, queries, None]
        hidden = foreign if hidden is None else hidden | foreign
    if key_mask is not None:
        padding = ~key_mask[:, None, keys]
        hidden = padding.expand(-1, len(distance), -1) if hidden is None else hidden | padding
    return hidden


def forward_mode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface around `block_attention`; inputs may be dual tensors.

    Positions `[1 or B, T]` that start again at 0 within a row divide it into sequences that do not see each other, as
    in Hugging Face's own attention.

    Returns the output `[B, T, A, D]`, dual where an input is, and None for the attention weights.

    Raises:
        NotImplementedError: the model caps its scores or uses attention sinks.
    """
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("attention with a score cap or sinks has no forward mode here")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    (query, d_query), (key, d_key), (value, d_value) = (forward_ad.unpack_dual(x) for x in (query, key, value))
    output, d_output = block_attention(
        query,
        key,
        value,
        (d_query, d_key, d_value),
        scale=scale,
        key_mask=None if attention_mask is None else attention_mask.bool(),
        segment_starts=None if position_ids is None else segment_starts(position_ids),
        sliding_window=sliding_window,
    )
    output = output.transpose(1, 2).contiguous()
    if d_output is not None:
        output = forward_ad.make_dual(output, d_output.transpose(1, 2).contiguous())
    return output, None


@once_per_tensor
def segment_starts(position_ids: Tensor) -> Tensor | None:
    """`[B, T]`, the column where each token's sequence begins, from positions that restart there; None where every
    row is one sequence."""
    columns = torch.arange(position_ids.shape[1], device=position_ids.device)
    starts = torch.where(position_ids == 0, columns, 0).cummax(1).values
    return starts if bool((starts > 0).any()) else None


@once_per_tensor
def _first_visible(segment_starts: Tensor) -> list[int]:
    """The first column that the token of each column may see in any row."""
    return segment_starts.amin(0).tolist()


# Both registrations are additions under a name of our own: no other model of the process is changed. The mask
# function hands the padding mask through as [B, T] instead of building [B, 1, T, T].
AttentionInterface.register(FORWARD_MODE_ATTENTION, forward_mode_attention)
AttentionMaskInterface.register(FORWARD_MODE_ATTENTION, flash_attention_mask)
