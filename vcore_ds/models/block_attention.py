"""Causal attention that carries a tangent, in blocks.

PyTorch's fused attention kernels have no forward-mode rule (https://github.com/pytorch/pytorch/issues/165530) and the
unfused one stores `[T, T]`. This one keeps the flash-attention scheme, an online softmax over blocks of keys, and adds
the tangent inside it, so the memory grows linearly with T:

    S = scale * Q K^T                 dS = scale * (dQ K^T + Q dK^T)
    O = P V                           dO = P dV + (P * dS) V - rowsum(P * dS) * O

Every sum on the right is linear in the unnormalised `exp(S - m)`, so all of them are rescaled by the same
`exp(m_old - m_new)` when a new block raises the running maximum.

Where a fused kernel has computed O and each query's log-sum-exp L, the tangent alone needs no running maximum, since
`P = exp(S - L)`.

An attention sink (gpt-oss) is one more score of each query, whose value is 0: the sums begin with it, or it is in L.

The passes without tangents use the fused kernels. Each row is one sequence: rows of several are taken apart before
(`vcore_ds.models.attention`).

Shapes: B batch, A query heads, K key/value heads, G = A / K, T tokens, D head dimension.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Sinks = tuple[Tensor, Tensor | None]
"""Attention sinks `[A]` and their tangent, None for zero."""

BLOCK_TOKENS = {"cpu": (64, 256), "cuda": (512, 512)}
"""Queries and keys of a score block. Blocks of few queries compute less of what causality hides, and those of many keys
keep the products large; on GPUs each block costs kernel launches."""


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tangents: Sequence[Tensor | None] = (None, None, None),
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks: Sinks | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention output and its tangent.

    Args:
        query: `[B, A, T, D]`.
        key, value: `[B, K, T, D]`; A is a multiple of K (grouped-query attention).
        tangents: of query, key and value, each shaped like it or None for zero.
        scale: factor on the scores.
        sliding_window: a query sees this many last keys, itself included; None for all.
        sinks: of the query heads, not multiplied by `scale`; None for none.

    Returns:
        output `[B, A, T, D]` in the dtype of `query`, and its tangent, None where all tangents are None.
    """
    sink, d_sink = sinks or (None, None)
    with_tangent = any(tangent is not None for tangent in (*tangents, d_sink))
    blocks = _Blocks(query, key, value, tangents, scale, sliding_window)
    output = torch.empty_like(query)
    d_output = torch.empty_like(query) if with_tangent else None
    for queries in blocks.of_queries():
        row_max = blocks.of_heads(sink, absent=-torch.inf)
        row_sum = torch.full_like(row_max, 0.0 if sink is None else 1.0)
        weighted_value = blocks.zeros(query.shape[-1])
        d_row_sum = blocks.of_heads(d_sink, absent=0.0)  # sum of exp(S - m) * dS
        d_weighted_value = torch.zeros_like(weighted_value) if with_tangent else None
        for keys in blocks.of_keys(queries):
            scores = blocks.scores(queries, keys)
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            safe_max = new_max
            if sliding_window is not None:  # a row that has seen no key yet: -inf - -inf would be nan
                safe_max = new_max.masked_fill(new_max == -torch.inf, 0.0)
            exp_scores = scores.sub_(safe_max).exp_()
            rescale = row_max.sub_(safe_max).exp_()
            row_max = new_max
            row_sum.mul_(rescale).add_(exp_scores.sum(-1, keepdim=True))
            _add_product(weighted_value.mul_(rescale), exp_scores, blocks.value[:, keys])
            if d_weighted_value is not None:
                blocks.add_tangents(d_weighted_value.mul_(rescale), d_row_sum.mul_(rescale), exp_scores, keys)
        normalizer = row_sum.masked_fill_(row_sum == 0, 1.0)
        out = weighted_value.div_(normalizer)
        blocks.put(output, queries, out)
        if d_output is not None and d_weighted_value is not None:
            blocks.put(d_output, queries, d_weighted_value.addcmul_(d_row_sum, out, value=-1).div_(normalizer))
    return output, d_output


def block_attention_tangent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tangents: Sequence[Tensor | None],
    output: Tensor,
    log_sum_exp: Tensor,
    *,
    scale: float,
    sinks: Sinks | None = None,
) -> Tensor:
    """The tangent alone, `[B, A, T, D]`, of causal attention that another kernel has computed.

    Args:
        query, key, value, tangents, scale, sinks: as in `block_attention`; at least one tangent.
        output: `[B, A, T, D]`.
        log_sum_exp: `[B, A, T]`, of each query's scaled scores and its sink.
    """
    sink, d_sink = sinks or (None, None)
    blocks = _Blocks(query, key, value, tangents, scale, None)
    d_output = torch.empty_like(query)
    for queries in blocks.of_queries():
        normalizer = blocks.rows(log_sum_exp[..., None], queries, blocks.accumulate)
        d_out, d_row_sum = blocks.zeros(query.shape[-1]), blocks.of_heads(d_sink, absent=0.0)  # the latter of P * dS
        if d_sink is not None:
            d_row_sum.mul_(blocks.of_heads(sink, absent=-torch.inf).sub_(normalizer).exp_())
        for keys in blocks.of_keys(queries):
            weights = blocks.scores(queries, keys).sub_(normalizer).exp_()
            blocks.add_tangents(d_out, d_row_sum, weights, keys)
        out = blocks.rows(output, queries, blocks.accumulate)
        blocks.put(d_output, queries, d_out.addcmul_(d_row_sum, out, value=-1))
    return d_output


