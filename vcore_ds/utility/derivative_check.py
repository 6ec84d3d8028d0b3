"""Check of forward against reverse mode, before utilities are used.

Forward mode needs a rule for every operation of an architecture, and a tangent for every trained parameter; if one is
silently missing, all utilities are wrong. Reverse mode needs other rules and hooks. So the two modes check each other:
the derivative of a loss along a vector must be the inner product of the vector and the loss's gradient.

One vector is the gradient of nearly the same text, which is almost parallel to that of the loss. It is not the same
gradient, because the rounding errors of a gradient in bf16 add up in its squared norm (4% of it on a short sequence),
while those of two gradients are independent. The other one is this gradient divided by its squared norm in each
parameter: there every parameter has about the same part in the derivative, so that one whose gradient is small cannot
hide a missing tangent, which would show along Adam's direction.

A gradient of zero checks nothing, and adapters begin with B = 0, which has no derivative by A. So parameters that are
zero are replaced by small random numbers for the check.

In half precision a part of a few percent is lost in rounding, as that of one of many layers. So there a third vector is
the second with alternating signs of the layers: their parts cancel, most of their rounding errors too, and what remains
of a layer without tangents is its whole part.

In bf16 the forward mode of a short sequence may be 10% too small, `torch.func.jvp` of the plain model alike. So where
the modes differ by more than the tolerance, the JVP is repeated in fp32 at the same parameters along the same vector: a
rule that is missing is missing there too.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from vcore_ds.data.batches import Batch
from vcore_ds.distributed import layout
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

LEAST_NORM = 1e-3
"""Norm of a parameter's gradient, relative to the largest, below which it is not scaled up further: it may be rounding,
as of the bias of keys without rotary embeddings, which changes no loss."""

MOST_GROUPS = 8
"""Most layers (or modules outside of them) of which each is a part that rounding cannot hide. Without the tangents of
one of 30 layers, the derivative along all of them was 3% off (SmolLM2-135M), as much as by rounding."""

LARGEST_PART = 0.25
"""Largest difference of derivatives along layers with alternating signs, relative to the mean part of a layer. By
rounding it was at most 0.11 in SmolLM2-135M, with adapters and without; by a layer without tangents it is about 1."""

SMALL_WEIGHT = 0.02
"""Standard deviation of the numbers that replace parameters that are zero: transformers' `initializer_range`."""


class Derivatives(NamedTuple):
    """Derivatives of a mean loss along a vector, which are equal if both modes are right."""

    reverse: float
    forward: float
    forward_fp32: float | None  # by a JVP in fp32, where half precision may explain the difference; else None
    norms: float  # sum over parameters of the product of the norms of gradient and vector
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

    @property
    def error(self) -> float:
        """Difference of the modes, relative to the derivative; NaN is the largest."""
        error = abs(self.forward - self.reverse) / max(abs(self.reverse), LEAST_COSINE * self.norms, 1e-30)
        return math.inf if math.isnan(error) else error

    def __str__(self) -> str:
        in_fp32 = "" if self.forward_fp32 is None else f" ({self.forward_fp32:.6g} in fp32)"
        return (
            f"the derivative of a short sequence's loss is {self.forward:.6g} by forward mode{in_fp32} and "
            f"{self.reverse:.6g} by reverse mode"
        )


