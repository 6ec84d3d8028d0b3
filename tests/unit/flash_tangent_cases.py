"""The kernel in Triton's interpreter against `torch.func.jvp` of unfused attention in fp64.

`test_flash_tangent.py` runs this file by itself: Triton decides when it is imported whether to interpret. The tensors
lie in larger ones: of NaN, which an input read beyond its edge brings into the result, and of a number that a result
written beyond its edge would change.
"""

import itertools
import math
import os
from unittest.mock import patch

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.soak import IS_SOAK
from tests.helpers.triton_interpreter import patch_language_once_a_launch
from vcore_ds.models.attention import SequenceLayout, forward_mode_attention
from vcore_ds.models.block_attention import BLOCK_TOKENS, block_attention
from vcore_ds.models.flash_tangent import flash_tangent, launch

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/unit/test_flash_tangent.py, which sets TRITON_INTERPRET"
patch_language_once_a_launch()

SCALE = 0.21
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative to the norm of what is exact for inputs that are rounded already."""
UNTOUCHED = 777.0
NAMES = ("value", "tangent", "log-sum-exp", "tangent alone")


def draw_inputs(
    num_rows: int, heads: int, kv_heads: int, num_tokens: int, head_dim: int, dtype=torch.float32, seed: int = 0
):
    """(query, key, value) and their tangents."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_rows, num_heads, num_tokens, head_dim) for num_heads in (heads, kv_heads, kv_heads)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes * 2]
    return tuple(tensors[:3]), tuple(tensors[3:])


def embed(tensor: Tensor, around: float, order, step: int, margin: int) -> tuple[Tensor, Tensor]:
    """Copy the tensor into a larger tensor filled with `around`; returns the view of the copy and the larger tensor.

    order: the dimensions from the outermost in memory to the innermost. step: elements from one to the next.
    """
    order = [dimension for dimension in order if dimension < tensor.dim()]
    sizes = [tensor.shape[dimension] + 2 * margin for dimension in order]
    buffer = torch.full((*sizes[:-1], sizes[-1] * step), around, dtype=tensor.dtype)
    inside = buffer[..., ::step][tuple(slice(margin, -margin) for _ in sizes)]
    view = inside.permute([order.index(dimension) for dimension in range(tensor.dim())])
    view.copy_(tensor)
    return view, buffer


def draw_sinks(heads: int) -> tuple[Tensor, Tensor]:
    """The sink of each query head, and the sinks' tangent."""
    sinks, d_sinks = 2 * torch.randn(2, heads, generator=torch.Generator().manual_seed(7))
    return sinks, d_sinks


def compute_expected(primals, tangents, lengths, sliding_window: int | None, sinks=None) -> tuple[list[Tensor], Tensor]:
    """Value, tangent and log-sum-exp in fp64 by unfused attention, and the absolute values of the tangent's terms.

    The terms may cancel almost completely; their rounding errors do not, so errors are measured relative to them.
    """
    num_tokens = primals[0].shape[2]
    seen = torch.ones(num_tokens, num_tokens).tril().bool()
    if sliding_window is not None:
        seen &= ~torch.ones(num_tokens, num_tokens).tril(-sliding_window).bool()
    number = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    seen = (seen & (number[:, :, None] == number[:, None, :]))[:, None]
    group = primals[0].shape[1] // primals[1].shape[1]

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = SCALE * query @ key.transpose(2, 3)
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        hidden = torch.cat([scores.masked_fill(~seen, -torch.inf), column], -1)
        weights = hidden.softmax(-1)[..., :num_tokens]
        return weights @ value, hidden.logsumexp(-1), weights, scores

    sink, d_sink = sinks or (torch.full(primals[0].shape[1:2], -torch.inf), None)
    exact = tuple(x.double() for x in (*primals, sink))
    all_moving = zip(exact, (*tangents, d_sink), strict=True)
    moving = tuple(torch.zeros_like(x) if dx is None else dx.double() for x, dx in all_moving)
    (output, log_sum_exp, weights, _), (d_output, _, _, d_scores) = torch.func.jvp(attend, exact, moving)
    value, d_value = (x.repeat_interleave(group, 1).abs() for x in (exact[2], moving[2]))
    return [output, d_output, log_sum_exp], weights @ d_value + (weights * d_scores.abs()) @ value


