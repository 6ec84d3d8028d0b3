"""Matrix multiplications and attention on a CPU: PyTorch's bf16 kernels, those of `vcore_ds.distributed.cpu_matmul`,
and fp32.

    python -m tests.benchmarks.cpu_matmul

Prints speed in GFLOP a CPU second of one thread, for the shapes in a step of the quickstart's model, measured in turns;
errors against fp64 over those of one rounding; and the overhead of a call on tiny matrices. On a CPU with bf16
instructions, `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2` emulates one without them.
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
"""Duration of each measurement, over two turns."""
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
HIDDEN, INNER, VOCABULARY, HEADS, HEAD_DIM = 576, 1536, 49152, 9, 64


class Case(NamedTuple):
    compute: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    flops: float


def make_matmul(m: int, k: int, n: int, *, transposed: str = "") -> Case:
    """`transposed`: `left` or `right`, the operand that is transposed in memory."""
    left, right = ((k, m) if transposed == "left" else (m, k)), ((n, k) if transposed == "right" else (k, n))

    def compute(a: Tensor, b: Tensor) -> Tensor:
        return (a.t() if transposed == "left" else a) @ (b.t() if transposed == "right" else b)

    return Case(compute, (left, right), 2.0 * m * k * n)


def make_attention(num_tokens: int) -> tuple[Case, Case]:
    """Cases of the forward, and of forward and backward."""
    shape = (1, HEADS, num_tokens, HEAD_DIM)
    flops = 2.0 * HEADS * num_tokens**2 * HEAD_DIM

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return FORWARD(q, k, v, 0.0, True)[0]

    def both(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        output, log_sum_exp = FORWARD(q, k, v, 0.0, True)
        return BACKWARD(upstream, q, k, v, output, log_sum_exp, 0.0, True)

    return Case(forward, (shape,) * 3, flops), Case(both, (shape,) * 4, 3.5 * flops)


FORWARD_ATTENTION, BACKWARD_ATTENTION = make_attention(512)
CASES = {
    "x W^T, 1,024 rows": make_matmul(1024, HIDDEN, INNER, transposed="right"),
    "g W, 1,024 rows (gradient of x)": make_matmul(1024, INNER, HIDDEN),
    "g^T x, 1,024 rows (gradient of W)": make_matmul(INNER, 1024, HIDDEN, transposed="left"),
    "x A^T, rank 8": make_matmul(1024, HIDDEN, 8, transposed="right"),
    "x W^T, output embedding, 512 rows": make_matmul(512, HIDDEN, VOCABULARY, transposed="right"),
    "x W^T, output embedding, 1 row": make_matmul(1, HIDDEN, VOCABULARY, transposed="right"),
    "x W^T, 1 row": make_matmul(1, HIDDEN, INNER, transposed="right"),
    "x W^T, 8 rows": make_matmul(8, HIDDEN, INNER, transposed="right"),
    "batched, 9 of [256, 64] [64, 256]": Case(torch.bmm, ((9, 256, 64), (9, 64, 256)), 2.0 * 9 * 256 * 256 * 64),
    "attention, 512 tokens": FORWARD_ATTENTION,
    "attention and its backward": BACKWARD_ATTENTION,
}


def draw_operands(case: Case, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in case.shapes]


def measure_seconds(call: Callable[[], object], seconds: float) -> float:
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
    halves, wide = draw_operands(case, torch.bfloat16), draw_operands(case, torch.float32)
    best: dict[str, float] = {}
    for _ in range(2):
        for name, context, operands in (
            ("PyTorch", nullcontext(), halves),
            ("replaced", replaced_kernels(), halves),
            ("fp32", nullcontext(), wide),
        ):
            with context, torch.no_grad():
                seconds = measure_seconds(lambda operands=operands: case.compute(*operands), SECONDS / 2)
            best[name] = min(best.get(name, seconds), seconds)
    return {name: case.flops / seconds / 1e9 for name, seconds in best.items()}


def measure_error(computed: Tensor, exact: Tensor) -> float:
    """Root mean square, over that of the exact result in fp64 rounded once to bf16."""
    rounded = exact.to(computed.dtype).double()
    return float(((computed.double() - exact).square().mean() / (rounded - exact).square().mean()).sqrt())


def measure_errors() -> dict[str, float]:
    """Computation -> error of matrix multiplications and attention in bf16."""
    measured = {}
    for name, case in (
        ("x W^T", make_matmul(64, HIDDEN, INNER, transposed="right")),
        ("g W", make_matmul(64, INNER, HIDDEN)),
        ("g^T x", make_matmul(INNER, 64, HIDDEN, transposed="left")),
        ("x W^T, in pieces", make_matmul(128, HIDDEN, 8192, transposed="right")),
        ("p W, in pieces along the sum", make_matmul(128, 16384, HIDDEN)),
        ("bmm", Case(torch.bmm, ((9, 64, 64), (9, 64, 64)), 0.0)),
        ("c + x W", Case(torch.addmm, ((64, INNER), (64, HIDDEN), (HIDDEN, INNER)), 0.0)),
        (
            "0.5 c + 2 x W, bmm",
            Case(lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2), ((9, 64, 64),) * 3, 0.0),
        ),
    ):
        halves = draw_operands(case, torch.bfloat16)
        measured[name] = measure_error(case.compute(*halves), case.compute(*(x.double() for x in halves)))
    query, key, value, upstream = draw_operands(Case(torch.add, ((1, HEADS, 256, HEAD_DIM),) * 4, 0.0), torch.bfloat16)
    output, log_sum_exp = FORWARD(query, key, value, 0.0, True)
    gradients = BACKWARD(upstream, query, key, value, output, log_sum_exp, 0.0, True)
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    expected = scaled_dot_product_attention(*exact, is_causal=True)
    measured["attention"] = measure_error(output, expected.detach())
    exact_gradients = torch.autograd.grad(expected, exact, upstream.double())
    for name, gradient, e in zip(("query", "key", "value"), gradients, exact_gradients, strict=True):
        measured[f"attention, gradient of the {name}"] = measure_error(gradient, e)
    return measured


def measure_call_microseconds() -> dict[str, float]:
    """Precision -> minimum microseconds of `[8, 16] @ [16, 8]`."""
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(shape, generator=generator) for shape in ((8, 16), (16, 8))]
    microseconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (x.to(dtype) for x in wide)

        def multiply_often(left: Tensor = left, right: Tensor = right) -> None:
            for _ in range(1000):
                torch.mm(left, right)

        with torch.no_grad():
            microseconds[str(dtype).removeprefix("torch.")] = measure_seconds(multiply_often, 0.5) * 1e3
    return microseconds


def main() -> None:
    torch.set_num_threads(1)
    print(f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; bf16 instructions: ", end="")
    print("yes" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "no")
    print("\n| GFLOP a CPU second | PyTorch, bf16 | replaced, bf16 | fp32 |\n|---|---|---|---|", flush=True)
    for name, case in CASES.items():
        row = measure_speed(case)
        print(f"| {name} | " + " | ".join(f"{row[key]:.1f}" for key in ("PyTorch", "replaced", "fp32")) + " |")
    native, call = measure_errors(), measure_call_microseconds()
    with replaced_kernels():
        ours, our_call = measure_errors(), measure_call_microseconds()
    print("\n| error over one rounding | PyTorch, bf16 | replaced, bf16 |\n|---|---|---|")
    for name, error in native.items():
        print(f"| {name} | {error:.4f} | {ours[name]:.4f} |")
    print("\nmicroseconds of [8, 16] @ [16, 8]:")
    for name, microseconds in call.items():
        print(f"  {name}: {microseconds:.1f} PyTorch, {our_call[name]:.1f} replaced")


if __name__ == "__main__":
    main()
