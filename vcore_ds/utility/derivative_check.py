"""Check of forward against reverse mode, before utilities are used.

Forward mode needs a rule for every operation of an architecture, and a tangent for every trained parameter; if one is
silently missing, all utilities are wrong. Reverse mode needs other rules and hooks. So the two modes check each other:
the derivative of a loss along a vector must be the inner product of the vector and the loss's gradient.

The vector is the gradient of nearly the same text, which is almost parallel to that of the loss. It is not the same
gradient, because the rounding errors of a gradient in bf16 add up in its squared norm (4% of it on a short sequence),
while those of two gradients are independent.

In bf16 the forward mode of a short sequence may be 10% too small, `torch.func.jvp` of the plain model alike. So where
the modes differ by more than the tolerance, the JVP is repeated in fp32 at the same parameters along the same vector: a
rule that is missing is missing there too.
"""

from typing import NamedTuple

import torch

from vcore_ds.data.batches import Batch
from vcore_ds.engine.zero3 import Engine
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import ForwardMode
from vcore_ds.utility.forward_mode import compute_losses_and_utilities, forward_mode

HALF_PRECISION = (torch.bfloat16, torch.float16)

NUM_COMPARED = 64
"""Maximum tokens of the text. Of 32, reverse mode in bf16 was 8% off on 3 of 10 traces (SmolLM2-135M); of 64, at most
2.5%."""

LARGEST_ROUNDING = 0.25
"""Largest relative difference of derivatives in half precision and in fp32 that is rounding."""

LEAST_COSINE = 0.1
"""Cosine of gradient and vector below which differences are relative to that of this cosine: the derivative itself may
then be as small as its rounding error."""


class Derivatives(NamedTuple):
    """Derivatives of a mean loss along a vector, which are equal if both modes are right."""

    reverse: float
    forward: float
    forward_fp32: float | None  # by a JVP in fp32, where half precision may explain the difference; else None
    norms: float  # product of the norms of gradient and vector
    tolerance: float  # largest relative difference that rounding explains

    @property
    def agree(self) -> bool:
        """Whether rounding explains the difference; False if one of them is NaN."""
        if self.forward_fp32 is None:
            return self._are_within(self.tolerance, self.forward, self.reverse)
        return self._are_within(self.tolerance, self.forward_fp32, self.reverse) and self._are_within(
            LARGEST_ROUNDING, self.forward, self.forward_fp32
        )

    def _are_within(self, tolerance: float, value: float, expected: float) -> bool:
        return abs(value - expected) <= tolerance * max(abs(expected), LEAST_COSINE * self.norms)

    def __str__(self) -> str:
        in_fp32 = "" if self.forward_fp32 is None else f" ({self.forward_fp32:.6g} in fp32)"
        return (
            f"the derivative of a short sequence's loss is {self.forward:.6g} by forward mode{in_fp32} and "
            f"{self.reverse:.6g} by reverse mode"
        )


def compare_derivatives(engine: Engine, batch: Batch, similar: Batch, *, fused: bool = False) -> Derivatives:
    """Differentiate the mean loss of `batch` along the gradient of that of `similar`, in both modes; each has the same
    sequence on all ranks. A collective. Parameters and optimizer state do not change. `fused`: use the main forward,
    for which `why_not_fused` must be None."""
    direction = Direction(engine)
    direction.compute([similar], normalization="sequence", clip=None)
    main = ForwardMode(engine, direction, fused=fused).begin([batch])  # a separate JVP pass turns dropout on at its end
    with engine.without_dropout(), engine.accumulation(1):
        result = main.run(0)
        engine.backward(result.losses.mean() / engine.num_summed_ranks)
    assert result.utilities is not None and direction.norm is not None
    is_half = any(parameter.dtype in HALF_PRECISION for parameter in engine.module.parameters())  # adapters may be fp32
    derivatives = Derivatives(
        reverse=engine.shards.dot(engine.shards.gradients(), direction.buffers),
        forward=engine.mean_over_replicas(result.utilities),
        forward_fp32=None,
        norms=engine.gradient_norm() * direction.norm,
        tolerance=0.05 if is_half else 1e-4,
    )
    if not is_half or derivatives.agree:
        return derivatives
    with forward_mode(engine, direction, torch.float32):
        _, utilities = compute_losses_and_utilities(engine, batch)
    return derivatives._replace(forward_fp32=engine.mean_over_replicas(utilities))
