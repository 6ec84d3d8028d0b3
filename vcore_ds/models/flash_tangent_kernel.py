"""Triton kernel of the JVP of causal flash attention; `vcore_ds.models.flash_tangent` launches it.

The algorithms are those of `vcore_ds.models.block_attention`, which has the formulas. Here the score blocks stay on
chip, and one launch covers all sequences of the batch. A program computes one block of queries of one head, and up to
`VALUE_DIM` of the value dimensions. The kernel has two modes:

- Value and tangent: an online softmax over blocks of keys, with all accumulators of the tangent rescaled together with
  those of the value. Six matrix multiplications for each pair of blocks: `Q K^T`, `dQ K^T`, `Q dK^T`, `P V`, `P dV` and
  `(P * dS) V`.
- `VALUE_IS_GIVEN`: the tangent alone, for an output and a log-sum-exp `L` that another kernel has computed. Since
  `P = exp(S - L)`, there is no running maximum, no rescaling and no `P V`: five matrix multiplications, and half of the
  accumulators.

Matrix multiplications take inputs in the inputs' dtype and accumulate in fp32. The softmax weights and their tangent
are rounded to the inputs' dtype before they are multiplied, and the row sums add the rounded numbers, so that the
rounding cancels in the normalised output and in its tangent. In fp16 the weights' tangent has the range of fp16, like
the tangents of all other activations.
"""

import triton
import triton.language as tl

PRECISION = tl.constexpr("ieee")
"""`tl.dot` in fp32 without rounding to TF32."""

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


