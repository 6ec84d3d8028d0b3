"""Causal attention and its JVP in plain PyTorch, block by block.

PyTorch's fused attention kernels have no forward-mode rule (https://github.com/pytorch/pytorch/issues/165530), and
unfused attention stores `[T, T]`. This is the flash-attention algorithm, an online softmax over blocks of keys, with
the tangent accumulated alongside, so that memory grows linearly with T:

    S = scale * Q K^T                 dS = scale * (dQ K^T + Q dK^T)
    O = P V                           dO = P dV + (P * dS) V - rowsum(P * dS) * O

Every sum on the right is linear in the unnormalised `exp(S - m)`, so all of them are rescaled by the same
`exp(m_old - m_new)` when a new block raises the running maximum.

If a fused kernel has already computed O and each query's log-sum-exp L, the tangent needs no running maximum, since
`P = exp(S - L)`.

An attention sink (gpt-oss) is an additional score of each query, whose value vector is 0: it initialises the softmax
sums, or is part of L.

Passes without tangents use the fused kernels. Sequences are unpacked here: `vcore_ds.models.attention` splits packs.

Shapes: B batch, A query heads, K key/value heads, G = A / K, T tokens, D head dimension.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Sinks = tuple[Tensor, Tensor | None]
"""Attention sinks `[A]` and their tangent, None for zero."""

BLOCK_TOKENS = {"cpu": (64, 256), "cuda": (512, 512)}
"""Queries and keys of a score block. Few queries waste less work on masked scores, many keys keep the matrix
multiplications large; on GPUs each block costs kernel launches."""


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
    """Compute causal attention `[B, A, T, D]` in the dtype of `query`, and its tangent, None if all tangents are None.

    `query [B, A, T, D]`; `key` and `value [B, K, T, D]`, where A is a multiple of K (grouped-query attention);
    `tangents` of the three, None for zero; `scale`: factor on the scores; `sliding_window`: number of keys that a query
    sees, itself included, None for all; `sinks`: not multiplied by `scale`.
    """
    sink, d_sink = sinks or (None, None)
    with_tangent = any(tangent is not None for tangent in (*tangents, d_sink))
    blocks = _Blocks(query, key, value, tangents, scale, sliding_window)
    output = torch.empty_like(query)
    d_output = torch.empty_like(query) if with_tangent else None
    for queries in blocks.iter_query_blocks():
        row_max = blocks.expand_heads(sink, absent=-torch.inf)
        row_sum = torch.full_like(row_max, 0.0 if sink is None else 1.0)
        weighted_value = blocks.new_accumulator(query.shape[-1])
        d_row_sum = blocks.expand_heads(d_sink, absent=0.0)  # sum of exp(S - m) * dS
        d_weighted_value = torch.zeros_like(weighted_value) if with_tangent else None
        for keys in blocks.iter_key_blocks(queries):
            scores = blocks.scores(queries, keys)
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            safe_max = new_max
            if sliding_window is not None:  # a query that has seen no key yet: -inf - -inf is NaN
                safe_max = new_max.masked_fill(new_max == -torch.inf, 0.0)
            exp_scores = scores.sub_(safe_max).exp_()
            rescale = row_max.sub_(safe_max).exp_()
            row_max = new_max
            row_sum.mul_(rescale).add_(exp_scores.sum(-1, keepdim=True))
            _add_bmm(weighted_value.mul_(rescale), exp_scores, blocks.value[:, keys])
            if d_weighted_value is not None:
                blocks.add_tangents(d_weighted_value.mul_(rescale), d_row_sum.mul_(rescale), exp_scores, keys)
        normalizer = row_sum.masked_fill_(row_sum == 0, 1.0)
        out = weighted_value.div_(normalizer)
        blocks.write_block(output, queries, out)
        if d_output is not None and d_weighted_value is not None:
            blocks.write_block(d_output, queries, d_weighted_value.addcmul_(d_row_sum, out, value=-1).div_(normalizer))
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
    """Compute only the tangent, `[B, A, T, D]`, of causal attention whose `output [B, A, T, D]` and `log_sum_exp [B, A,
    T]`, over each query's scaled scores and its sink, another kernel has computed. Other arguments as in
    `block_attention`; at least one tangent."""
    d_output = torch.empty_like(query)
    # One sequence after the other, so that a block of scores has the heads of one only.
    for index in range(len(query)):
        one = slice(index, index + 1)
        d_qkv = [None if tangent is None else tangent[one] for tangent in tangents]
        _write_sequence_tangent(  # frees this sequence's blocks before those of the next one are allocated
            d_output[one],
            _Blocks(query[one], key[one], value[one], d_qkv, scale, None),
            output[one],
            log_sum_exp[one],
            sinks or (None, None),
        )
    return d_output


def _write_sequence_tangent(
    d_output: Tensor, blocks: "_Blocks", output: Tensor, log_sum_exp: Tensor, sinks: tuple[Tensor | None, Tensor | None]
) -> None:
    sink, d_sink = sinks
    for queries in blocks.iter_query_blocks():
        normalizer = blocks.take_queries(log_sum_exp[..., None], queries, blocks.accumulate)
        d_out = blocks.new_accumulator(output.shape[-1])
        d_row_sum = blocks.expand_heads(d_sink, absent=0.0)  # sum of P * dS
        if d_sink is not None:
            d_row_sum.mul_(blocks.expand_heads(sink, absent=-torch.inf).sub_(normalizer).exp_())
        for keys in blocks.iter_key_blocks(queries):
            weights = blocks.scores(queries, keys).sub_(normalizer).exp_()
            blocks.add_tangents(d_out, d_row_sum, weights, keys)
        out = blocks.take_queries(output, queries, blocks.accumulate)
        blocks.write_block(d_output, queries, d_out.addcmul_(d_row_sum, out, value=-1))


class _Blocks:
    """Query, key, value and tangents in the layout of `bmm`, and the blocks of their scores.

    Each key/value head is an item of the batch, with the queries of all its query heads as rows. Keys and values are
    converted once; queries block by block, so that a block stays in the CPU's cache. Arguments as for
    `block_attention`.
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
        self._num_tokens, self._scale, self._sliding_window = query.shape[2], scale, sliding_window
        self._query_tokens, self._key_tokens = BLOCK_TOKENS[query.device.type]
        self.accumulate = torch.float64 if query.dtype == torch.float64 else torch.float32
        # Tensor cores multiply 16-bit inputs and accumulate in fp32; on a CPU everything is in fp32.
        in_half_precision = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
        self._matmul_dtype = query.dtype if in_half_precision else self.accumulate

        self._query, (self._d_query, d_key, d_value) = query, tangents
        self._key, self.value = self._flatten_heads(key), self._flatten_heads(value)
        d_key, self._d_value = (
            None if tangent is None else self._flatten_heads(tangent) for tangent in (d_key, d_value)
        )
        # dS is one matrix multiplication, [dQ, Q] [K, dK]^T, without absent tangents. It is not fused with S, nor P dV
        # with P V: the values would be rounded differently from those of a pass without tangents.
        self._has_d_key, self._has_d_scores = d_key is not None, self._d_query is not None or d_key is not None
        self._d_score_keys = (
            _concat_present(None if self._d_query is None else self._key, d_key) if self._has_d_scores else None
        )
        # All score blocks share one buffer: on a CPU, allocating each takes a quarter of the matmul's time.
        num_scores = math.prod(query.shape[:2])
        num_scores *= min(self._query_tokens, self._num_tokens) * min(self._key_tokens, self._num_tokens)
        self._scores_memory = torch.empty(num_scores, dtype=self.accumulate, device=query.device)
        self._d_scores_memory = torch.empty_like(self._scores_memory) if self._has_d_scores else None
        self._positions = torch.arange(self._num_tokens, device=query.device)

    def iter_query_blocks(self) -> Iterator[slice]:
        """Yield the tokens of each block of queries, and make it the current block of the methods below."""
        for start in range(0, self._num_tokens, self._query_tokens):
            queries = slice(start, min(start + self._query_tokens, self._num_tokens))
            self._rows = self.take_queries(self._query, queries, self._matmul_dtype)
            if self._has_d_scores:
                d_rows = (
                    None if self._d_query is None else self.take_queries(self._d_query, queries, self._matmul_dtype)
                )
                self._d_score_rows = _concat_present(d_rows, self._rows if self._has_d_key else None)
            yield queries

    def iter_key_blocks(self, queries: slice) -> Iterator[slice]:
        """Yield the tokens of each block of keys that a block of queries sees."""
        size, window = self._key_tokens, self._sliding_window
        first = 0 if window is None else max(0, queries.start - window + 1)
        for start in range(first // size * size, queries.stop, size):
            yield slice(start, min(start + size, queries.stop))

    def take_queries(self, tensor: Tensor, queries: slice, dtype: torch.dtype) -> Tensor:
        """Reshape a block of queries of `[B, A, T, D]` to `[B * K, G * t, D]`."""
        return tensor[:, :, queries].reshape(len(self._key), -1, tensor.shape[-1]).to(dtype)

    def write_block(self, output: Tensor, queries: slice, rows: Tensor) -> None:
        """Write a block's `[B * K, G * t, D]` into `[B, A, T, D]`."""
        target = output[:, :, queries]
        target.copy_(rows.view(target.shape))

    def new_accumulator(self, size: int) -> Tensor:
        """Zeros `[B * K, G * t, size]` in the accumulation dtype."""
        return self._rows.new_zeros((*self._rows.shape[:2], size), dtype=self.accumulate)

    def expand_heads(self, values: Tensor | None, *, absent: float) -> Tensor:
        """Expand `[A]` to an accumulator `[B * K, G * t, 1]`; filled with `absent` if `values` is None."""
        rows = self.new_accumulator(1)
        if values is None:
            return rows.fill_(absent)
        rows.view(len(self._query), len(values), -1).copy_(values[:, None])
        return rows

    def scores(self, queries: slice, keys: slice) -> Tensor:
        """Compute masked scores `[B * K, G * t, s]`, in a buffer that the next block overwrites."""
        scores = _scaled_bmm(self._rows, self._key[:, keys].transpose(1, 2), self._scores_memory, self._scale)
        mask = _causal_mask(queries, keys, self._positions, self._sliding_window)
        if mask is not None:
            scores.view(-1, *mask.shape).masked_fill_(mask, -torch.inf)
        return scores

    def add_tangents(self, d_values: Tensor, d_row_sum: Tensor, weights: Tensor, keys: slice) -> None:
        """Add `W dV + (W * dS) V` and the sums of `W * dS` over keys, for weights `W` `[B * K, G * t, s]`."""
        if self._d_value is not None:
            _add_bmm(d_values, weights, self._d_value[:, keys])
        if self._d_score_keys is None or self._d_scores_memory is None:
            return
        right = self._d_score_keys[:, keys].transpose(1, 2)
        weighted = _scaled_bmm(self._d_score_rows, right, self._d_scores_memory, self._scale).mul_(weights)
        d_row_sum.add_(weighted.sum(-1, keepdim=True))
        _add_bmm(d_values, weighted, self.value[:, keys])

    def _flatten_heads(self, tensor: Tensor) -> Tensor:
        """Reshape `[B, K, T, D]` to `[B * K, T, D]`."""
        return tensor.flatten(0, 1).to(self._matmul_dtype)


def _concat_present(first: Tensor | None, second: Tensor | None) -> Tensor:
    """Concatenate the tensors that are not None along the last dimension."""
    present = [tensor for tensor in (first, second) if tensor is not None]
    return present[0] if len(present) == 1 else torch.cat(present, -1)


def _scaled_bmm(left: Tensor, right: Tensor, memory: Tensor, scale: float) -> Tensor:
    """`scale * bmm(left, right)`, written to `memory` in its dtype."""
    shape = (*left.shape[:2], right.shape[2])
    product = memory[: math.prod(shape)].view(shape)
    if left.dtype == memory.dtype:
        return torch.baddbmm(product, left, right, beta=0, alpha=scale, out=product)
    return torch.mul(torch.bmm(left, right, out_dtype=memory.dtype), scale, out=product)


def _add_bmm(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `bmm(left, right)` to `total`, in its dtype."""
    if right.dtype == total.dtype:
        total.baddbmm_(left, right)
    else:
        total.add_(torch.bmm(left.to(right.dtype), right, out_dtype=total.dtype))


def _causal_mask(queries: slice, keys: slice, positions: Tensor, sliding_window: int | None) -> Tensor | None:
    """Bool `[t, s]`, True where a query must not see a key; None if all are visible."""
    after = keys.stop - 1 > queries.start
    too_far = sliding_window is not None and queries.stop - 1 - keys.start >= sliding_window
    if not after and not too_far:
        return None
    distance = positions[queries, None] - positions[None, keys]
    if sliding_window is None or not too_far:
        return distance < 0
    return (distance >= sliding_window) | (distance < 0)
