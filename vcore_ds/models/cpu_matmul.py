"""bf16 matrix multiplications and attention at fp32 speed on CPUs without bf16 instructions.

On such a CPU (AVX2 only: most laptops, many cloud machines) PyTorch falls back to loops, 10 to 100 times slower than
its fp32 kernels. The kernels here convert their operands to fp32, compute, and round once, which is also what bf16
instructions do.

They replace PyTorch's kernels in the whole process, below autograd: forward, backward, forward mode and autocast all
call the operators listed here. Nothing is replaced on CPUs that have the instructions. fp16 is treated the same way.
"""

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from vcore_ds.common.errors import UserError

VARIABLE = "VCORE_DS_CPU_BF16"
"""Environment variable: `fp32` replaces the kernels on every CPU, `native` on none."""

PIECE_ELEMENTS = 2**22
"""fp32 elements per piece of a matrix multiplication, 16 MiB. Tensors above 32 MiB get fresh memory from the system,
which costs a large multiplication up to a third of its speed, and 8 rows times an output embedding 4/5."""

MAX_NATIVE_ROWS = 2
"""Up to this number of rows PyTorch's loops are faster if they read the weight along its rows, as in `x W^T`: in
generation every token would wait for the conversion of all weights."""

MATMULS = ("mm", "mm.out", "addmm", "addmm_", "addmm.out")
BATCHED_MATMULS = ("bmm", "bmm.out", "baddbmm", "baddbmm_", "baddbmm.out")
ATTENTION = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")

Kernel = Callable[..., Any]  # an operator's boxed kernel: takes the dispatch keys, then the arguments

_CPU = DispatchKeySet(DispatchKey.CPU)
_ZERO = torch.zeros(())
_replaced: torch.library.Library | None = None


def computes_in_fp32() -> bool:
    """Whether bf16 matrix multiplications on this CPU are computed in fp32. Raises UserError if the environment
    variable is neither `fp32` nor `native`."""
    choice = os.environ.get(VARIABLE)
    if choice not in (None, "fp32", "native"):
        raise UserError(f"{VARIABLE}: found {choice!r}; expected fp32 or native, or no such variable")
    return choice == "fp32" if choice is not None else torch.bfloat16 in _types_without_instructions()


def use_fast_cpu_matmul() -> None:
    """Replace the kernels of this process if that is faster; forked processes inherit them. Calling it again has no
    effect. Raises UserError like `computes_in_fp32`."""
    global _replaced
    if _replaced is None and computes_in_fp32():
        _replaced = _replace_kernels()


def measure_matmul_flops(dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of eight square matrix multiplications, by the processor time of all threads, which does
    not depend on other processes."""
    factor, seconds = torch.ones(1024, 1024, dtype=dtype), []
    for _ in range(8):
        start = time.process_time()
        factor @ factor
        seconds.append(time.process_time() - start)
    return torch.get_num_threads() * 2 * 1024**3 / min(seconds)


def _types_without_instructions() -> set[torch.dtype]:
    has_mkldnn = torch.backends.mkldnn.is_available()
    supported = {
        torch.bfloat16: has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: has_mkldnn and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return {dtype for dtype, is_supported in supported.items() if not is_supported}


def _replace_kernels() -> torch.library.Library:
    """Replace the kernels for as long as the returned library lives."""
    dtypes = _types_without_instructions() | {torch.bfloat16}
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about every replaced kernel
        for names in (MATMULS, BATCHED_MATMULS):
            wide: Kernel = torch.library.get_kernel(f"aten::{names[2]}", "CPU").call_boxed
            for name in names:
                native: Kernel = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
                library.impl(name, _make_matmul_kernel(name, native, wide, dtypes), "CPU", allow_override=True)
        for name in ATTENTION:
            native = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
            library.impl(name, _make_attention_kernel(native, dtypes), "CPU", allow_override=True)
    return library


def _make_matmul_kernel(name: str, native: Kernel, wide: Kernel, dtypes: set[torch.dtype]) -> Kernel:
    """Make the replacement of `native`, PyTorch's kernel of the operator `name`, for operands in one of the `dtypes`.
    `wide`: PyTorch's kernel of `addmm` or `baddbmm`."""

    def is_replaced(left: Tensor, right: Tensor, *others: Tensor) -> bool:
        if left.dtype not in dtypes or any(other.dtype is not left.dtype for other in (right, *others)):
            return False
        return left.dim() == 3 or left.shape[0] > MAX_NATIVE_ROWS or right.stride(0) != 1

    def matmul(*operands: Tensor, **options: Any) -> Tensor:
        *addend, left, right = operands
        out = [options["out"]] if "out" in options else []
        if not is_replaced(left, right, *addend, *out):
            return native(_CPU, *operands, **options)
        beta = options.get("beta", 1) if addend else 0
        result = _addmm(wide, addend[0] if addend else _ZERO, left, right, beta, options.get("alpha", 1))
        if name.endswith("_"):
            return addend[0].copy_(result)
        if not out:
            return result
        if out[0].shape != result.shape:
            out[0].resize_(result.shape)
        return out[0].copy_(result)

    return matmul


def _addmm(wide: Kernel, addend: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """`beta * addend + alpha * left @ right`, `[m, n]` or `[b, m, n]`, rounded once; the addend is expandable to it.
    Large multiplications without `b` are split along their longest dimension, into pieces of about `PIECE_ELEMENTS`
    fp32 elements."""
    m, k, n = *left.shape[-2:], right.shape[-1]
    num_pieces = 1 if left.dim() == 3 else -(-(m * k + k * n + m * n) // PIECE_ELEMENTS)
    longest = max(m, k, n)
    if num_pieces <= 1 or longest <= 1:
        return wide(_CPU, addend.float(), left.float(), right.float(), beta=beta, alpha=alpha).to(left.dtype)
    pieces = [slice(start, start + -(-longest // num_pieces)) for start in range(0, longest, -(-longest // num_pieces))]
    if longest == k:
        total = addend.float()
        for piece in pieces:
            total = wide(_CPU, total, left[:, piece].float(), right[piece].float(), beta=beta, alpha=alpha)
            beta = 1
        return total.to(left.dtype)
    addend, result, whole = addend.expand(m, n), left.new_empty(m, n), slice(None)
    left, right = (left.float(), right) if longest == n else (left, right.float())
    for piece in pieces:
        rows, columns = (whole, piece) if longest == n else (piece, whole)
        operands = (addend[rows, columns].float(), left[rows].float(), right[:, columns].float())
        result[rows, columns] = wide(_CPU, *operands, beta=beta, alpha=alpha)
    return result


def _make_attention_kernel(native: Kernel, dtypes: set[torch.dtype]) -> Kernel:
    """Make a kernel for the forward or backward of attention. The log-sum-exp of the scores is always fp32."""

    def attend(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        dtype = arguments[0].dtype
        if dtype not in dtypes:
            return native(_CPU, *arguments, **options)
        wide = [x.float() if isinstance(x, Tensor) else x for x in arguments]
        mask = options.get("attn_mask")
        if mask is not None and mask.is_floating_point():
            options["attn_mask"] = mask.float()
        output, *others = native(_CPU, *wide, **options)
        if len(others) == 1:
            return output.to(dtype), others[0]
        return tuple(x.to(dtype) for x in (output, *others))

    return attend
