"""The paper's finite-difference estimator `(l(theta) - l(theta - epsilon v)) / epsilon`, and the choice of epsilon."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vcore_ds.common.random_streams import Stream, torch_seed
from vcore_ds.data.batches import Batch
from vcore_ds.distributed import layout
from vcore_ds.engine.flat_shards import iterate_chunks
from vcore_ds.engine.zero3 import Engine
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import LossesAndUtilities, MainLosses, Metrics, compute_losses


@contextmanager
def perturb_parameters(
    engine: Engine, direction: Direction, epsilon: float, *, stochastic_rounding_seed: int | None = None
) -> Iterator[float]:
    """A context in which the model computes with `theta - epsilon * v` (Section "One-Backward Trick").

    Every rank shifts its shards in fp32, starting from the optimizer's master weights, and rounds to the parameter
    dtype: to nearest, or stochastically if a seed is given. With stochastic rounding the shift starts from the
    parameter instead of its master, so that the expectation of the perturbed parameter is exactly `epsilon * v` away
    from the point where `l(theta)` is taken; masters rounded stochastically would move at random even at epsilon 0.
    On exit, also after an exception, the shards are restored bit for bit.

    Yields the share of the trained parameters, over all ranks, that changed: in bf16 a small epsilon is below half an
    ulp of most weights and does not change them. Entering is a collective (one reduction of two numbers).
    """
    shards, generator = engine.shards, None
    if stochastic_rounding_seed is not None:
        generator = torch.Generator(engine.device)
        generator.manual_seed(torch_seed(Stream.STOCHASTIC_ROUNDING, stochastic_rounding_seed, layout.rank("shards")))
    # DeepSpeed casts the masters to the parameter dtype after every step, so casting them again restores the bytes
    # without a copy. Offloaded masters would be transferred twice, so the shards are copied instead.
    originals = [shard.clone() for shard in shards.parameters()] if shards.optimizer_is_offloaded else shards.masters()
    try:
        num_changed = torch.zeros((), dtype=torch.int64, device=engine.device)
        with engine.changing_shards():
            for shard, master, v in iterate_chunks(shards.parameters(), shards.masters(), direction.buffers):
                before = shard.to(engine.device)  # from host memory where parameters are offloaded
                start = master.to(engine.device) if generator is None else before.float()
                shifted = start.sub(v.float(), alpha=epsilon)
                if generator is not None and shard.dtype == torch.bfloat16:
                    shifted = round_stochastically(shifted, generator)
                shifted = shifted.to(shard.dtype)
                num_changed += (shifted != before).sum()
                shard.copy_(shifted)
        changed, total = layout.sum_over("job", [int(num_changed), shards.num_elements])
        yield changed / max(total, 1)
    finally:
        with engine.changing_shards():
            for shard, original in zip(shards.parameters(), originals, strict=True):
                shard.copy_(original)


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round fp32 values to one of their two bf16 neighbours, without bias; the result is fp32. Values that bf16
    represents exactly do not change."""
    # bf16 is the upper half of fp32: adding a random lower half carries into it with probability remainder / 2^16.
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return (values.contiguous().view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32)


@dataclass(frozen=True)
class DifferenceForward:
    """A forward for losses, with utilities from their differences to the perturbed losses."""

    engine: Engine
    batches: Sequence[Batch]
    epsilon: float
    perturbed_losses: Sequence[Tensor]
    base_losses: Sequence[Tensor] | None  # `l(theta)` of a separate forward without dropout; None: the main forward's
    metrics: Metrics

    @property
    def precomputed(self) -> LossesAndUtilities:
        assert self.base_losses is not None  # since `begin` was called with `precompute`
        pairs = zip(self.base_losses, self.perturbed_losses, strict=True)
        return [(base, (base - below) / self.epsilon) for base, below in pairs]

    def __call__(self, k: int) -> MainLosses:
        losses = self.engine.token_losses(self.batches[k])
        base = losses.detach() if self.base_losses is None else self.base_losses[k]
        return MainLosses(losses, (base - self.perturbed_losses[k]) / self.epsilon)