# Triton specialises integer arguments on 1 and on multiples of 16, and so would compile again in the middle of a run
# when a batch's sizes differ. It always specialises integers in tuples; those here are multiples of the head dimension.
@triton.jit(
    do_not_specialize=[
        "log_sum_exp_row_stride",
        "log_sum_exp_head_stride",
        "log_sum_exp_token_stride",
        "num_sequences",
        "row_tokens",
    ]
)
def attend(
    query,
    key,
    value,
    d_query,
    d_key,
    d_value,
    output,
    d_output,
    log_sum_exp,
    query_strides,  # row, head, token, dimension
    key_strides,
    value_strides,
    d_query_strides,
    d_key_strides,
    d_value_strides,
    output_strides,
    d_output_strides,
    log_sum_exp_row_stride,
    log_sum_exp_head_stride,
    log_sum_exp_token_stride,
    sinks,  # [A], or None
    d_sinks,  # [A], or None for zero
    cu_seqlens,
    num_sequences,
    row_tokens,
    group_heads,
    scale,
    sliding_window,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SLIDING: tl.constexpr,
    VALUE_IS_GIVEN: tl.constexpr,  # output and log_sum_exp are inputs
    UPCAST: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):
    """Compute output, tangent and log-sum-exp of one block of queries of one head; or the tangent alone."""
    # Later queries see more keys. Start with the longest programs, so that the short ones fill the tail.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    first_dim = tl.program_id(2) * VALUE_DIM  # first value dimension of this program
    value_dim = HEAD_DIM - first_dim

    # Sequence s has the blocks from `cu_seqlens[s] // QUERY_BLOCK + s` on: enough for its tokens, at most one too many.
    sequence = -1
    for first in range(0, num_sequences, 128):
        numbers = first + tl.arange(0, 128)
        begins = tl.load(cu_seqlens + numbers, mask=numbers < num_sequences, other=2**30)
        sequence += tl.sum((begins // QUERY_BLOCK + numbers <= block).to(tl.int32), 0)
    begin = tl.load(cu_seqlens + sequence)
    num_tokens = tl.load(cu_seqlens + sequence + 1) - begin
    query_start = (block - begin // QUERY_BLOCK - sequence) * QUERY_BLOCK
    if query_start >= num_tokens:
        return

    # Move all pointers to the first token of this sequence and head.
    row = begin // row_tokens
    column = begin - row * row_tokens
    kv_head = head // group_heads
    query = _offset_pointer(query, query_strides, row, head, column)
    key = _offset_pointer(key, key_strides, row, kv_head, column)
    value = _offset_pointer(value, value_strides, row, kv_head, column) + first_dim * value_strides[3]
    q = _load(query, query_strides, query_start, num_tokens, HEAD_DIM, DIM, QUERY_BLOCK, UPCAST)
    dq = None
    if d_query is not None:
        d_query = _offset_pointer(d_query, d_query_strides, row, head, column)
        dq = _load(d_query, d_query_strides, query_start, num_tokens, HEAD_DIM, DIM, QUERY_BLOCK, UPCAST)
    if d_key is not None:
        d_key = _offset_pointer(d_key, d_key_strides, row, kv_head, column)
    if d_value is not None:
        d_value = _offset_pointer(d_value, d_value_strides, row, kv_head, column) + first_dim * d_value_strides[3]

    output = _offset_pointer(output, output_strides, row, head, column) + first_dim * output_strides[3]
    log_sum_exp_strides = (log_sum_exp_row_stride, log_sum_exp_head_stride, log_sum_exp_token_stride)
    log_sum_exp = _offset_pointer(log_sum_exp, log_sum_exp_strides, row, head, column)
    queries = query_start + tl.arange(0, QUERY_BLOCK)
    # A sink is an additional score whose value vector is 0: the initial value of the softmax sums, or part of the given
    # log-sum-exp.
    d_row_sum = tl.zeros([QUERY_BLOCK], tl.float32)
    if VALUE_IS_GIVEN:
        in_sequence = queries < num_tokens
        log2_sum = tl.load(log_sum_exp + queries * log_sum_exp_token_stride, mask=in_sequence, other=0.0) * LOG2_E
        if d_sinks is not None:
            d_row_sum += tl.load(d_sinks + head) * tl.exp2(tl.load(sinks + head) * LOG2_E - log2_sum)
    else:
        row_max = tl.full([QUERY_BLOCK], -float("inf"), tl.float32)
        row_sum = tl.zeros([QUERY_BLOCK], tl.float32)
        if sinks is not None:
            row_max = tl.zeros([QUERY_BLOCK], tl.float32) + tl.load(sinks + head) * LOG2_E
            row_sum = tl.full([QUERY_BLOCK], 1.0, tl.float32)
        if d_sinks is not None:
            d_row_sum += tl.load(d_sinks + head)
        total = tl.zeros([QUERY_BLOCK, VALUE_DIM], tl.float32)
    d_total = tl.zeros([QUERY_BLOCK, VALUE_DIM], tl.float32)

    first_key = 0
    if SLIDING:
        first_key = tl.maximum(query_start - sliding_window + 1, 0) // KEY_BLOCK * KEY_BLOCK
    dtype: tl.constexpr = value.dtype.element_ty
    # One loop with a mask, though only diagonal blocks need it: with two loops the accumulators pass from one to the
    # other in registers, and ptxas then serialises every tensor-core instruction (warning C7515).
    for start in range(first_key, tl.minimum(query_start + QUERY_BLOCK, num_tokens), KEY_BLOCK):
        k = _load(key, key_strides, start, num_tokens, HEAD_DIM, DIM, KEY_BLOCK, UPCAST)
        v = _load(value, value_strides, start, num_tokens, value_dim, VALUE_DIM, KEY_BLOCK, UPCAST)
        # Issue all query-key matrix multiplications before the softmax, so that it waits for them once.
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        d_scores = None
        if dq is not None:
            d_scores = tl.dot(dq, tl.trans(k), input_precision=PRECISION)
        if d_key is not None:
            dk = _load(d_key, d_key_strides, start, num_tokens, HEAD_DIM, DIM, KEY_BLOCK, UPCAST)
            d_scores = tl.dot(q, tl.trans(dk), d_scores, input_precision=PRECISION)
        distance = queries[:, None] - (start + tl.arange(0, KEY_BLOCK))[None, :]
        seen = distance >= 0
        if SLIDING:
            seen = seen & (distance < sliding_window)
        scores = tl.where(seen, scores * (scale * LOG2_E), -float("inf"))
        if VALUE_IS_GIVEN:
            exp_scores = tl.exp2(scores - log2_sum[:, None])
            weights = _round(exp_scores, dtype, UPCAST)
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            safe_max = new_max
            if SLIDING:  # a query that has seen no key yet has maximum -inf; -inf - -inf is NaN
                safe_max = tl.where(new_max == -float("inf"), 0.0, new_max)
            exp_scores = tl.exp2(scores - safe_max[:, None])
            rescale = tl.exp2(row_max - safe_max)
            row_max = new_max
            weights = _round(exp_scores, dtype, UPCAST)
            row_sum = row_sum * rescale + tl.sum(weights.to(tl.float32), 1)
            total = tl.dot(weights, v, total * rescale[:, None], input_precision=PRECISION)
            d_total = d_total * rescale[:, None]
            d_row_sum = d_row_sum * rescale  # also without d_scores: it may hold the sink's tangent
        if d_value is not None:
            dv = _load(d_value, d_value_strides, start, num_tokens, value_dim, VALUE_DIM, KEY_BLOCK, UPCAST)
            d_total = tl.dot(weights, dv, d_total, input_precision=PRECISION)
        if d_scores is not None:
            d_weights = _round(exp_scores * (d_scores * scale), dtype, UPCAST)
            d_row_sum += tl.sum(d_weights.to(tl.float32), 1)
            d_total = tl.dot(d_weights, v, d_total, input_precision=PRECISION)

    if VALUE_IS_GIVEN:
        out = _load(output, output_strides, query_start, num_tokens, value_dim, VALUE_DIM, QUERY_BLOCK, True)
    else:
        # With a window, queries beyond the end of the sequence may have seen no key; they are not stored.
        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
        out = total / row_sum[:, None]
        _store(output, output_strides, out, query_start, num_tokens, value_dim, VALUE_DIM, QUERY_BLOCK)
        # The programs of all value dimensions store the same numbers.
        natural = (row_max + tl.log2(row_sum)) * LN_2
        tl.store(log_sum_exp + queries * log_sum_exp_token_stride, natural, mask=queries < num_tokens)
    if d_output is not None:
        d_out = d_total - d_row_sum[:, None] * out
        if not VALUE_IS_GIVEN:
            d_out = d_out / row_sum[:, None]
        d_output = _offset_pointer(d_output, d_output_strides, row, head, column) + first_dim * d_output_strides[3]
        _store(d_output, d_output_strides, d_out, query_start, num_tokens, value_dim, VALUE_DIM, QUERY_BLOCK)


@triton.jit
def _offset_pointer(pointer, strides, row, head, column):
    """Pointer to a token of a head. Offsets in 64 bits: a large batch exceeds 32."""
    offset = tl.cast(row, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    return pointer + offset + tl.cast(column, tl.int64) * strides[2]


@triton.jit
def _load(
    pointer, strides, first, num_tokens, head_dim,
    DIM: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Load `[BLOCK, DIM]` starting at token `first`, in fp32 if `UPCAST`; zeros beyond `num_tokens` and `head_dim`."""
    tokens, dims = tl.arange(0, BLOCK)[:, None], tl.arange(0, DIM)[None, :]
    tile = pointer + tl.cast(first, tl.int64) * strides[2] + tokens * strides[2] + dims * strides[3]
    tile = tl.load(tile, mask=(tokens < num_tokens - first) & (dims < head_dim), other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _store(pointer, strides, tile, first, num_tokens, head_dim, DIM: tl.constexpr, BLOCK: tl.constexpr):
    tokens, dims = tl.arange(0, BLOCK)[:, None], tl.arange(0, DIM)[None, :]
    target = pointer + tl.cast(first, tl.int64) * strides[2] + tokens * strides[2] + dims * strides[3]
    tl.store(target, tile.to(pointer.dtype.element_ty), mask=(tokens < num_tokens - first) & (dims < head_dim))


@triton.jit
def _round(tile, dtype: tl.constexpr, UPCAST: tl.constexpr):
    tile = tile.to(dtype)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile
