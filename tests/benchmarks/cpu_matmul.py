"""Products and attention in bf16 on a CPU: PyTorch's kernels, those of `vcore_ds.distributed.cpu_matmul`, and fp32.

    python -m tests.benchmarks.cpu_products

Speed in GFLOP a CPU second of one thread, of the shapes that a step of the quickstart's model has, in turns; errors
against fp64 over those of one rounding; what a call costs where there is hardly anything to compute. On a CPU that has
bf16 instructions, `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2` stand for one that has none.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.helpers.cpu_kernels import replaced_kernels

SECONDS = 0.3
"""Spent on each measurement, over two turns."""
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
HIDDEN, INNER, VOCABULARY, HEADS, HEAD_DIM = 576, 1536, 49152, 9, 64


class Case(NamedTuple):
    compute: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    flops: float


def product(m: int, k: int, n: int, *, transposed: str = "") -> Case:
    """`transposed`: `left` or `right`, which lies in memory so."""
    left, right = ((k, m) if transposed == "left" else (m, k)), ((n, k) if transposed == "right" else (k, n))

    def compute(a: Tensor, b: Tensor) -> Tensor:
        return (a.t() if transposed == "left" else a) @ (b.t() if transposed == "right" else b)

    return Case(compute, (left, right), 2.0 * m * k * n)


def attention(num_tokens: int) -> tuple[Case, Case]:
    """Forward, and backward with the forward that it takes."""
    shape = (1, HEADS, num_tokens, HEAD_DIM)
    flops = 2.0 * HEADS * num_tokens**2 * HEAD_DIM

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return FORWARD(q, k, v, 0.0, True)[0]

    def both(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        output, log_sum_exp = FORWARD(q, k, v, 0.0, True)
        return BACKWARD(upstream, q, k, v, output, log_sum_exp, 0.0, True)

    return Case(forward, (shape,) * 3, flops), Case(both, (shape,) * 4, 3.5 * flops)


FORWARD_ATTENTION, BACKWARD_ATTENTION = attention(512)
CASES = {
    "x W^T, 1,024 rows": product(1024, HIDDEN, INNER, transposed="right"),
    "g W, 1,024 rows (gradient of x)": product(1024, INNER, HIDDEN),
    "g^T x, 1,024 rows (gradient of W)": product(INNER, 1024, HIDDEN, transposed="left"),
    "x A^T, rank 8": product(1024, HIDDEN, 8, transposed="right"),
    "x W^T, output embedding, 512 rows": product(512, HIDDEN, VOCABULARY, transposed="right"),
    "x W^T, output embedding, 1 row": product(1, HIDDEN, VOCABULARY, transposed="right"),
    "x W^T, 1 row": product(1, HIDDEN, INNER, transposed="right"),
    "x W^T, 8 rows": product(8, HIDDEN, INNER, transposed="right"),
    "batched, 9 of [256, 64] [64, 256]": Case(torch.bmm, ((9, 256, 64), (9, 64, 256)), 2.0 * 9 * 256 * 256 * 64),
    "attention, 512 tokens": FORWARD_ATTENTION,
    "attention and its backward": BACKWARD_ATTENTION,
}


def operands_of(case: Case, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in case.shapes]


def seconds_of(call: Callable[[], object], seconds: float) -> float:
    """Least CPU seconds of a call."""
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
        if time.perf_counter() > end:
            return best


def measure_speed(case: Case) -> dict[str, float]:
    """GFLOP a CPU second."""
    halves, wide = operands_of(case, torch.bfloat16), operands_of(case, torch.float32)
    best: dict[str, float] = {}
    for _ in range(2):
        for name, context, operands in (
            ("PyTorch", nullcontext(), halves),
            ("replaced", replaced_kernels(), halves),
            ("fp32", nullcontext(), wide),
        ):
            with context, torch.no_grad():
                seconds = seconds_of(lambda operands=operands: case.compute(*operands), SECONDS / 2)
            best[name] = min(best.get(name, seconds), seconds)
    return {name: case.flops / seconds / 1e9 for name, seconds in best.items()}


def error(found: Tensor, exact: Tensor) -> float:
    """Root mean square, over that of the exact result in fp64 rounded once to bf16."""
    rounded = exact.to(found.dtype).double()
    return float(((found.double() - exact).square().mean() / (rounded - exact).square().mean()).sqrt())


def errors() -> dict[str, float]:
    """Of products and attention in bf16, by what is computed."""
    found = {}
    for name, case in (
        ("x W^T", product(64, HIDDEN, INNER, transposed="right")),
        ("g W", product(64, INNER, HIDDEN)),
        ("g^T x", product(INNER, 64, HIDDEN, transposed="left")),
        ("x W^T, in pieces", product(128, HIDDEN, 8192, transposed="right")),
        ("p W, in pieces along the sum", product(128, 16384, HIDDEN)),
        ("bmm", Case(torch.bmm, ((9, 64, 64), (9, 64, 64)), 0.0)),
        ("c + x W", Case(torch.addmm, ((64, INNER), (64, HIDDEN), (HIDDEN, INNER)), 0.0)),
        (
            "0.5 c + 2 x W, bmm",
            Case(lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2), ((9, 64, 64),) * 3, 0.0),
        ),
    ):
        halves = operands_of(case, torch.bfloat16)
        found[name] = error(case.compute(*halves), case.compute(*(x.double() for x in halves)))
    query, key, value, upstream = operands_of(Case(torch.add, ((1, HEADS, 256, HEAD_DIM),) * 4, 0.0), torch.bfloat16)
    output, log_sum_exp = FORWARD(query, key, value, 0.0, True)
    gradients = BACKWARD(upstream, query, key, value, output, log_sum_exp, 0.0, True)
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    expected = scaled_dot_product_attention(*exact, is_causal=True)
    found["attention"] = error(output, expected.detach())
    exact_gradients = torch.autograd.grad(expected, exact, upstream.double())
    for name, gradient, e in zip(("query", "key", "value"), gradients, exact_gradients, strict=True):
        found[f"attention, gradient of the {name}"] = error(gradient, e)
    return found


def microseconds_of_a_call() -> dict[str, float]:
    """`[8, 16] [16, 8]`, the least of many."""
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(shape, generator=generator) for shape in ((8, 16), (16, 8))]
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (x.to(dtype) for x in wide)

        def many(left: Tensor = left, right: Tensor = right) -> None:
            for _ in range(1000):
                torch.mm(left, right)

        with torch.no_grad():
            found[str(dtype).removeprefix("torch.")] = seconds_of(many, 0.5) * 1e3
    return found


def main() -> None:
    torch.set_num_threads(1)
    print(f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; bf16 instructions: ", end="")
    print("yes" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "no")
    print("\n| GFLOP a CPU second | PyTorch, bf16 | replaced, bf16 | fp32 |\n|---|---|---|---|", flush=True)
    for name, case in CASES.items():
        row = measure_speed(case)
        print(f"| {name} | " + " | ".join(f"{row[key]:.1f}" for key in ("PyTorch", "replaced", "fp32")) + " |")
    native, call = errors(), microseconds_of_a_call()
    with replaced_kernels():
        ours, our_call = errors(), microseconds_of_a_call()
    print("\n| error over one rounding | PyTorch, bf16 | replaced, bf16 |\n|---|---|---|")
    for name, found in native.items():
        print(f"| {name} | {found:.4f} | {ours[name]:.4f} |")
    print("\nmicroseconds of a product of [8, 16] and [16, 8]:")
    for name, found in call.items():
        print(f"  {name}: {found:.1f} PyTorch, {our_call[name]:.1f} replaced")


if __name__ == "__main__":
    main()