def measure_relative_errors(computed, exact, tangent_terms: Tensor | None = None) -> list[float]:
    """Norms of the errors relative to the exact values; the tangent's relative to its terms where they are given."""
    assert all(x is None or x.isfinite().all() for x in computed)
    sizes = [exact[0], exact[1] if tangent_terms is None else tangent_terms, exact[2]]
    triples = [(x, y, size) for x, y, size in zip(computed, exact, sizes, strict=True) if x is not None]
    return [float((x.double() - y).norm() / (size.norm() + 1e-12)) for x, y, size in triples]


def make_cu_seqlens(lengths) -> Tensor:
    return SequenceLayout.from_lengths(lengths, 1, CPU).cu_seqlens


def check(
    lengths, heads: int, kv_heads: int, head_dim: int, dtype, moving: str = "qkv", tile=None, sinks=None
) -> list[float]:
    """Check value, tangent and log-sum-exp, and the tangent alone given the exact value as another kernel rounds it.

    Returns their errors, each within the tolerance of the dtype.
    """
    num_tokens = sum(lengths[0])
    primals, tangents = draw_inputs(len(lengths), heads, kv_heads, num_tokens, head_dim, dtype)
    tangents = tuple(dx if name in moving else None for name, dx in zip("qkv", tangents, strict=True))
    options = dict(cu_seqlens=make_cu_seqlens(lengths), scale=SCALE, tile=tile, sinks=sinks)
    computed = flash_tangent(*primals, tangents, **options)
    exact, _ = compute_expected(primals, tangents, lengths, None, sinks)
    assert (computed[1] is None) == (not moving and (sinks is None or sinks[1] is None))
    assert all(x is None or x.shape == y.shape for x, y in zip(computed, exact, strict=True))
    assert computed[0].dtype == dtype
    result = measure_relative_errors(computed, exact)
    if computed[1] is not None:
        given = exact[0].to(dtype), exact[2].float()
        _, alone, _ = flash_tangent(*primals, tangents, **options, given=given)
        result += measure_relative_errors([None, alone, None], exact)
    assert max(result) <= TOLERANCE[dtype], result
    return result


# ---- precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_errors_are_within_the_tolerance_of_the_dtype(dtype: torch.dtype) -> None:
    errors = check([[40, 23]], 2, 1, 64, dtype, tile=(64, 32))
    print(f"{dtype}:", ", ".join(f"{name} {error:.1e}" for name, error in zip(NAMES, errors, strict=True)))


@pytest.mark.parametrize("head_dim", [5, 80, 256, *([128, 192] if IS_SOAK else [])])
def test_any_head_dimension_is_correct(head_dim: int) -> None:
    check([[19]], 1, 1, head_dim, torch.float32, tile=(32, 16))


@pytest.mark.parametrize("moving", ["".join(x) for n in range(3) for x in itertools.combinations("qkv", n)])
def test_some_inputs_may_have_no_tangent(moving: str) -> None:
    check([[9, 20]], 1, 1, 16, torch.float32, moving, tile=(32, 16))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_sinks_and_their_tangents_are_correct(dtype: torch.dtype) -> None:
    sinks, d_sinks = draw_sinks(2)
    cases = (("qkv", d_sinks), ("qkv", None), ("", d_sinks), ("", None))
    for moving, d_moving in cases if dtype == torch.float32 else cases[:1]:
        errors = check([[20, 13]], 2, 1, 16, dtype, moving, sinks=(sinks, d_moving), tile=(32, 16))
        print(f"{dtype}:", ", ".join(f"{error:.1e}" for error in errors))


