"""Attention of passes with a gradient by the flash kernel over variable lengths, against fp64."""

import pytest
import torch

from tests.unit.test_attention import LAYOUTS, SCALE, attend_unfused, draw_inputs, draw_sinks, make_mask
from vcore_ds.models.attention import SequenceLayout, training_attention


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 7, 60])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_flash_kernel_over_variable_lengths_equals_fp64(
    name: str, sliding_window: int | None, with_sinks: bool
) -> None:
    primals, _ = draw_inputs(60, head_dim=64)
    if with_sinks:
        primals = (*primals, draw_sinks(4)[0])
    layout = SequenceLayout.from_lengths(LAYOUTS[name], 1, torch.device("cuda"))
    options = dict(scaling=SCALE, sliding_window=sliding_window, sequence_layout=layout)
    rounded = [x.bfloat16() for x in primals]
    leaves = [x.cuda().requires_grad_() for x in rounded]
    options["s_aux"] = leaves[3] if with_sinks else None
    output, _ = training_attention(torch.nn.Module(), *leaves[:3], None, **options)
    exact = [x.double().requires_grad_() for x in rounded]
    expected = attend_unfused(*exact[:3], make_mask(60, sliding_window, LAYOUTS[name]), *exact[3:]).transpose(1, 2)
    gradients = [torch.autograd.grad(y.double().square().sum(), x) for y, x in ((output, leaves), (expected, exact))]
    errors = [relative_error(output, expected)]
    errors += [relative_error(x, y) for x, y in zip(*gradients, strict=True)]
    print(f"{name}, window {sliding_window}, sinks {with_sinks}: {', '.join(f'{error:.1e}' for error in errors)}")
    assert errors[0] <= 1e-2 and max(errors) <= 2e-2


def relative_error(computed: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the error relative to the exact norm. Single elements say little: correct kernels that round scores or
    weights to bf16 at other places differ by several times 5% of an element of the gradients."""
    return float((computed.detach().cpu().double() - exact).norm() / exact.norm())