class _Blocks:
    """Query, key, value and tangents as batched products take them, and the blocks that their scores come in.

    Each key/value head is an item of the batch, with the rows of all its query heads. Keys and values are made ready as
    a whole, and queries a block at a time, which stays in a CPU's cache.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tangents: Sequence[Tensor | None],
        scale: float,
        sliding_window: int | None,
    ):
        """Arguments as for `block_attention`."""
        self._num_tokens, self._scale, self._sliding_window = query.shape[2], scale, sliding_window
        self._query_tokens, self._key_tokens = BLOCK_TOKENS[query.device.type]
        self.accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
        # Tensor cores multiply halves and accumulate in fp32; a CPU multiplies in fp32.
        in_halves = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
        self._factor = query.dtype if in_halves else self.accumulate

        self._query, (self._d_query, d_key, d_value) = query, tangents
        self._key, self.value = self._by_head(key), self._by_head(value)
        d_key, self._d_value = (None if tangent is None else self._by_head(tangent) for tangent in (d_key, d_value))
        # [dQ, Q] [K, dK]^T is one product, of those columns that there are. The products of the values have no part in
        # it, nor are P V and P dV one: they would be rounded in another way than in a pass without tangents.
        self._keys_move, self._scores_move = d_key is not None, self._d_query is not None or d_key is not None
        self._moving_keys = _joined(None if self._d_query is None else self._key, d_key) if self._scores_move else None
        # All score blocks use the same memory: a CPU takes a quarter of a product's time to get it afresh.
        num_scores = math.prod(query.shape[:2])
        num_scores *= min(self._query_tokens, self._num_tokens) * min(self._key_tokens, self._num_tokens)
        self._scores_memory = torch.empty(num_scores, dtype=self.accumulate, device=query.device)
        self._d_scores_memory = torch.empty_like(self._scores_memory) if self._scores_move else None
        self._positions = torch.arange(self._num_tokens, device=query.device)

    def of_queries(self) -> Iterator[slice]:
        """Tokens of each block of queries; what the methods below give is that of the one that was taken last."""
        for start in range(0, self._num_tokens, self._query_tokens):
            queries = slice(start, min(start + self._query_tokens, self._num_tokens))
            self._rows = self.rows(self._query, queries, self._factor)
            if self._scores_move:
                d_rows = None if self._d_query is None else self.rows(self._d_query, queries, self._factor)
                self._moving_rows = _joined(d_rows, self._rows if self._keys_move else None)
            yield queries

    def of_keys(self, queries: slice) -> Iterator[slice]:
        """Tokens of each block of keys that a block of queries sees."""
        size, window = self._key_tokens, self._sliding_window
        first = 0 if window is None else max(0, queries.start - window + 1)
        for start in range(first // size * size, queries.stop, size):
            yield slice(start, min(start + size, queries.stop))

    def rows(self, tensor: Tensor, queries: slice, dtype: torch.dtype) -> Tensor:
        """A block of `[B, A, T, D]` as `[B * K, G * t, D]`."""
        return tensor[:, :, queries].reshape(len(self._key), -1, tensor.shape[-1]).to(dtype)

    def put(self, whole: Tensor, queries: slice, rows: Tensor) -> None:
        """Writes a block's `[B * K, G * t, D]` into `[B, A, T, D]`."""
        there = whole[:, :, queries]
        there.copy_(rows.view(there.shape))

    def zeros(self, size: int) -> Tensor:
        """`[B * K, G * t, size]`, to accumulate in."""
        return self._rows.new_zeros((*self._rows.shape[:2], size), dtype=self.accumulate)

    def of_heads(self, values: Tensor | None, *, absent: float) -> Tensor:
        """`[A]` as `[B * K, G * t, 1]` to accumulate in; full of `absent` where there are none."""
        rows = self.zeros(1)
        if values is None:
            return rows.fill_(absent)
        rows.view(len(self._query), len(values), -1).copy_(values[:, None])
        return rows

    def scores(self, queries: slice, keys: slice) -> Tensor:
        """`[B * K, G * t, s]`, -inf where a query does not see a key; the next block's take their place."""
        scores = _product(self._rows, self._key[:, keys].transpose(1, 2), self._scores_memory, self._scale)
        hidden = _hidden(queries, keys, self._positions, self._sliding_window)
        if hidden is not None:  # the same for all heads
            scores.view(-1, *hidden.shape).masked_fill_(hidden, -torch.inf)
        return scores

    def add_tangents(self, d_values: Tensor, d_row_sum: Tensor, weights: Tensor, keys: slice) -> None:
        """Adds `W dV + (W * dS) V` and the sums of `W * dS` over keys, for weights `W` `[B * K, G * t, s]`."""
        if self._d_value is not None:
            _add_product(d_values, weights, self._d_value[:, keys])
        if self._moving_keys is None or self._d_scores_memory is None:
            return
        right = self._moving_keys[:, keys].transpose(1, 2)
        weighted = _product(self._moving_rows, right, self._d_scores_memory, self._scale).mul_(weights)
        d_row_sum.add_(weighted.sum(-1, keepdim=True))
        _add_product(d_values, weighted, self.value[:, keys])

    def _by_head(self, tensor: Tensor) -> Tensor:
        """`[B, K, T, D]` as `[B * K, T, D]`."""
        return tensor.flatten(0, 1).to(self._factor)


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
    if sliding_window is None or not too_far:
        return distance < 0
    return (distance >= sliding_window) | (distance < 0)
