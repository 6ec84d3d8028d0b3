"""Triton kernels of `vcore_ds.models.pointwise`, for values, gradients and tangents: each reads its inputs once and
writes once.

Arithmetic is in fp32. Importing this module needs Triton; only `pointwise` imports it, on a GPU. With
`TRITON_INTERPRET=1` Triton runs kernels on the CPU, as the tests do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_NUMEL = 4096
"""Elements of a program's tile."""


def rms_norm_tangent_kernel(
    x: Tensor, weight: Tensor, inverse: Tensor, d_x: Tensor | None, d_weight: Tensor | None
) -> Tensor:
    """Compute the tangent of an RMSNorm over the last dimension, from at least one tangent of `x [..., size]` and
    `weight [size]`. `inverse`: inverse root mean squares of x, fp32 `[..., 1]`."""
    size = x.shape[-1]
    rows, d_rows = x.reshape(-1, size), None if d_x is None else d_x.reshape(-1, size)
    tangent = torch.empty_like(rows, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(size)
    num_rows = max(1, TILE_NUMEL // block)
    with torch.cuda.device_of(x):
        _rms_norm_tangent[(triton.cdiv(len(rows), num_rows),)](
            rows,
            weight,
            inverse.reshape(-1),
            d_rows,
            d_weight,
            tangent,
            len(rows),
            rows.stride(0),
            0 if d_rows is None else d_rows.stride(0),
            SIZE=size,
            ROWS=num_rows,
            BLOCK=block,
            num_warps=8 if block > TILE_NUMEL else 4,
        )
    return tangent.view(x.shape)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_tangent(
    x_ptr,
    weight_ptr,
    inverse_ptr,
    d_x_ptr,
    d_weight_ptr,
    out_ptr,
    num_rows,
    x_stride,
    d_x_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < SIZE)
    inverse = tl.load(inverse_ptr + row, mask=row < num_rows, other=0.0)
    normalized = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32) * inverse
    tangent = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if d_x_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
        d_x = tl.load(d_x_ptr + row * d_x_stride + column, mask=inside, other=0.0).to(tl.float32)
        projection = tl.sum(normalized * d_x, axis=1, keep_dims=True) / SIZE
        tangent += weight * inverse * (d_x - normalized * projection)
    if d_weight_ptr is not None:
        tangent += normalized * tl.load(d_weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, tangent.to(out_ptr.dtype.element_ty), mask=inside)


def rotate_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x [b, A, T, D]` by angles with cosines and sines `[b or 1, 1, T, D]`; the result has the strides of a
    contiguous `[b, T, A, D]`."""
    batch, num_heads, num_tokens, head_dim = x.shape
    out = x.new_empty(batch, num_tokens, num_heads, head_dim).transpose(1, 2)
    cos, sin = cos.expand(batch, -1, -1, -1), sin.expand(batch, -1, -1, -1)
    half = triton.next_power_of_2(head_dim // 2)
    heads = min(triton.next_power_of_2(num_heads), max(1, TILE_NUMEL // (2 * half)))
    grid = (batch * num_tokens, triton.cdiv(num_heads, heads))
    with torch.cuda.device_of(x):
        _rotate[grid](
            x,
            cos,
            sin,
            out,
            num_tokens,
            *x.stride(),
            *(cos.stride(i) for i in (0, 2, 3)),
            *(sin.stride(i) for i in (0, 2, 3)),
            NUM_HEADS=num_heads,
            HALF=head_dim // 2,
            HEADS=heads,
            BLOCK=half,
            num_warps=4,
        )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_tokens,
    x_row,
    x_head,
    x_token,
    x_feature,
    cos_row,
    cos_token,
    cos_feature,
    sin_row,
    sin_token,
    sin_feature,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64)
    row, token = position // num_tokens, position % num_tokens
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    feature = tl.arange(0, BLOCK)[None, :]
    inside = (head < NUM_HEADS) & (feature < HALF)
    x_ptr += row * x_row + token * x_token
    first = tl.load(x_ptr + head * x_head + feature * x_feature, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + head * x_head + (feature + HALF) * x_feature, mask=inside, other=0.0).to(tl.float32)
    cos_ptr += row * cos_row + token * cos_token
    sin_ptr += row * sin_row + token * sin_token
    is_feature = feature < HALF
    cos_first = tl.load(cos_ptr + feature * cos_feature, mask=is_feature, other=0.0).to(tl.float32)
    cos_second = tl.load(cos_ptr + (feature + HALF) * cos_feature, mask=is_feature, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_ptr + feature * sin_feature, mask=is_feature, other=0.0).to(tl.float32)
    sin_second = tl.load(sin_ptr + (feature + HALF) * sin_feature, mask=is_feature, other=0.0).to(tl.float32)
    out_ptr += (position * NUM_HEADS + head) * 2 * HALF + feature
    tl.store(out_ptr, (first * cos_first - second * sin_first).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + HALF, (second * cos_second + first * sin_second).to(out_ptr.dtype.element_ty), mask=inside)


def gated_silu_kernel(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu(gate) * up`."""
    gate, up = gate.contiguous(), up.contiguous()
    value = torch.empty_like(gate)
    with torch.cuda.device_of(gate):
        _gated_silu[(triton.cdiv(gate.numel(), TILE_NUMEL),)](
            gate, up, value, gate.numel(), BLOCK=TILE_NUMEL, num_warps=8
        )
    return value


@triton.jit(do_not_specialize=["numel"])
def _gated_silu(gate_ptr, up_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty), mask=inside)


def gated_silu_backward_kernel(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `silu(gate) * up` by both, from that of the value."""
    gate, up, gradient = gate.contiguous(), up.contiguous(), gradient.contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    with torch.cuda.device_of(gate):
        _gated_silu_backward[(triton.cdiv(gate.numel(), TILE_NUMEL),)](
            gate, up, gradient, d_gate, d_up, gate.numel(), BLOCK=TILE_NUMEL, num_warps=8
        )
    return d_gate, d_up


@triton.jit(do_not_specialize=["numel"])
def _gated_silu_backward(gate_ptr, up_ptr, gradient_ptr, d_gate_ptr, d_up_ptr, numel, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    d_gate = gradient * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(d_gate_ptr + place, d_gate.to(d_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(d_up_ptr + place, (gradient * gate * sigmoid).to(d_up_ptr.dtype.element_ty), mask=inside)


def gated_silu_tangent_kernel(gate: Tensor, up: Tensor, d_gate: Tensor | None, d_up: Tensor | None) -> Tensor:
    """Compute the tangent of `silu(gate) * up`; at least one tangent."""
    gate, up = gate.contiguous(), up.contiguous()
    d_gate, d_up = (None if dx is None else dx.contiguous() for dx in (d_gate, d_up))
    tangent = torch.empty_like(gate)
    with torch.cuda.device_of(gate):
        _gated_silu_tangent[(triton.cdiv(gate.numel(), TILE_NUMEL),)](
            gate, up, d_gate, d_up, tangent, gate.numel(), BLOCK=TILE_NUMEL, num_warps=8
        )
    return tangent


@triton.jit(do_not_specialize=["numel"])
def _gated_silu_tangent(gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    tangent = tl.zeros((BLOCK,), dtype=tl.float32)
    if d_gate_ptr is not None:
        up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
        d_gate = tl.load(d_gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tangent += d_gate * sigmoid * (1.0 + gate * (1.0 - sigmoid)) * up
    if d_up_ptr is not None:
        tangent += tl.load(d_up_ptr + place, mask=inside, other=0.0).to(tl.float32) * gate * sigmoid
    tl.store(out_ptr + place, tangent.to(out_ptr.dtype.element_ty), mask=inside)
