"""Products of bf16 matrices, and attention in bf16, at the speed of fp32 on CPUs without instructions for bf16.

PyTorch falls back to loops on such a CPU (AVX2 alone: most laptops, many machines in the cloud), 10 to 100 times slower
than its kernels for fp32. The kernels here widen their operands, compute in fp32 and round once. That is what
instructions for bf16 do: products and sums in fp32, one rounding.

They take the place of PyTorch's own for the whole process, below autograd: forward, backward, forward mode and autocast
all end in the operators listed here. Wherever the CPU has the instructions, nothing is replaced. fp16 is treated in the
same way.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from vcore_ds.common.errors import UserError

VARIABLE = "VCORE_DS_CPU_BF16"
"""Environment variable: `fp32` replaces the kernels on any CPU, `native` on none."""

PIECE_ELEMENTS = 2**22
"""Elements in fp32 of a piece of a product, 16 MiB. Memory above 32 MiB comes fresh from the system for every tensor,
and costs a large product up to a third of its speed; 8 rows times an output embedding 4/5."""

MAX_NATIVE_ROWS = 2
"""Up to here PyTorch's loops are faster where they read the weight along its rows, as in `x W^T`: a generated token
would wait for each weight to be widened."""

PRODUCTS = ("mm", "mm.out", "addmm", "addmm_", "addmm.out")
BATCHED_PRODUCTS = ("bmm", "bmm.out", "baddbmm", "baddbmm_", "baddbmm.out")
ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)

Kernel = Callable[..., Any]
"""Of an operator, boxed: arguments after the dispatch keys."""

_CPU = DispatchKeySet(DispatchKey.CPU)
_NOTHING = torch.zeros(())
_replaced: torch.library.Library | None = None


def computes_in_fp32() -> bool:
    """Whether products of bf16 matrices on this CPU are to be computed in fp32.

    Raises:
        UserError: the variable has another value than `fp32` and `native`.
    """
    found = os.environ.get(VARIABLE)
    if found not in (None, "fp32", "native"):
        raise UserError(f"{VARIABLE}: found {found!r}; expected fp32 or native, or no such variable")
    return found == "fp32" if found is not None else torch.bfloat16 in _types_without_instructions()


def describe_cpu_products() -> str | None:
    """A sentence for the start of a run; None where PyTorch's own kernels compute."""
    if not computes_in_fp32():
        return None
    if os.environ.get(VARIABLE) == "fp32":
        return f"Products of bf16 matrices are computed in fp32 ({VARIABLE}=fp32)"
    return "This CPU has no bf16 instructions: products of bf16 matrices are computed in fp32"


def cpu_products() -> Literal["fp32", "native"]:
    """What computes products of bf16 matrices on this CPU, for records."""
    return "fp32" if computes_in_fp32() else "native"


def use_fast_cpu_products() -> None:
    """Replaces the kernels of this process where that is faster; forked processes inherit them. Again: nothing.

    Raises UserError as `computes_in_fp32` does.
    """
    global _replaced
    if _replaced is None and computes_in_fp32():
        _replaced = _replace_kernels()


def _types_without_instructions() -> set[torch.dtype]:
    has_mkldnn = torch.backends.mkldnn.is_available()
    supported = {
        torch.bfloat16: has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: has_mkldnn and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return {dtype for dtype, is_supported in supported.items() if not is_supported}


def _replace_kernels() -> torch.library.Library:
    """The kernels are replaced as long as the result lives."""
    dtypes = _types_without_instructions() | {torch.bfloat16}
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for names, add_product in ((PRODUCTS, _add_product), (BATCHED_PRODUCTS, _add_batched_product)):
            wide: Kernel = torch.library.get_kernel(f"aten::{names[2]}", "CPU").call_boxed
            for name in names:
                native: Kernel = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
                library.impl(name, _product_kernel(name, native, wide, add_product, dtypes), "CPU", allow_override=True)
        for name in ATTENTION:
            native = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
            library.impl(name, _attention_kernel(native, dtypes), "CPU", allow_override=True)
    return library


def _product_kernel(name: str, native: Kernel, wide: Kernel, add_product: Kernel, dtypes: set[torch.dtype]) -> Kernel:
    """A kernel with the operator's own signature.

    Args:
        native: the operator's kernel.
        wide: the kernel of the operator that adds a product.
        add_product: `beta * addend + alpha * left @ right`, from operands of one of the `dtypes`.
    """

    def is_served(left: Tensor, right: Tensor, *others: Tensor) -> bool:
        if left.dtype not in dtypes or any(other.dtype is not left.dtype for other in (right, *others)):
            return False
        return left.dim() == 3 or left.shape[0] > MAX_NATIVE_ROWS or right.stride(0) != 1

    def product(left: Tensor, right: Tensor) -> Tensor:
        if not is_served(left, right):
            return native(_CPU, left, right)
        return add_product(wide, _NOTHING, left, right, 0, 1)

    def product_out(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        if not is_served(left, right, out):
            return native(_CPU, left, right, out=out)
        return _put(out, add_product(wide, _NOTHING, left, right, 0, 1))

    def add(addend: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if not is_served(left, right, addend):
            return native(_CPU, addend, left, right, beta=beta, alpha=alpha)
        return add_product(wide, addend, left, right, beta, alpha)

    def add_in_place(addend: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if not is_served(left, right, addend):
            return native(_CPU, addend, left, right, beta=beta, alpha=alpha)
        return addend.copy_(add_product(wide, addend, left, right, beta, alpha))

    def add_out(
        addend: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor
    ) -> Tensor:
        if not is_served(left, right, addend, out):
            return native(_CPU, addend, left, right, beta=beta, alpha=alpha, out=out)
        return _put(out, add_product(wide, addend, left, right, beta, alpha))

    kernels: dict[str, Kernel] = {
        "mm": product,
        "mm.out": product_out,
        "addmm": add,
        "addmm_": add_in_place,
        "addmm.out": add_out,
    }
    return kernels[name.replace("baddbmm", "addmm").replace("bmm", "mm")]


def _add_product(wide: Kernel, addend: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """`beta * addend + alpha * left @ right`, rounded once, `[m, n]`; the addend `[m, n]` or what expands to it.

    Large ones in pieces along their longest dimension, so that hardly more than `PIECE_ELEMENTS` are in fp32 at a time.
    """
    (m, k), n = left.shape, right.shape[-1]
    num_pieces = -(-(m * k + k * n + m * n) // PIECE_ELEMENTS)
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
    addend, result = addend.expand(m, n), left.new_empty(m, n)
    if longest == n:
        left = left.float()
        for piece in pieces:
            part = (addend[:, piece].float(), left, right[:, piece].float())
            result[:, piece] = wide(_CPU, *part, beta=beta, alpha=alpha)
    else:
        right = right.float()
        for piece in pieces:
            part = (addend[piece].float(), left[piece].float(), right)
            result[piece] = wide(_CPU, *part, beta=beta, alpha=alpha)
    return result


def _add_batched_product(
    wide: Kernel, addend: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float
) -> Tensor:
    """The same for `[b, m, n]`."""
    operands = (addend.float(), left.float(), right.float())
    return wide(_CPU, *operands, beta=beta, alpha=alpha).to(left.dtype)


def _put(out: Tensor, result: Tensor) -> Tensor:
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def _attention_kernel(native: Kernel, dtypes: set[torch.dtype]) -> Kernel:
    """Forward or backward; the log-sum-exp of the scores is in fp32 with any operands, and stays so."""

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
