"""Causal attention that carries a tangent, in blocks.

PyTorch's fused attention kernels have no forward-mode rule (https://github.com/pytorch/pytorch/issues/165530) and
the unfused one stores `[T, T]`. This one keeps the flash-attention scheme, an online softmax over blocks of keys,
and adds the tangent inside it, so the memory grows linearly with T:

    S = scale * Q K^T                 dS = scale * (dQ K^T + Q dK^T)
    O = P V                           dO = P dV + (P * dS) V - rowsum(P * dS) * O

Every sum on the right is linear in the unnormalised `exp(S - m)`, so all of them are rescaled by the same
`exp(m_old - m_new)` when a new block raises the running maximum.

Where a fused kernel has computed O and each query's log-sum-exp L, the tangent alone needs no running maximum, since
`P = exp(S - L)`.

The passes without tangents use the fused kernels. Each row is one sequence: rows of several are taken apart before
(`vcore_ds.models.attention`).

Shapes: B batch, A query heads, K key/value heads, G = A / K, T tokens, D head dimension.
"""

import math

import torch
from torch import Tensor

BLOCK_TOKENS = {"cpu": (64, 256), "cuda": (512, 512)}
"""Queries and keys of a score block. Blocks of few queries compute less of what causality hides, and those of many keys
keep the products large; on GPUs each block costs kernel launches."""


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    *,
    scale: float,
    sliding_window: int | None = None,
    block_tokens: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention output and its tangent.

    Args:
        query: `[B, A, T, D]`.
        key, value: `[B, K, T, D]`; A is a multiple of K (grouped-query attention).
        tangents: of query, key and value, each shaped like it or None for zero.
        scale: factor on the scores.
        sliding_window: a query sees this many last keys, itself included; None for all.
        block_tokens: queries and keys of a score block; None takes those of the device.

    Returns:
        output `[B, A, T, D]` in the dtype of `query`, and its tangent, None where all tangents are None.
    """
    batch, num_heads, num_tokens, head_dim = query.shape
    query_tokens, key_tokens = block_tokens or BLOCK_TOKENS[query.device.type]
    num_groups = batch * key.shape[1]
    d_query, d_key, d_value = tangents
    with_tangent = any(tangent is not None for tangent in tangents)
    scores_move = d_query is not None or d_key is not None
    accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
    # Tensor cores multiply halves and accumulate in fp32; a CPU multiplies in fp32.
    factor = query.dtype if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else accumulate

    key, value, d_key, d_value = (
        None if tensor is None else tensor.reshape(num_groups, num_tokens, head_dim).to(factor)
        for tensor in (key, value, d_key, d_value)
    )
    # [dQ, Q] [K, dK]^T is one product, of those columns that there are. The products of the values have no part in it,
    # nor are P V and P dV one: they would be rounded in another way than in a pass without tangents.
    moving_keys = _joined(None if d_query is None else key, d_key) if scores_move else None

    output = torch.empty_like(query)
    d_output = torch.empty_like(query) if with_tangent else None
    positions = torch.arange(num_tokens, device=query.device)
    # All score blocks use the same memory: a CPU takes a quarter of a product's time to get it afresh.
    num_scores = batch * num_heads * min(query_tokens, num_tokens) * min(key_tokens, num_tokens)
    scores_memory = torch.empty(num_scores, dtype=accumulate, device=query.device)
    d_scores_memory = torch.empty_like(scores_memory) if scores_move else None

    for query_start in range(0, num_tokens, query_tokens):
        query_block = slice(query_start, min(query_start + query_tokens, num_tokens))
        num_queries = query_block.stop - query_block.start

        def rows(tensor: Tensor, block: slice = query_block) -> Tensor:  # [B, A, T, D] -> [B*K, G*t, D]
            return tensor[:, :, block].reshape(num_groups, -1, tensor.shape[-1]).to(factor)

        q = rows(query)
        if scores_move:
            moving_queries = _joined(None if d_query is None else rows(d_query), None if d_key is None else q)
        row_max = q.new_full((*q.shape[:2], 1), -torch.inf, dtype=accumulate)
        row_sum = torch.zeros_like(row_max)
        weighted_value = q.new_zeros(q.shape, dtype=accumulate)
        d_row_sum = torch.zeros_like(row_max)  # sum of exp(S - m) * dS
        d_weighted_value = torch.zeros_like(weighted_value) if with_tangent else None

        first_key = 0 if sliding_window is None else max(0, query_start - sliding_window + 1)
        for key_start in range(first_key // key_tokens * key_tokens, query_block.stop, key_tokens):
            key_block = slice(key_start, min(key_start + key_tokens, query_block.stop))
            scores = _product(q, key[:, key_block].transpose(1, 2), scores_memory, scale)
            hidden = _hidden(query_block, key_block, positions, sliding_window)
            if hidden is not None:  # [t, s], the same for all rows and heads
                scores.view(batch, num_heads, num_queries, -1).masked_fill_(hidden, -torch.inf)
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            safe_max = new_max
            if sliding_window is not None:  # a row that has seen no key yet: -inf - -inf would be nan
                safe_max = new_max.masked_fill(new_max == -torch.inf, 0.0)
            exp_scores = scores.sub_(safe_max).exp_()
            rescale = row_max.sub_(safe_max).exp_()
            row_max = new_max
            row_sum.mul_(rescale).add_(exp_scores.sum(-1, keepdim=True))
            v = value[:, key_block]
            _add_product(weighted_value.mul_(rescale), exp_scores, v)
            if d_weighted_value is None:
                continue
            d_weighted_value.mul_(rescale)
            if d_value is not None:
                _add_product(d_weighted_value, exp_scores, d_value[:, key_block])
            if moving_keys is None:
                continue
            d_scores = _product(moving_queries, moving_keys[:, key_block].transpose(1, 2), d_scores_memory, scale)
            weighted_d_scores = d_scores.mul_(exp_scores)
            d_row_sum.mul_(rescale).add_(weighted_d_scores.sum(-1, keepdim=True))
            _add_product(d_weighted_value, weighted_d_scores, v)

        normalizer = row_sum.masked_fill_(row_sum == 0, 1.0)
        out = weighted_value.div_(normalizer)
        output[:, :, query_block] = out.view(batch, num_heads, num_queries, head_dim)
        if d_output is not None:
            d_out = d_weighted_value.sub_(d_row_sum * out).div_(normalizer)
            d_output[:, :, query_block] = d_out.view(batch, num_heads, num_queries, head_dim)
    return output, d_output


def block_attention_tangent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    output: Tensor,
    log_sum_exp: Tensor,
    *,
    scale: float,
    block_tokens: tuple[int, int] | None = None,
) -> Tensor:
    """The tangent alone, `[B, A, T, D]`, of causal attention that another kernel has computed.

    Args:
        query, key, value, tangents, scale, block_tokens: as in `block_attention`; at least one tangent.
        output: `[B, A, T, D]`.
        log_sum_exp: `[B, A, T]`, of each query's scaled scores.
    """
    batch, num_heads, num_tokens, head_dim = query.shape
    query_tokens, key_tokens = block_tokens or BLOCK_TOKENS[query.device.type]
    num_groups = batch * key.shape[1]
    d_query, d_key, d_value = tangents
    scores_move = d_query is not None or d_key is not None
    accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
    key, value, d_key, d_value = (
        None if tensor is None else tensor.reshape(num_groups, num_tokens, head_dim).to(accumulate)
        for tensor in (key, value, d_key, d_value)
    )
    moving_keys = _joined(None if d_query is None else key, d_key) if scores_move else None
    d_output = torch.empty_like(query)
    positions = torch.arange(num_tokens, device=query.device)
    num_scores = batch * num_heads * min(query_tokens, num_tokens) * min(key_tokens, num_tokens)
    scores_memory = torch.empty(num_scores, dtype=accumulate, device=query.device)
    d_scores_memory = torch.empty_like(scores_memory) if scores_move else None

    for query_start in range(0, num_tokens, query_tokens):
        query_block = slice(query_start, min(query_start + query_tokens, num_tokens))
        num_queries = query_block.stop - query_block.start

        def rows(tensor: Tensor, block: slice = query_block) -> Tensor:  # [B, A, T, D] -> [B*K, G*t, D]
            return tensor[:, :, block].reshape(num_groups, -1, tensor.shape[-1]).to(accumulate)

        q = rows(query)
        if scores_move:
            moving_queries = _joined(None if d_query is None else rows(d_query), None if d_key is None else q)
        normalizer = rows(log_sum_exp[..., None])
        d_out = torch.zeros_like(q)
        d_row_sum = torch.zeros_like(normalizer)  # sum of P * dS
        for key_start in range(0, query_block.stop, key_tokens):
            key_block = slice(key_start, min(key_start + key_tokens, query_block.stop))
            scores = _product(q, key[:, key_block].transpose(1, 2), scores_memory, scale)
            hidden = _hidden(query_block, key_block, positions, None)
            if hidden is not None:
                scores.view(batch, num_heads, num_queries, -1).masked_fill_(hidden, -torch.inf)
            weights = scores.sub_(normalizer).exp_()
            if d_value is not None:
                _add_product(d_out, weights, d_value[:, key_block])
            if moving_keys is None:
                continue
            d_scores = _product(moving_queries, moving_keys[:, key_block].transpose(1, 2), d_scores_memory, scale)
            weighted_d_scores = d_scores.mul_(weights)
            d_row_sum.add_(weighted_d_scores.sum(-1, keepdim=True))
            _add_product(d_out, weighted_d_scores, value[:, key_block])
        d_out.addcmul_(d_row_sum, rows(output), value=-1)
        d_output[:, :, query_block] = d_out.view(batch, num_heads, num_queries, head_dim)
    return d_output


def _joined(first: Tensor | None, second: Tensor | None) -> Tensor:
    """Side by side in the last dimension, those that there are."""
    there = [tensor for tensor in (first, second) if tensor is not None]
    return there[0] if len(there) == 1 else torch.cat(there, -1)


def _product(left: Tensor, right: Tensor, memory: Tensor, scale: float) -> Tensor:
    """Batched product times `scale`, in `memory` and its precision."""
    shape = (*left.shape[:2], right.shape[2])
    product = memory[: math.prod(shape)].view(shape)
    if left.dtype == memory.dtype:
        return torch.baddbmm(product, left, right, beta=0, alpha=scale, out=product)
    return torch.mul(torch.bmm(left, right, out_dtype=memory.dtype), scale, out=product)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the batched product to `total`, in its precision."""
    if right.dtype == total.dtype:
        total.baddbmm_(left, right)
    else:
        total.add_(torch.bmm(left.to(right.dtype), right, out_dtype=total.dtype))


def _hidden(queries: slice, keys: slice, positions: Tensor, sliding_window: int | None) -> Tensor | None:
    """`[t, s]` bool, True where a query may not see a key; None where all may."""
    after = keys.stop - 1 > queries.start
    too_far = sliding_window is not None and queries.stop - 1 - keys.start >= sliding_window
    if not after and not too_far:
        return None
    distance = positions[queries, None] - positions[None, keys]
    if not too_far:
        return distance < 0
    return (distance >= sliding_window) | (distance < 0)
