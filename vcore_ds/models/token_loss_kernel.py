"""Triton kernel of the token loss (`vcore_ds.models.token_loss`) on a GPU in half precision.

PyTorch's operations pass over a block of fp32 logits ten times; the kernel reads it once for losses, once more for
their gradients, and writes these in half precision. Importing this module needs Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS = 4096
"""Logits of a row that a program has in registers."""


def losses_and_normalizers_kernel(
    logits: Tensor, targets: Tensor, losses: Tensor, log_normalizers: Tensor, gradient: Tensor | None
) -> None:
    """Write the losses and log-normalizers `[block]`, fp32, of `logits [block, V]`, fp32, and, unless None, the losses'
    gradient by the logits, `p - e`, to `gradient [block, V]`, in half precision."""
    _launch(logits, targets, losses, log_normalizers, None, gradient)


def logit_gradient_kernel(
    logits: Tensor, targets: Tensor, log_normalizers: Tensor, upstream: Tensor, gradient: Tensor
) -> None:
    """Write the gradient `upstream (p - e)` of losses whose normalizers are known, from each token's upstream gradient
    `[block]`. It is rounded once: for a likely token, rounding p first would lose the difference."""
    _launch(logits, targets, None, log_normalizers, upstream, gradient)


def _launch(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor | None,
    log_normalizers: Tensor,
    upstream: Tensor | None,
    gradient: Tensor | None,
) -> None:
    num_tokens, size = logits.shape
    with torch.cuda.device_of(logits):
        _token_loss_rows[(num_tokens,)](
            logits,
            targets,
            losses,
            log_normalizers,
            upstream,
            gradient,
            size,
            logits.stride(0),
            0 if gradient is None else gradient.stride(0),
            BLOCK=min(MAX_COLUMNS, triton.next_power_of_2(size)),
            num_warps=8,
        )


@triton.jit
def _token_loss_rows(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    log_normalizers_ptr,
    upstream_ptr,
    gradient_ptr,
    size,
    logits_stride,
    gradient_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    logits_ptr += row * logits_stride
    if losses_ptr is None:
        log_normalizer = tl.load(log_normalizers_ptr + row)
    else:
        # Each lane has the largest of its logits and the sum of their exponentials relative to it.
        largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            logit = tl.load(logits_ptr + column, mask=column < size, other=float("-inf"))
            new = tl.maximum(largest, logit)
            # Without these conditions a lane that has no logit yet would compute -inf - -inf, NaN.
            total *= tl.where(largest == new, 1.0, tl.exp(largest - new))
            total += tl.where(logit == float("-inf"), 0.0, tl.exp(logit - new))
            largest = new
        row_maximum = tl.max(largest, axis=0)
        log_normalizer = row_maximum + tl.log(tl.sum(total * tl.exp(largest - row_maximum), axis=0))
        tl.store(losses_ptr + row, log_normalizer - tl.load(logits_ptr + target))
        tl.store(log_normalizers_ptr + row, log_normalizer)
    if gradient_ptr is not None:
        gradient_ptr += row * gradient_stride
        factor = 1.0
        if upstream_ptr is not None:
            factor = tl.load(upstream_ptr + row)
        for start in range(0, size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            logit = tl.load(logits_ptr + column, mask=column < size, other=float("-inf"))
            gradient = factor * (tl.exp(logit - log_normalizer) - tl.where(column == target, 1.0, 0.0))
            tl.store(gradient_ptr + column, gradient.to(gradient_ptr.dtype.element_ty), mask=column < size)
