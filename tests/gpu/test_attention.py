"""Attention of passes with a gradient by the flash kernel over variable lengths, against fp64."""

import pytest
import torch

from tests.helpers.step_runs import relative_error
from tests.unit.test_attention import LAYOUTS, SCALE, attend_unfused, draw_inputs, draw_sinks, make_mask
from vcore_ds.models.attention import SequenceLayout, training_attention

SHAPES = [(lengths, 64, window) for lengths in LAYOUTS.values() for window in (None, 7, 60)]
SHAPES += [([[150, 107, 3], [260]], dim, window) for dim in (8, 64, 96, 128, 256) for window in (None, 33)]
"""Lengths of the sequences of each pack, head dimension and sliding window."""


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("lengths", "head_dim", "sliding_window"), SHAPES)
def test_the_flash_kernel_over_variable_lengths_equals_fp64(
    lengths: list[list[int]], head_dim: int, sliding_window: int | None, with_sinks: bool
) -> None:
    num_tokens = sum(lengths[0])
    primals, _ = draw_inputs(num_tokens, head_dim=head_dim)
    if with_sinks:
        primals = (*primals, draw_sinks(4)[0])
    layout = SequenceLayout.from_lengths(lengths, 1, torch.device("cuda"))
    options = dict(scaling=SCALE, sliding_window=sliding_window, sequence_layout=layout)
    rounded = [x.bfloat16() for x in primals]
    leaves = [x.cuda().requires_grad_() for x in rounded]
    options["s_aux"] = leaves[3] if with_sinks else None
    output, _ = training_attention(torch.nn.Module(), *leaves[:3], None, **options)
    exact = [x.double().requires_grad_() for x in rounded]
    mask = make_mask(num_tokens, sliding_window, lengths)
    expected = attend_unfused(*exact[:3], mask, *exact[3:]).transpose(1, 2)
    gradients = [torch.autograd.grad(y.double().square().sum(), x) for y, x in ((output, leaves), (expected, exact))]
    # Single elements say little: correct kernels that round scores or weights to bf16 at other places differ by several
    # times 5% of an element of the gradients.
    pairs = zip([output.detach(), *gradients[0]], [expected.detach(), *gradients[1]], strict=True)
    errors = [relative_error(x.cpu(), y) for x, y in pairs]
    print(f"{head_dim}, window {sliding_window}, sinks {with_sinks}: {', '.join(f'{error:.1e}' for error in errors)}")
    assert errors[0] <= 1e-2 and max(errors) <= 2e-2