@pytest.mark.parametrize("with_sinks", [False, True])
def test_it_agrees_with_block_attention(with_sinks: bool) -> None:
    primals, tangents = draw_inputs(1, 2, 1, 37, 16)
    options = dict(scale=SCALE, sliding_window=11, sinks=draw_sinks(2) if with_sinks else None)
    outputs = flash_tangent(*primals, tangents, cu_seqlens=make_cu_seqlens([[37]]), **options)
    with patch.dict(BLOCK_TOKENS, cpu=(16, 16)):
        blocks = block_attention(*primals, tangents, **options)
    torch.testing.assert_close(outputs[:2], blocks, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("growing", [True, False])
def test_scores_far_beyond_the_range_of_exp_are_correct(growing: bool) -> None:
    # Growing scores raise the running maximum by hundreds, which rescales the sums so far to zero.
    (query, key, value), tangents = draw_inputs(1, 1, 1, 40, 16)
    steps = torch.arange(40.0)[:, None]
    primals = (query.abs() + 1, (key.abs() + 1) * (steps if growing else 40 - steps) * 10, value)
    computed = flash_tangent(*primals, tangents, cu_seqlens=make_cu_seqlens([[40]]), scale=SCALE, tile=(16, 16))
    exact, _ = compute_expected(primals, tangents, [[40]], None)
    assert max(measure_relative_errors(computed, exact)) < 1e-4  # scores of 1e4 in fp32


# ---- shapes, sequences, windows and strides, with nothing read or written out of bounds ------------------------------


def check_within_bounds(primals, tangents, layouts, lengths, sliding_window, tile, value_is_given) -> None:
    """Check results from tensors embedded in NaN, and that nothing is written around results or to a given value.

    layouts: (order, step, margin) of `embed`, for each tensor.
    """
    shape, dtype = primals[0].shape, primals[0].dtype
    exact, terms = compute_expected(primals, tangents, lengths, sliding_window)
    output, log_sum_exp = torch.zeros(shape, dtype=dtype), torch.zeros(shape[:3])
    results = [output, None if all(dx is None for dx in tangents) else output, log_sum_exp]
    fills = [math.nan] * 6 + [UNTOUCHED] * 3
    if value_is_given:
        results[0], results[2] = exact[0].to(dtype), exact[2].float()
        fills[6] = fills[8] = math.nan
    inside = [
        (None, None) if x is None else embed(x, fill, *layout)
        for x, fill, layout in zip((*primals, *tangents, *results), fills, layouts, strict=True)
    ]
    views = [view for view, _ in inside]
    launch(
        tuple(views[:3]), tuple(views[3:6]), tuple(views[6:]),
        cu_seqlens=make_cu_seqlens(lengths), scale=SCALE, sliding_window=sliding_window, sinks=None,
        value_is_given=value_is_given, tile=tile,
    )  # fmt: skip
    assert max(measure_relative_errors(views[6:], exact, terms)) <= TOLERANCE[dtype]
    for result, (view, buffer), fill in zip(results, inside[6:], fills[6:], strict=True):
        if view is None:
            continue
        if math.isnan(fill):
            assert torch.equal(view, result)
        else:
            view.fill_(UNTOUCHED)
            assert (buffer == UNTOUCHED).all()


@st.composite
def packed_lengths(draw) -> list[list[int]]:
    """Lengths of the sequences of one or two rows of equally many tokens."""
    num_tokens = draw(st.integers(1, 44 if IS_SOAK else 36))
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        cuts = sorted(draw(st.sets(st.integers(1, num_tokens - 1), max_size=3))) if num_tokens > 1 else []
        rows.append([end - start for start, end in zip([0, *cuts], [*cuts, num_tokens], strict=True)])
    return rows


@settings(deadline=None, max_examples=60 if IS_SOAK else 12, derandomize=True)
@given(
    lengths=packed_lengths(),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3 if IS_SOAK else 2),
    head_dim=st.sampled_from([16, 24, 3]),
    dtype=st.sampled_from(list(TOLERANCE)),
    sliding_window=st.none() | st.integers(1, 46),
    tile=st.sampled_from([(16, 16), (32, 16), (16, 32)]),
    moving=st.sampled_from(["qkv", "q", "kv", "v", ""]),
    layouts=st.lists(
        st.tuples(st.permutations(range(4)), st.integers(1, 2), st.integers(1, 3)), min_size=9, max_size=9
    ),
    max_value_dim=st.sampled_from([128, 16, 8]),
    is_given=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_strides_are_correct_and_stay_within_bounds(
    lengths, kv_heads, group, head_dim, dtype, sliding_window, tile, moving, layouts, max_value_dim, is_given, seed
) -> None:
    primals, tangents = draw_inputs(len(lengths), kv_heads * group, kv_heads, sum(lengths[0]), head_dim, dtype, seed)
    tangents = tuple(dx if name in moving else None for name, dx in zip("qkv", tangents, strict=True))
    with patch("vcore_ds.models.flash_tangent.MAX_VALUE_DIM", max_value_dim):  # programs share the values of 24
        is_given = is_given and moving != ""
        check_within_bounds(primals, tangents, layouts, lengths, sliding_window, tile, is_given)


@pytest.mark.parametrize(
    ("tile", "sliding_window", "value_is_given"),
    [((16, 16), None, True), ((16, 16), 16, False), ((32, 16), 33, False), ((16, 32), 7, True),
     *([(*case, is_given) for is_given in (False, True)
        for case in (((16, 16), None), ((16, 16), 1), ((32, 16), 7), ((16, 32), 7), ((16, 32), 20), ((16, 32), 33))]
       if IS_SOAK else [])],
    ids=str,
)  # fmt: skip
def test_windows_over_many_blocks_are_correct(
    tile: tuple[int, int], sliding_window: int | None, value_is_given: bool
) -> None:
    lengths, layouts = [[75, 5]], [((0, 1, 2, 3), 1, 1)] * 9
    check_within_bounds(*draw_inputs(1, 1, 1, 80, 24), layouts, lengths, sliding_window, tile, value_is_given)


def test_a_sequence_sees_no_other() -> None:
    lengths, primals_and_tangents = [[13, 20, 7]], draw_inputs(1, 1, 1, 40, 16)
    poisoned = [[x.clone() for x in tensors] for tensors in primals_and_tangents]
    for tensor in (*poisoned[0], *poisoned[1]):
        tensor[:, :, :13] = tensor[:, :, 33:] = math.nan
    options = dict(cu_seqlens=make_cu_seqlens(lengths), scale=SCALE, tile=(16, 16))
    clean = flash_tangent(*primals_and_tangents[0], primals_and_tangents[1], **options)
    from_poisoned = flash_tangent(*poisoned[0], tuple(poisoned[1]), **options)
    for x, y in zip(from_poisoned, clean, strict=True):
        assert torch.equal(x[:, :, 13:33], y[:, :, 13:33]) and not x[:, :, :13].isfinite().any()


def test_tokens_beyond_the_last_end_are_left_alone() -> None:
    primals, tangents = draw_inputs(1, 2, 1, 40, 16)
    results = tuple(torch.full(shape, UNTOUCHED) for shape in ((1, 2, 40, 16), (1, 2, 40, 16), (1, 2, 40)))
    options = dict(scale=SCALE, sliding_window=None, sinks=None, value_is_given=False, tile=(16, 16))
    launch(primals, tangents, results, cu_seqlens=torch.tensor([0, 20, 20, 23], dtype=torch.int32), **options)
    for result in results:
        assert (result[:, :, 23:] == UNTOUCHED).all() and (result[:, :, :23] != UNTOUCHED).all()


def test_more_sequences_than_one_search_step_are_correct() -> None:
    # Empty sequences cost the interpreter nothing but the search.
    check([[1] + [0] * 129 + [2, 3]], 1, 1, 16, torch.float32, moving="q", tile=(16, 16))


# ---- called through the attention interface --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_forward_mode_attention_launches_the_kernel_in_half_precision(dtype: torch.dtype) -> None:
    lengths, (primals, tangents) = [[13, 7], [20]], draw_inputs(2, 2, 1, 20, 16, dtype)
    layout = SequenceLayout.from_lengths(lengths, 1, CPU)
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, dx) for x, dx in zip(primals, tangents, strict=True)]
        output, _ = forward_mode_attention(torch.nn.Module(), *duals, None, scaling=SCALE, sequence_layout=layout)
        value_and_tangent = forward_ad.unpack_dual(output)
    kernel = flash_tangent(*primals, tangents, cu_seqlens=layout.cu_seqlens, scale=SCALE)
    for x, y in zip(value_and_tangent, kernel[:2], strict=True):
        assert torch.equal(x.transpose(1, 2), y) == (dtype == torch.bfloat16)
        torch.testing.assert_close(x.transpose(1, 2), y, rtol=0.02, atol=0.02)