def compare_derivatives(engine: Engine, batch: Batch, similar: Batch, *, fused: bool = False) -> Derivatives:
    """Differentiate the mean loss of `batch` along the gradient of that of `similar`, as it is and scaled, in both
    modes; each has the same sequence on all ranks. Return the derivatives that differ most. A collective. Parameters
    and optimizer state do not change. `fused`: use the main forward, for which `why_not_fused` must be None."""
    with _without_zeros(engine):
        direction = Direction(engine)
        direction.compute([similar], normalization="sequence", clip=None)
        # A separate JVP pass turns dropout on at its end.
        main = ForwardMode(engine, direction, fused=fused).begin([batch])
        with engine.without_dropout(), engine.accumulation(1):
            result = main.run(0)
            engine.backward(result.losses.mean() / engine.num_summed_ranks)
        assert result.utilities is not None
        is_half, num_groups = _is_half(engine), len(direction.groups)
        tolerance = 0.05 if is_half else 1e-4
        gradient = engine.shards.gradients()
        gradient_norms = _measure_norms(engine, gradient)

        def compare(forward: float, norms: list[float], tolerance: float) -> Derivatives:
            """Compare `forward`, the derivative along the direction as it is now, with that by the gradient."""
            derivatives = Derivatives(
                reverse=engine.shards.dot(gradient, direction.buffers),
                forward=forward,
                forward_fp32=None,
                norms=sum(left * right for left, right in zip(gradient_norms, norms, strict=True)),
                tolerance=tolerance,
            )
            if not is_half or derivatives.agree:
                return derivatives
            return derivatives._replace(forward_fp32=differentiate(torch.float32))

        def differentiate(precision: torch.dtype | None = None) -> float:
            with forward_mode(engine, direction, precision):
                _, utilities = compute_losses_and_utilities(engine, batch)
            return engine.mean_over_replicas(utilities)

        norms = _measure_norms(engine, direction.buffers)
        compared = [compare(engine.mean_over_replicas(result.utilities), norms, tolerance)]
        norms = _scale_parameters(engine, direction, norms)
        compared.append(compare(differentiate(), norms, tolerance))
        if is_half and num_groups > MOST_GROUPS:
            for _, parameters in direction.groups[::2]:
                for parameter in parameters:
                    direction.shard(parameter).neg_()
            # Relative to the sum of all parts, of which `Derivatives` takes that share where they cancel.
            compared.append(compare(differentiate(), norms, LARGEST_PART / num_groups / LEAST_COSINE))
    wrong = [derivatives for derivatives in compared if not derivatives.agree]
    return max(wrong or compared, key=lambda derivatives: derivatives.error)


def _is_half(engine: Engine) -> bool:
    """Whether a parameter is in half precision; adapters may be fp32."""
    return any(parameter.dtype in HALF_PRECISION for parameter in engine.module.parameters())


def _measure_norms(engine: Engine, vector: Sequence[Tensor]) -> list[float]:
    """2-norm of a vector in each trained parameter, over all ranks; parameters that are replicated in a tensor-parallel
    group count several times. A collective."""
    shards = [engine.shards.shard(vector, parameter) for _, parameter in engine.trainable]
    norms = torch.stack([norm.to(engine.device) for norm in torch._foreach_norm(shards, dtype=torch.float64)])
    return [square**0.5 for square in layout.sum_over("job", norms.square().tolist())]


def _scale_parameters(engine: Engine, direction: Direction, norms: Sequence[float]) -> list[float]:
    """Divide a direction, with these norms, by its squared norm in each parameter; return the new norms."""
    # Times the largest norm, which keeps numbers within the range of fp16.
    factors = [max(norms) / max(norm, LEAST_NORM * max(norms)) ** 2 if norm > 0 else 1.0 for norm in norms]
    for (_, parameter), factor in zip(engine.trainable, factors, strict=True):
        direction.shard(parameter).mul_(factor)
    return [factor * norm for factor, norm in zip(factors, norms, strict=True)]


@contextmanager
def _without_zeros(engine: Engine) -> Iterator[None]:
    """A context in which trained parameters that are zero have small random values. Entering is a collective."""
    shards = engine.shards
    norms = _measure_norms(engine, shards.parameters())
    zeros = [parameter for (_, parameter), norm in zip(engine.trainable, norms, strict=True) if norm == 0]
    if not zeros:
        yield
        return
    values = [shards.shard(shards.parameters(), parameter)[: shards.numel(parameter)] for parameter in zeros]
    originals = [value.clone() for value in values]  # zeros have signs
    random = torch.Generator().manual_seed(layout.rank("shards"))
    try:
        with engine.changing_shards():
            for value in values:
                value.copy_(torch.randn(value.shape, generator=random) * SMALL_WEIGHT)
        yield
    finally:
        with engine.changing_shards():
            for value, original in zip(values, originals, strict=True):
                value.copy_(original)
