"""Matrix multiplications and attention of CPUs without bf16 instructions: every replaced operator against fp64.

Operands are in half precision; the reference multiplies the same numbers in fp64. Results may differ by one rounding
and by the summation in fp32.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from vcore_ds.common.errors import UserError
from vcore_ds.models import cpu_matmul

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


@pytest.fixture(autouse=True)
def pytorchs_kernels() -> Iterator[None]:
    """Restore PyTorch's kernels, which an earlier test replaces on a CPU without bf16 instructions."""
    library, cpu_matmul._replaced = cpu_matmul._replaced, None
    if library is not None:
        library._destroy()
    yield
    cpu_matmul._replaced = None if library is None else cpu_matmul._replace_kernels()


@contextmanager
def replaced_kernels() -> Iterator[None]:
    """Replace PyTorch's kernels inside the block, as `use_fast_cpu_matmul` does where that is faster."""
    library = cpu_matmul._replace_kernels()
    try:
        yield
    finally:
        library._destroy()


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """fp16 too, on every CPU."""
    monkeypatch.setattr(cpu_matmul, "_types_without_instructions", lambda: set(HALVES))
    with replaced_kernels():
        yield


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def measure_error_in_roundings(result: Tensor, exact: Tensor, magnitude: Tensor, num_terms: int) -> float:
    """The largest error relative to one rounding plus a sum of `num_terms` in fp32; at most 1 without other errors.
    `exact`: the result in fp64. `magnitude`: that of the operands' absolute values, which bounds the rounding of the
    sum."""
    if not result.numel():
        return 0.0
    information = torch.finfo(result.dtype)
    allowed = information.eps / 2 * exact.abs() + 2 * num_terms * 2.0**-24 * magnitude
    allowed += information.tiny * information.eps / 2  # below the normal numbers, in fp16
    return float(((result.double() - exact).abs() / allowed).max())


def widen(x: Tensor) -> Tensor:
    return x.double()


