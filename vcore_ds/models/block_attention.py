"""Causal attention that carries a tangent, in blocks.

PyTorch's fused attention kernels have no forward-mode rule (https://github.com/pytorch/pytorch/issues/165530) and
the unfused one stores `[T, T]`. This one keeps the flash-attention scheme, an online softmax over blocks of keys,
and adds the tangent inside it, so the memory grows linearly with T:

    S = scale * Q K^T                 dS = scale * (dQ K^T + Q dK^T)
    O = P V                           dO = P dV + (P * dS) V - rowsum(P * dS) * O

Every sum on the right is linear in the unnormalised `exp(S - m)`, so all of them are rescaled by the same
`exp(m_old - m_new)` when a new block raises the running maximum.

Used for gradient-free passes only; the passes with a gradient use the fused kernels. Each row is one sequence: rows of
several are taken apart before (`vcore_ds.models.attention`).

Shapes: B batch, A query heads, K key/value heads, G = A / K, T tokens, D head dimension.
"""

import torch
from torch import Tensor

BLOCK_TOKENS = {"cpu": 128, "cuda": 512}
"""Side of a score block. Small blocks skip more of what causality hides; on GPUs each block costs kernel launches."""


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    *,
    scale: float,
    sliding_window: int | None = None,
    block_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention output and its tangent.

    Args:
        query: `[B, A, T, D]`.
        key, value: `[B, K, T, D]`; A is a multiple of K (grouped-query attention).
        tangents: of query, key and value, each shaped like it or None for zero.
        scale: factor on the scores.
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
        for key_start in range(first_key // block_tokens * block_tokens, query_block.stop, block_tokens):
            key_block = slice(key_start, min(key_start + block_tokens, query_block.stop))
            k, v = key[:, key_block], value[:, key_block]
            scores = _product(q, k.transpose(1, 2), accumulate).mul_(scale)
            hidden = _hidden(query_block, key_block, positions, sliding_window)
            if hidden is not None:  # [t, s], the same for all rows and heads
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


def _hidden(queries: slice, keys: slice, positions: Tensor, sliding_window: int | None) -> Tensor | None:
    """`[t, s]` bool, True where a query may not see a key; None where all may."""
    hidden = None
    distance = positions[queries, None] - positions[None, keys]
    if keys.stop - 1 > queries.start:
        hidden = distance < 0
    if sliding_window is not None and queries.stop - 1 - keys.start >= sliding_window:
        too_far = distance >= sliding_window
        hidden = too_far if hidden is None else hidden | too_far
    return hidden