class FiniteDifference:
    """Utilities by a perturbed forward before the main one (Section "One-Backward Trick"). Without dropout the main
    forward gives `l(theta)`."""

    def __init__(
        self,
        engine: Engine,
        direction: Direction,
        batches_per_pass: int = 1,
        *,
        epsilon: float | Literal["auto"],
        rounding: Literal["nearest", "stochastic"] = "nearest",
    ):
        """`batches_per_pass`: main micro-batches in one forward without gradient; `epsilon`: step size in units of `v`,
        `auto` to search for it at steps that measure noise; `rounding`: as in `perturb_parameters`."""
        self.direction = direction
        # `epsilon * |v|` of the last search: the distance at which rounding and curvature balance hardly changes from
        # step to step, while the gradient norm does.
        self.displacement: float | None = None
        self._engine, self._batches_per_pass = engine, batches_per_pass
        self.epsilon, self._rounds_stochastically = epsilon, rounding == "stochastic"

    def begin(
        self, batches: Sequence[Batch], *, seed: int = 0, measure_noise: bool = False, precompute: bool = False
    ) -> DifferenceForward:
        engine, direction, merge = self._engine, self.direction, self._batches_per_pass
        rounding_seed = seed if self._rounds_stochastically else None
        epsilon = self._choose_epsilon(batches, rounding_seed, search=measure_noise)
        below, changed_fraction = compute_perturbed_losses(engine, direction, batches, epsilon, merge, rounding_seed)
        base = noise = None
        if engine.has_dropout or measure_noise or precompute:
            base = compute_losses(engine, batches, merge)
            if measure_noise:
                above, _ = compute_perturbed_losses(engine, direction, batches, -epsilon, merge, rounding_seed)
                noise = signal_to_noise(torch.cat(below), torch.cat(base), torch.cat(above))
        metrics = {"epsilon": epsilon, "changed_fraction": changed_fraction, "signal_to_noise": noise}
        # The perturbed losses are computed without dropout, so the main forward's losses with dropout do not fit.
        needs_base = engine.has_dropout or precompute
        return DifferenceForward(engine, batches, epsilon, below, base if needs_base else None, metrics)

    def state(self) -> dict[str, float | None]:
        return {"norm": self.direction.norm, "displacement": self.displacement}

    def load_state(self, state: Mapping[str, float | None]) -> None:
        self.direction.norm, self.displacement = state["norm"], state["displacement"]

    def _choose_epsilon(self, batches: Sequence[Batch], rounding_seed: int | None, search: bool) -> float:
        if self.epsilon != "auto":
            return self.epsilon
        norm = self.direction.norm
        if search or self.displacement is None:
            epsilon = choose_epsilon(self._engine, self.direction, batches, rounding_seed)
            self.displacement = epsilon * norm if norm else None
            return epsilon
        return self.displacement / norm if norm else 1.0


RELATIVE_DISPLACEMENTS = tuple(10.0 ** (-exponent / 2) for exponent in range(19))
"""Lengths of the perturbation that `choose_epsilon` tries, relative to the parameter norm: from 1 down to 1e-9."""


def choose_epsilon(
    engine: Engine, direction: Direction, batches: Sequence[Batch], stochastic_rounding_seed: int | None = None
) -> float:
    """Choose the epsilon with the largest `signal_to_noise`: rounding dominates below, curvature above. A collective.

    Tries `RELATIVE_DISPLACEMENTS` in descending order on the first micro-batch of each rank, two forwards each, and
    stops when four in a row are worse than the best. The result is the same on all ranks.
    """
    if not direction.norm:
        return 1.0  # the differences are zero for any epsilon
    batch = batches[:1]
    base = torch.cat(compute_losses(engine, batch, 1))
    norm = engine.parameter_norm()
    best, best_epsilon, num_worse = 0.0, norm * RELATIVE_DISPLACEMENTS[-1] / direction.norm, 0
    for relative in RELATIVE_DISPLACEMENTS:
        epsilon = relative * norm / direction.norm
        below, above = (
            torch.cat(compute_perturbed_losses(engine, direction, batch, signed, 1, stochastic_rounding_seed)[0])
            for signed in (epsilon, -epsilon)
        )
        ratio = signal_to_noise(below, base, above)
        if ratio > best:
            best, best_epsilon, num_worse = ratio, epsilon, 0
        elif best > 0:
            num_worse += 1
            if num_worse == 4:
                break
    return best_epsilon


def signal_to_noise(below: Tensor, base: Tensor, above: Tensor) -> float:
    """Signal-to-noise ratio of a finite difference: its loss change relative to its rounding error. A collective.

    To first order a loss changes antisymmetrically, `(above - below) / 2`; the symmetric part, `above + below - 2
    base`, is rounding error (or, at a large epsilon, curvature, which is an error too). With independent rounding of
    variance r^2 the symmetric part has variance 6 r^2, the antisymmetric part r^2 / 2 in addition to the signal, and
    the difference `base - below` used by the estimator 2 r^2. From the losses `[N]` of this rank's tokens at `theta -
    eps v`, `theta` and `theta + eps v`, returns rms(signal) / sqrt(2 r^2) over all ranks; below 1 the difference is
    mostly noise.
    """
    antisymmetric, symmetric = (above - below) / 2, above + below - 2 * base
    # Every rank of a sequence-parallel group counts the same tokens, which cancels in the ratio.
    squares = layout.sum_over("shards", [float(antisymmetric.square().sum()), float(symmetric.square().sum())])
    rounding = squares[1] / 6
    signal = max(0.0, squares[0] - rounding / 2)
    return (signal / (2 * rounding)) ** 0.5 if rounding > 0 else float("inf") if signal > 0 else 0.0


def compute_perturbed_losses(
    engine: Engine,
    direction: Direction,
    batches: Sequence[Batch],
    epsilon: float,
    batches_per_pass: int,
    stochastic_rounding_seed: int | None,
) -> tuple[list[Tensor], float]:
    """Compute the losses `[N]` of each micro-batch at `theta - epsilon v`, and the share of parameters that changed. A
    collective."""
    with perturb_parameters(engine, direction, epsilon, stochastic_rounding_seed=stochastic_rounding_seed) as changed:
        return compute_losses(engine, batches, batches_per_pass), changed
