"""The two estimators of the utilities `s[i,t] = <v, grad l[i,t]>` of a batch.

Both run without gradient and without dropout, so utilities belong to the deterministic model, and both
may take several micro-batches in one pass (`batches_per_pass`, from `utility.micro_batch_size_per_rank`), because no
activations are kept: every merged pass saves a gather of all parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import Batch, merge_batches
from . import distributed
from .direction import Direction
from .forward_mode import forward_mode, losses_and_utilities
from .perturb import perturbed
from .zero3 import Engine


@dataclass
class JvpUtilities:
    """Exact: `utilities[k]` are those of micro-batch k."""

    utilities: list[Tensor]

    def of(self, k: int, losses: Tensor) -> Tensor:
        return self.utilities[k]


@dataclass
class FiniteDifferenceUtilities:
    """`(l(theta) - l(theta - epsilon v)) / epsilon`, waiting for `l(theta)`."""

    epsilon: float
    perturbed_losses: list[Tensor]
    base_losses: list[Tensor] | None
    """`l(theta)` without dropout; None where the training forward has no dropout and gives it for free."""
    changed_fraction: float
    signal_to_noise: float | None = None
    """See `signal_to_noise`; measured on request."""

    def of(self, k: int, losses: Tensor) -> Tensor:
        """Utilities of micro-batch k, given the losses `l(theta)` of its training forward."""
        base = losses if self.base_losses is None else self.base_losses[k]
        return (base - self.perturbed_losses[k]) / self.epsilon


def jvp_utilities(
    engine: Engine, direction: Direction, batches: Sequence[Batch], batches_per_pass: int
) -> JvpUtilities:
    """Utilities of this rank's micro-batches by forward-mode differentiation. A collective."""
    utilities: list[Tensor] = []
    with forward_mode(engine, direction):
        for merged, sizes in _passes(batches, batches_per_pass):
            utilities += losses_and_utilities(engine, merged)[1].split(sizes)
    return JvpUtilities(utilities)


def finite_difference_utilities(
    engine: Engine,
    direction: Direction,
    batches: Sequence[Batch],
    batches_per_pass: int,
    *,
    epsilon: float,
    measure_noise: bool,
    stochastic_rounding_seed: int | None = None,
) -> FiniteDifferenceUtilities:
    """The paper's one-backward estimator (Section "One-Backward Trick"). A collective.

    Args:
        measure_noise: also measure `signal_to_noise`; costs two more forwards of the batch.
        stochastic_rounding_seed: see `perturbed`.
    """
    seed = stochastic_rounding_seed
    below, changed_fraction = perturbed_losses(engine, direction, batches, epsilon, batches_per_pass, seed)
    result = FiniteDifferenceUtilities(epsilon, below, None, changed_fraction)
    if engine.has_dropout or measure_noise:
        base = measured_losses(engine, batches, batches_per_pass)
        result.base_losses = base if engine.has_dropout else None
        if measure_noise:
            above, _ = perturbed_losses(engine, direction, batches, -epsilon, batches_per_pass, seed)
            result.signal_to_noise = signal_to_noise(torch.cat(below), torch.cat(base), torch.cat(above))
    return result


RELATIVE_DISPLACEMENTS = tuple(10.0 ** (-exponent / 2) for exponent in range(19))
"""Lengths of the perturbation that `choose_epsilon` tries, in units of the parameters' norm: 1 down to 1e-9."""


def choose_epsilon(
    engine: Engine, direction: Direction, batches: Sequence[Batch], stochastic_rounding_seed: int | None = None
) -> float:
    """The epsilon whose loss change stands clearest of its errors: rounding if too small, curvature if too large.

    Tries lengths of the perturbation from the parameters' own norm downwards, in steps of sqrt(10), on the first
    micro-batch of each rank, and takes the one with the largest `signal_to_noise`; stops when four in a row are worse
    than the best. Two forwards of a micro-batch each. A collective; the same on all ranks.
    """
    if not direction.norm:
        return 1.0  # no direction: every difference is zero
    batch = batches[:1]
    base = torch.cat(measured_losses(engine, batch, 1))
    norm = engine.parameter_norm()
    best, best_epsilon, num_worse = 0.0, norm * RELATIVE_DISPLACEMENTS[-1] / direction.norm, 0
    for relative in RELATIVE_DISPLACEMENTS:
        epsilon = relative * norm / direction.norm
        below, above = (
            torch.cat(perturbed_losses(engine, direction, batch, signed, 1, stochastic_rounding_seed)[0])
            for signed in (epsilon, -epsilon)
        )
        clearness = signal_to_noise(below, base, above)
        if clearness > best:
            best, best_epsilon, num_worse = clearness, epsilon, 0
        elif best > 0:
            num_worse += 1
            if num_worse == 4:
                break
    return best_epsilon


def signal_to_noise(below: Tensor, base: Tensor, above: Tensor) -> float:
    """How far the loss change that a finite difference divides by epsilon stands clear of rounding.

    From the losses `[N]` of this rank's tokens at `theta - eps v`, `theta` and `theta + eps v`: a smooth loss changes
    antisymmetrically, `(above - below) / 2`, and what is symmetric, `above + below - 2 base`, is rounding (or, at a
    large
    epsilon, curvature: an error all the same). With independent rounding of variance r^2 the symmetric part has
    variance 6 r^2, the antisymmetric part carries r^2 / 2 beside the signal, and the difference `base - below` that is
    used carries 2 r^2. Returns rms(signal) / sqrt(2 r^2), over all ranks: well above 1 is a measurement, below 1 is
    noise. A collective.
    """
    antisymmetric, symmetric = (above - below) / 2, above + below - 2 * base
    squares = distributed.sum_over_ranks([float(antisymmetric.square().sum()), float(symmetric.square().sum())])
    rounding = squares[1] / 6
    signal = max(0.0, squares[0] - rounding / 2)
    return (signal / (2 * rounding)) ** 0.5 if rounding > 0 else float("inf") if signal > 0 else 0.0


def perturbed_losses(
    engine: Engine,
    direction: Direction,
    batches: Sequence[Batch],
    epsilon: float,
    batches_per_pass: int,
    stochastic_rounding_seed: int | None,
) -> tuple[list[Tensor], float]:
    """Losses `[N]` of each micro-batch at `theta - epsilon v`, and the share of parameters that changed. A
    collective."""
    with perturbed(engine, direction, epsilon, stochastic_rounding_seed=stochastic_rounding_seed) as perturbation:
        return measured_losses(engine, batches, batches_per_pass), perturbation.changed_fraction


def measured_losses(engine: Engine, batches: Sequence[Batch], batches_per_pass: int) -> list[Tensor]:
    """Losses `[N]` of each micro-batch of this rank, without gradient and without dropout. A collective."""
    losses: list[Tensor] = []
    with engine.without_gradient():
        for merged, sizes in _passes(batches, batches_per_pass):
            losses += engine.token_losses(merged).split(sizes)
    return losses


def _passes(batches: Sequence[Batch], batches_per_pass: int) -> list[tuple[Batch, list[int]]]:
    """Consecutive micro-batches merged into passes, with the number of supervised tokens of each.

    The number of passes depends on numbers that all ranks share, never on what a batch holds: each pass is a
    collective.
    """
    merged = []
    for start in range(0, len(batches), batches_per_pass):
        part = list(batches[start : start + batches_per_pass])
        merged.append((merge_batches(part), [int(batch.num_supervised_tokens().sum()) for batch in part]))
    return merged