MATMULS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (lambda a, b: torch.mm(a, b), ((5, 7), (7, 6))),
    "mm, one row": (lambda a, b: torch.mm(a, b), ((1, 7), (7, 6))),
    "mm, one row of W^T": (lambda a, w: torch.mm(a, w.t()), ((1, 64), (32, 64))),
    "mm.out": (lambda a, b: torch.mm(a, b, out=a.new_empty(5, 6)), ((5, 7), (7, 6))),
    "mm.out, transposed": (lambda a, b: torch.mm(a, b, out=a.new_empty(6, 5).t()), ((5, 7), (7, 6))),
    "mm.out, empty": (lambda a, b: torch.mm(a, b, out=a.new_empty(0)), ((5, 7), (7, 6))),
    "mm, transposed": (lambda a, b: torch.mm(a.t(), b.t()), ((7, 5), (6, 7))),
    "mm, slices": (lambda a, b: torch.mm(a[::2, 1:], b[1:, ::3]), ((10, 8), (8, 18))),
    "mm, expanded": (lambda a, b: torch.mm(a.expand(5, 7), b), ((1, 7), (7, 6))),
    "mm, no rows": (lambda a, b: torch.mm(a, b), ((0, 7), (7, 6))),
    "mm, no terms": (lambda a, b: torch.mm(a, b), ((5, 0), (0, 6))),
    "mm, no columns": (lambda a, b: torch.mm(a, b), ((5, 7), (7, 0))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b), ((5, 6), (5, 7), (7, 6))),
    "addmm, a bias": (lambda c, a, b: torch.addmm(c, a, b), ((6,), (5, 7), (7, 6))),
    "addmm, a column": (lambda c, a, b: torch.addmm(c, a, b), ((5, 1), (5, 7), (7, 6))),
    "addmm, a number": (lambda c, a, b: torch.addmm(c, a, b), ((), (5, 7), (7, 6))),
    "addmm, factors": (lambda c, a, b: torch.addmm(c, a, b, beta=0.3, alpha=-1.7), ((5, 6), (5, 7), (7, 6))),
    "addmm, no terms": (lambda c, a, b: torch.addmm(c, a, b, beta=0.3), ((5, 6), (5, 0), (0, 6))),
    "addmm, no rows": (lambda c, a, b: torch.addmm(c, a, b), ((6,), (0, 7), (7, 6))),
    "addmm_": (lambda c, a, b: c.clone().addmm_(a, b, beta=0.3, alpha=2), ((5, 6), (5, 7), (7, 6))),
    "addmm_, transposed": (lambda c, a, b: c.clone().t().addmm_(a, b.t()), ((6, 5), (5, 7), (6, 7))),
    "addmm.out": (lambda c, a, b: torch.addmm(c, a, b, beta=0.3, out=c.new_empty(5, 6)), ((5, 6), (5, 7), (7, 6))),
    "bmm": (lambda a, b: torch.bmm(a, b), ((3, 5, 7), (3, 7, 6))),
    "bmm.out": (lambda a, b: torch.bmm(a, b, out=a.new_empty(3, 5, 6)), ((3, 5, 7), (3, 7, 6))),
    "bmm, transposed": (lambda a, b: torch.bmm(a.transpose(1, 2), b.transpose(1, 2)), ((3, 7, 5), (3, 6, 7))),
    "bmm, no items": (lambda a, b: torch.bmm(a, b), ((0, 5, 7), (0, 7, 6))),
    "bmm, no terms": (lambda a, b: torch.bmm(a, b), ((3, 5, 0), (3, 0, 6))),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, beta=0.3, alpha=2), ((3, 5, 6), (3, 5, 7), (3, 7, 6))),
    "baddbmm, a bias": (lambda c, a, b: torch.baddbmm(c, a, b), ((6,), (3, 5, 7), (3, 7, 6))),
    "baddbmm_": (lambda c, a, b: c.clone().baddbmm_(a, b, beta=0.3), ((3, 5, 6), (3, 5, 7), (3, 7, 6))),
    "baddbmm.out": (
        lambda c, a, b: torch.baddbmm(c, a, b, out=c.new_empty(3, 5, 6)),
        ((3, 5, 6), (3, 5, 7), (3, 7, 6)),
    ),
    "linear": (lambda a, w: linear(a, w), ((2, 5, 7), (6, 7))),
    "linear, a bias": (lambda c, a, w: linear(a, w, c), ((6,), (2, 5, 7), (6, 7))),
    "matmul, broadcast": (lambda a, b: a @ b, ((2, 1, 5, 7), (3, 7, 6))),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), ((3, 5, 7), (3, 6, 7))),
    "addbmm": (lambda c, a, b: torch.addbmm(c, a, b), ((5, 6), (1, 5, 7), (1, 7, 6))),
    "mv": (lambda a, b: torch.mv(a, b), ((5, 7), (7,))),
    "dot": (lambda a, b: torch.dot(a, b), ((7,), (7,))),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", MATMULS)
def test_a_matmul_is_rounded_once(replaced: None, name: str, dtype: torch.dtype) -> None:
    multiply, shapes = MATMULS[name]
    operands = [randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]
    result, exact = multiply(*operands), multiply(*map(widen, operands))
    # All factors but one are positive; it stands before the product of positive operands alone.
    magnitude = multiply(*(x.abs().double() for x in operands)).abs() + 2 * exact.abs() + 10.0
    assert result.dtype == dtype and result.shape == exact.shape
    assert measure_error_in_roundings(result, exact, magnitude, num_terms=64) <= 1.0


@pytest.mark.parametrize("beta, alpha", [(1, 1), (0.3, -1.7), (0, 1)])
@pytest.mark.parametrize("shape", [(700, 5, 6), (5, 700, 6), (6, 5, 700), (40, 40, 40), (1, 1, 1)])
@pytest.mark.parametrize("addend", ["matrix", "bias", "column"])
def test_a_large_matmul_in_pieces_is_rounded_once(
    replaced: None, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], addend: str, beta: float, alpha: float
) -> None:
    """Pieces along each dimension, with a remainder. An addend with factor 0 may hold NaN."""
    monkeypatch.setattr(cpu_matmul, "PIECE_ELEMENTS", 900)
    m, k, n = shape
    left, right = randn(m, k), randn(k, n)
    c = {"matrix": randn(m, n), "bias": randn(n), "column": randn(m, 1)}[addend]
    if not beta:
        c.fill_(torch.nan)
    result = torch.addmm(c, left, right, beta=beta, alpha=alpha)
    left, right, c = left.double(), right.double(), c.double().nan_to_num()
    exact = alpha * (left @ right) + beta * c
    magnitude = abs(alpha) * (left.abs() @ right.abs()) + beta * c.abs()
    assert measure_error_in_roundings(result, exact, magnitude, num_terms=k) <= 1.0


