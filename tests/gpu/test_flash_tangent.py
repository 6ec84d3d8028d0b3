"""The compiled kernel with tangents against `torch.func.jvp` of unfused attention in fp64.

In Triton's interpreter, with many more shapes and strides: tests/unit/flash_tangent_cases.py.
"""

import pytest
import torch
from torch import Tensor

from tests.unit.test_attention import SCALE, attend_unfused, draw_inputs, draw_sinks, make_mask
from vcore_ds.models.attention import SequenceLayout

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative to the norm of the exact result for the rounded inputs, as in the interpreter."""

LENGTHS = [[150, 107, 3], [260]]


def measure_errors(
    dtype: torch.dtype,
    head_dim: int,
    sliding_window: int | None = None,
    with_sinks: bool = False,
) -> list[float]:
    from vcore_ds.models.flash_tangent import flash_tangent

    primals, tangents = draw_inputs(260, head_dim=head_dim, dtype=dtype)
    layout = SequenceLayout.from_lengths(LENGTHS, 1, torch.device("cuda"))
    sinks = draw_sinks(4)
    given_sinks = tuple(x.cuda() for x in sinks) if with_sinks else None
    computed = flash_tangent(
        *(x.cuda() for x in primals), tuple(x.cuda() for x in tangents),
        cu_seqlens=layout.cu_seqlens, scale=SCALE,
        sliding_window=sliding_window, sinks=given_sinks,
    )  # fmt: skip
    seen = make_mask(260, sliding_window, LENGTHS)

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        return attend_unfused(query, key, value, seen, sinks if with_sinks else None)

    all_parts = zip((primals, tangents), sinks, strict=True)
    exact, moving = (tuple(x.double() for x in (*tensors, sink)) for tensors, sink in all_parts)
    expected = torch.func.jvp(attend, exact, moving)
    return [float((x.cpu().double() - y).norm() / y.norm()) for x, y in zip(computed[:2], expected, strict=True)]


@pytest.mark.parametrize(("sliding_window", "with_sinks"), [(None, False), (33, False), (None, True), (33, True)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_compiled_kernel_equals_fp64(
    dtype: torch.dtype, head_dim: int, sliding_window: int | None, with_sinks: bool
) -> None:
    errors = measure_errors(dtype, head_dim, sliding_window, with_sinks)
    print(
        f"{dtype}, head dimension {head_dim}, window {sliding_window}: value {errors[0]:.1e}, tangent {errors[1]:.1e}"
    )
    assert max(errors) <= TOLERANCE[dtype]
