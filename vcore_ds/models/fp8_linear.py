"""A linear layer on FP8 factors, for tangents: utilities stay right with it, while FP8 values ruin them."""

import torch
from torch import Tensor

from vcore_ds.distributed.device import device

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SIZE_MULTIPLE = 16
"""cuBLAS needs rows of a multiple of 16 bytes in both factors, and in the product."""


def is_supported(weight: Tensor) -> bool:
    """Whether `fp8_linear` takes a weight of this shape and dtype."""
    return weight.dtype == torch.bfloat16 and all(size % _SIZE_MULTIPLE == 0 for size in weight.shape)


def has_fp8_units() -> bool:
    """Whether this rank's device multiplies FP8 matrices: a GPU from Ada and Hopper on, or the CPU, which is slow."""
    return device().type != "cuda" or torch.cuda.get_device_capability(device()) >= (8, 9)


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T` with both factors rounded to `float8_e4m3fn`, each row scaled to the largest number of that format.

    Args:
        x: `[..., in]`, bf16.
        weight: `[out, in]`, bf16, for which `is_supported`.

    Returns:
        `[..., out]`, bf16, summed in fp32.
    """
    (rows, row_scales), (columns, column_scales) = _quantize(x.flatten(0, -2)), _quantize(weight)
    product = torch._scaled_mm(
        rows, columns.t(), scale_a=row_scales, scale_b=column_scales.t().contiguous(), out_dtype=x.dtype
    )
    return product.view(*x.shape[:-1], len(weight))


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in FP8 and the fp32 scales, `[N, 1]`, by which they are to be multiplied."""
    scales = x.abs().amax(-1, keepdim=True).float().clamp_(min=torch.finfo(torch.float32).tiny) / _LARGEST
    return (x / scales).to(torch.float8_e4m3fn), scales
