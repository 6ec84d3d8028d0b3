"""The compiled kernel with tangents against `torch.func.jvp` of unfused attention in fp64.

In Triton's interpreter, with many more shapes and strides: tests/unit/flash_tangent_cases.py.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers.step_runs import relative_error
from tests.unit.test_attention import SCALE, attend_unfused, draw_inputs, draw_sinks, make_mask
from vcore_ds.models.attention import ScoreOptions, SequenceLayout, attend_with_graph_and_tangents, attend_with_tangents

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative to the norm of the exact result for the rounded inputs, as in the interpreter."""

LENGTHS = [[150, 107, 3], [260]]


def compute_exactly(
    primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...], window: int | None
) -> tuple[Tensor, ...]:
    """Value and tangent in fp64, with sinks if there are four inputs."""
    seen = make_mask(260, window, LENGTHS)
    moving = (tuple(x.double() for x in tensors) for tensors in (primals, tangents))
    return torch.func.jvp(lambda q, k, v, *sinks: attend_unfused(q, k, v, seen, *sinks), *moving)


def measure_errors(
    dtype: torch.dtype, head_dim: int, sliding_window: int | None = None, with_sinks: bool = False
) -> list[float]:
    from vcore_ds.models.flash_tangent import flash_tangent

    primals, tangents = draw_inputs(260, head_dim=head_dim, dtype=dtype)
    layout = SequenceLayout.from_lengths(LENGTHS, 1, torch.device("cuda"))
    sinks = draw_sinks(4) if with_sinks else ()
    computed = flash_tangent(
        *(x.cuda() for x in primals), tuple(x.cuda() for x in tangents),
        cu_seqlens=layout.cu_seqlens, scale=SCALE,
        sliding_window=sliding_window, sinks=tuple(x.cuda() for x in sinks) or None,
    )  # fmt: skip
    expected = compute_exactly((*primals, *sinks[:1]), (*tangents, *sinks[1:]), sliding_window)
    return [relative_error(x.cpu(), y) for x, y in zip(computed[:2], expected, strict=True)]


@pytest.mark.parametrize("attend", [attend_with_tangents, attend_with_graph_and_tangents])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_the_pass_with_tangents_in_bfloat16_alone_and_beside_flash_attention(
    head_dim: int, attend: Callable[..., tuple[Tensor, ...]]
) -> None:
    primals, tangents = draw_inputs(260, head_dim=head_dim, dtype=torch.bfloat16)
    layout = SequenceLayout.from_lengths(LENGTHS, 1, torch.device("cuda"))
    inputs = [*(x.cuda() for x in primals), None], [*(x.cuda() for x in tangents), None]
    with torch.set_grad_enabled(attend is attend_with_graph_and_tangents):
        results = attend(*inputs, layout, ScoreOptions(SCALE))
    expected = compute_exactly(primals, tangents, None)
    errors = [relative_error(x.detach().cpu(), y) for x, y in zip(results, expected, strict=True)]
    assert max(errors) <= (1e-2 if attend is attend_with_tangents else 1.5e-2)


@pytest.mark.parametrize(("sliding_window", "with_sinks"), [(None, False), (33, False), (None, True), (33, True)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_compiled_kernel_equals_fp64(
    dtype: torch.dtype, head_dim: int, sliding_window: int | None, with_sinks: bool
) -> None:
    errors = measure_errors(dtype, head_dim, sliding_window, with_sinks)
    print(f"{dtype}, heads of {head_dim}, window {sliding_window}: value {errors[0]:.1e}, tangent {errors[1]:.1e}")
    assert max(errors) <= TOLERANCE[dtype]