def test_a_large_operand_is_never_converted_to_fp32_at_once(replaced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large allocation is costly: its memory comes fresh from the system at every call."""
    monkeypatch.setattr(cpu_matmul, "PIECE_ELEMENTS", 5000)
    left, right = randn(10, 20), randn(20, 3000)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        torch.mm(left, right)
    sizes = [math.prod(e.input_shapes[0]) for e in profile.events() if e.name == "aten::_to_copy" and e.input_shapes]
    assert max(sizes) < right.numel() / 10


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def measure_attention_errors() -> dict[str, float]:
    """Relative errors of the output and of each gradient against fp64, and the largest of the log-sum-exp."""
    query, key, value, upstream = (randn(2, 3, 70, 16, seed=seed) for seed in range(4))
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    expected = attend_causally(*exact)
    expected_gradients = torch.autograd.grad(expected, exact, upstream.double())
    output, log_sum_exp = FORWARD(query, key, value, 0.0, True)
    gradients = BACKWARD(upstream, query, key, value, output, log_sum_exp, 0.0, True)
    hidden = torch.ones(70, 70, dtype=torch.bool).triu(1)
    scores = (query.double() @ key.double().transpose(2, 3) / 4).masked_fill(hidden, -torch.inf)
    pairs = zip(("output", "query", "key", "value"), (output, *gradients), (expected, *expected_gradients), strict=True)
    assert all(x.dtype == torch.bfloat16 for x in (output, *gradients)) and log_sum_exp.dtype == torch.float32
    errors = {name: float((x - e).detach().norm() / e.detach().norm()) for name, x, e in pairs}
    return errors | {"log_sum_exp": float((log_sum_exp - scores.logsumexp(-1)).abs().max())}


def test_attention_is_at_least_as_exact_as_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    native = measure_attention_errors()
    with replaced_kernels():
        ours = measure_attention_errors()
    for name, error in ours.items():
        assert error <= 1.02 * native[name] + 1e-6, (name, ours, native)
    assert ours["output"] < 2**-9 and ours["log_sum_exp"] < 1e-5


@pytest.mark.parametrize("kind", ["bool", "bf16", "fp32"])
def test_attention_with_a_causal_mask_equals_causal_attention(replaced: None, kind: str) -> None:
    query, key, value = (randn(1, 2, 9, 16, seed=seed) for seed in range(3))
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    added = torch.zeros(9, 9).masked_fill(~seen, -torch.inf)
    mask = {"bool": seen, "bf16": added.bfloat16(), "fp32": added}[kind]
    query.requires_grad_()
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    (gradient,) = torch.autograd.grad(output.sum(), query)
    assert torch.equal(output, attend_causally(query, key, value))
    assert gradient.isfinite().all() and gradient.dtype == torch.bfloat16


def multiply_twice(x: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.addmm(c, torch.tanh(x @ w), w.t()).square().sum()


def test_backward_forward_mode_and_functorch_use_the_replaced_kernels(replaced: None) -> None:
    operands = [randn(5, 7), randn(7, 6), randn(5, 7, seed=1)]
    tangents = [randn(*x.shape, seed=2) for x in operands]
    exact = torch.func.jvp(multiply_twice, tuple(map(widen, operands)), tuple(map(widen, tangents)))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(multiply_twice(*map(forward_ad.make_dual, operands, tangents)))
    from_functorch = torch.func.jvp(multiply_twice, tuple(operands), tuple(tangents))
    assert torch.equal(dual.tangent, from_functorch[1])
    assert dual.tangent.item() == pytest.approx(exact[1].item(), rel=0.02)
    needed = [x.clone().requires_grad_() for x in operands]
    gradients = torch.autograd.grad(multiply_twice(*needed), needed)
    expected = torch.func.grad(multiply_twice, (0, 1, 2))(*map(widen, operands))
    for gradient, e in zip(gradients, expected, strict=True):
        assert (gradient - e).norm() / e.norm() < 0.01
    assert torch.equal(torch.func.grad(multiply_twice)(*operands), gradients[0])
    rows = torch.func.vmap(lambda row: row[None] @ operands[1])(operands[0])
    assert torch.equal(rows[:, 0], operands[0] @ operands[1])


def test_autocast_and_inference_mode_use_the_replaced_kernels(replaced: None) -> None:
    left, right = randn(5, 7, dtype=torch.float32), randn(7, 6, dtype=torch.float32)
    expected = (left.bfloat16().float() @ right.bfloat16().float()).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(left @ right, expected)
    with torch.inference_mode():
        assert torch.equal(left.bfloat16() @ right.bfloat16(), expected)


def run_other_operators() -> list[Tensor]:
    """Multiply in other precisions, with integers, and with few rows by `W^T`, which keep PyTorch's kernels."""
    few = [randn(rows, 64) @ randn(32, 64).t() for rows in (1, 2)]
    few += [torch.addmm(randn(32), randn(2, 64), randn(32, 64).t())]
    integers = torch.arange(12).reshape(3, 4)
    results = [*few, integers @ integers.t()]
    for dtype in (torch.float32, torch.float64, torch.complex64):
        left, right, c = randn(3, 5, 7, dtype=dtype), randn(3, 7, 6, dtype=dtype), randn(5, 6, dtype=dtype)
        results += [
            left[0] @ right[0],
            torch.addmm(c, left[0], right[0], beta=0.5),
            c.clone().addmm_(left[0], right[0]),
        ]
        results += [torch.mm(left[0], right[0], out=torch.empty_like(c)), left @ right, torch.baddbmm(c, left, right)]
    query = randn(1, 2, 9, 16, dtype=torch.float32).requires_grad_()
    output = attend_causally(query, query, query)
    return [*results, output, *torch.autograd.grad(output.sum(), query)]


def test_other_operators_are_unchanged_bit_for_bit() -> None:
    before = run_other_operators()
    with replaced_kernels():
        during = run_other_operators()
    assert len(before) == len(during) and all(map(torch.equal, before, during))


def test_pytorchs_errors_keep_their_words() -> None:
    calls: list[Callable[[], Tensor]] = [
        lambda: randn(5, 7) @ randn(7, 6).float(),
        lambda: randn(5, 7) @ randn(6, 7),
        lambda: torch.addmm(randn(5), randn(5, 7), randn(7, 6)),
        lambda: torch.addmm(randn(5, 6).float(), randn(5, 7), randn(7, 6)),
        lambda: torch.bmm(randn(2, 5, 7), randn(3, 7, 6)),
        lambda: torch.mm(randn(5, 7), randn(7, 6), out=torch.empty(5, 6)),
    ]

    def message(call: Callable[[], Tensor]) -> str:
        with pytest.raises(RuntimeError) as caught:
            call()
        return str(caught.value).split(",")[0]

    before = list(map(message, calls))
    with replaced_kernels():
        during = list(map(message, calls))
    assert during == before


def test_pytorchs_kernels_are_restored_afterwards() -> None:
    with replaced_kernels():
        during = torch._C._dispatch_dump("aten::mm")
    after = torch._C._dispatch_dump("aten::mm")
    assert during != after
    with replaced_kernels():
        pass
    assert torch._C._dispatch_dump("aten::mm") == after


@pytest.mark.parametrize("value, has, expected", [
    (None, True, "native"), (None, False, "fp32"), ("native", False, "native"), ("fp32", True, "fp32"),
])  # fmt: skip
def test_the_cpu_decides_unless_the_variable_does(
    monkeypatch: pytest.MonkeyPatch, value: str | None, has: bool, expected: str
) -> None:
    monkeypatch.setattr(cpu_matmul, "_types_without_instructions", lambda: set() if has else set(HALVES))
    monkeypatch.setattr(cpu_matmul, "_replaced", None)
    replaced: list[bool] = []
    monkeypatch.setattr(cpu_matmul, "_replace_kernels", lambda: replaced.append(True) or "library")
    monkeypatch.delenv(cpu_matmul.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(cpu_matmul.VARIABLE, value)
    cpu_matmul.use_fast_cpu_matmul()
    cpu_matmul.use_fast_cpu_matmul()
    assert len(replaced) == (expected == "fp32")


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_matmul.VARIABLE, "fast")
    with pytest.raises(UserError, match="VCORE_DS_CPU_BF16: found 'fast'"):
        cpu_matmul.use_fast_cpu_matmul()
