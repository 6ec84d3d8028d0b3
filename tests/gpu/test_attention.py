"""Attention of passes with a gradient by the flash kernel over variable lengths, against fp64."""

import pytest
import torch

from tests.unit.test_attention import LAYOUTS, SCALE, drawn_sinks, inputs, unfused, visible
from vcore_ds.models.attention import RowLayout, training_attention


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 7, 60])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_flash_kernel_over_variable_lengths(name: str, sliding_window: int | None, with_sinks: bool) -> None:
    primals, _ = inputs(60, head_dim=64)
    if with_sinks:
        primals = (*primals, drawn_sinks(4)[0])
    layout = RowLayout.from_lengths(LAYOUTS[name], 1, torch.device("cuda"))
    options = dict(scaling=SCALE, sliding_window=sliding_window, row_layout=layout)
    rounded = [x.bfloat16() for x in primals]
    leaves = [x.cuda().requires_grad_() for x in rounded]
    options["s_aux"] = leaves[3] if with_sinks else None
    output, _ = training_attention(torch.nn.Module(), *leaves[:3], None, **options)
    exact = [x.double().requires_grad_() for x in rounded]
    expected = unfused(*exact[:3], visible(60, sliding_window, LAYOUTS[name]), *exact[3:]).transpose(1, 2)
    gradients = [torch.autograd.grad(y.double().square().sum(), x) for y, x in ((output, leaves), (expected, exact))]
    torch.testing.assert_close(output.cpu().double(), expected, rtol=0.02, atol=0.02)
    for found, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(found.cpu().double(), reference, rtol=0.05, atol=0.05)
