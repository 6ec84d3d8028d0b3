"""Estimators of the token utilities `s[i,t] = <v, grad l[i,t]>`, behind one interface for the step.

`begin` runs the passes that come before the main forward, over the whole batch. It returns the step's `MainForward`,
which computes losses with a graph and utilities, micro-batch by micro-batch. Utilities are computed without dropout and
gradients, so these passes keep no activations and may merge micro-batches; each one merged saves an all-gather of all
parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from vcore_ds.common.random_streams import Stream, torch_seed
from vcore_ds.data.batches import Batch, merge_batches
from vcore_ds.distributed import layout
from vcore_ds.engine.flat_shards import iterate_chunks
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.attention import TRAINING_ATTENTION
from vcore_ds.models.token_loss import PredictionStatistic
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.forward_mode import compute_losses_and_utilities, forward_mode
from vcore_ds.utility.fused_forward import forward_mode_with_graph


def compute_losses(engine: Engine, batches: Sequence[Batch], batches_per_pass: int) -> list[Tensor]:
    """Compute the losses `[N]` of each micro-batch of this rank, without gradient or dropout. A collective."""
    losses: list[Tensor] = []
    with engine.without_gradient():
        for merged, sizes in merge_into_passes(batches, batches_per_pass):
            losses += engine.token_losses(merged).split(sizes)
    return losses


def merge_into_passes(batches: Sequence[Batch], batches_per_pass: int) -> Iterator[tuple[Batch, list[int]]]:
    """Merge consecutive micro-batches; each result comes with the numbers of supervised tokens of its micro-batches.
    Each pass is a collective, so the number of passes may depend only on values that all ranks share, never on the
    content of a batch."""
    for start in range(0, len(batches), batches_per_pass):
        part = list(batches[start : start + batches_per_pass])
        yield merge_batches(part), [int(batch.num_supervised_tokens().sum()) for batch in part]


@dataclass(frozen=True)
class MainLosses:
    """The main forward of one micro-batch; all `[N]`."""

    losses: Tensor  # nats, with a graph
    utilities: Tensor | None = None  # None without a direction
    statistics: Tensor | None = None  # of each prediction, without a graph, if the method's weights use one
    divergences: Tensor | None = None  # `KL(base || model)` in nats, with a graph, if part of the method's loss


@dataclass(frozen=True)
class MainForward:
    """The main forward passes of one step, which record the graph of the losses."""

    run: Callable[[int], MainLosses]  # runs micro-batch k. A collective.
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Measurements of the estimator other than utilities, by their names in metrics.jsonl; None where not measured."""
    precomputed: Sequence[tuple[Tensor, Tensor]] = ()
    """Losses and utilities `[N]` of each micro-batch, without a graph, if `begin` was called with `precompute`."""


class Estimator(ABC):
    """Computes the losses and utilities of a step's micro-batches."""

    direction: Direction | None  # the probe direction `v`; None for a method without utilities
    displacement: float | None = None
    """`epsilon * |v|` of the last search of a finite difference; None for other estimators."""

    @abstractmethod
    def begin(
        self, batches: Sequence[Batch], *, seed: int = 0, measure_noise: bool = False, precompute: bool = False
    ) -> MainForward:
        """Run the passes that come before the main forward of this rank's micro-batches. A collective. `seed`: of this
        step's random numbers, the same on all ranks; `measure_noise`: also measure the utilities' signal-to-noise
        ratio, if the estimator is subject to rounding; `precompute`: compute `MainForward.precomputed`, before the
        first backward."""

    def state(self) -> dict[str, float | None] | None:
        """Scalars to checkpoint in addition to the direction's tensors, as JSON values; None without a direction."""
        if self.direction is None:
            return None
        return {"norm": self.direction.norm, "displacement": self.displacement}

    def load_state(self, state: Mapping[str, float | None]) -> None:
        """Restore the scalars of `state`."""
        assert self.direction is not None
        self.direction.norm, self.displacement = state["norm"], state["displacement"]


class NoUtilities(Estimator):
    """The estimator of methods that do not use utilities."""

    direction = None

    def __init__(self, engine: Engine, *, statistic: PredictionStatistic | None = None, is_anchored: bool = False):
        """`statistic`: of each prediction, to compute with the losses; `is_anchored`: whether the loss includes the
        divergence from the base model; only one of the two."""
        self._engine, self._statistic, self._is_anchored = engine, statistic, is_anchored

    def begin(
        self, batches: Sequence[Batch], *, seed: int = 0, measure_noise: bool = False, precompute: bool = False
    ) -> MainForward:
        return MainForward(lambda k: self._run(batches[k]))

    def _run(self, batch: Batch) -> MainLosses:
        if self._statistic is not None:
            losses, statistics = self._engine.losses_and_statistics(batch, self._statistic)
            return MainLosses(losses, statistics=statistics)
        if self._is_anchored:
            losses, divergences = self._engine.losses_and_divergences(batch)
            return MainLosses(losses, divergences=divergences)
        return MainLosses(self._engine.token_losses(batch))


class ForwardMode(Estimator):
    """Exact utilities by forward-mode differentiation, in the main forward or in JVP passes before it."""

    direction: Direction

    def __init__(self, engine: Engine, direction: Direction, batches_per_pass: int = 1, *, fused: bool = False):
        """`batches_per_pass`: number of main micro-batches in a separate JVP pass; `fused`: compute utilities in the
        main forward, for which `why_not_fused` must be None."""
        self.direction = direction
        self._engine, self._batches_per_pass, self.fused = engine, batches_per_pass, fused

    def begin(
        self, batches: Sequence[Batch], *, seed: int = 0, measure_noise: bool = False, precompute: bool = False
    ) -> MainForward:
        engine, direction = self._engine, self.direction
        if self.fused and not precompute:
            return MainForward(lambda k: self._run_fused(batches[k]))
        pairs = compute_jvp_losses_and_utilities(engine, direction, batches, self._batches_per_pass)
        return MainForward(lambda k: MainLosses(engine.token_losses(batches[k]), pairs[k][1]), precomputed=pairs)

    def _run_fused(self, batch: Batch) -> MainLosses:
        with forward_mode_with_graph(self._engine, self.direction):
            return MainLosses(*compute_losses_and_utilities(self._engine, batch))


def why_not_fused(engine: Engine) -> str | None:
    """Explain why the main forward cannot carry tangents; None if it can."""
    if engine.has_dropout:
        return "dropout is on, and utilities belong to the model without it"
    config = engine.module.base.config.get_text_config()
    if config._attn_implementation != TRAINING_ATTENTION:
        return "the attention implementation of the model (model.attention) carries no tangents"
    shared = [name for name in ("hidden_size_per_layer_input", "num_kv_shared_layers") if getattr(config, name, None)]
    if shared and any(getattr(layer, "gradient_checkpointing", False) for layer in engine.module.layers):
        return f"checkpointed layers read activations of other layers ({shared[0]})"
    return None


def compute_jvp_losses_and_utilities(
    engine: Engine, direction: Direction, batches: Sequence[Batch], batches_per_pass: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """Compute losses and utilities `[N]` of each of this rank's micro-batches by JVP passes. A collective."""
    pairs: list[tuple[Tensor, Tensor]] = []
    with forward_mode(engine, direction):
        for merged, sizes in merge_into_passes(batches, batches_per_pass):
            losses, utilities = compute_losses_and_utilities(engine, merged)
            pairs += zip(losses.detach().split(sizes), utilities.split(sizes), strict=True)
    return pairs


def compute_jvp_utilities(
    engine: Engine, direction: Direction, batches: Sequence[Batch], batches_per_pass: int = 1
) -> list[Tensor]:
    """The utilities of `compute_jvp_losses_and_utilities`. A collective."""
    pairs = compute_jvp_losses_and_utilities(engine, direction, batches, batches_per_pass)
    return [utilities for _, utilities in pairs]


# The paper's estimator, `(l(theta) - l(theta - epsilon v)) / epsilon`, and the choice of epsilon.


class FiniteDifference(Estimator):
    """Utilities by a perturbed forward before the main one (Section "One-Backward Trick"). Without dropout the main
    forward gives `l(theta)`."""

    direction: Direction

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
        self.direction, self.epsilon = direction, epsilon
        self._engine, self._batches_per_pass = engine, batches_per_pass
        self._rounds_stochastically = rounding == "stochastic"

    def begin(
        self, batches: Sequence[Batch], *, seed: int = 0, measure_noise: bool = False, precompute: bool = False
    ) -> MainForward:
        engine, direction, merge = self._engine, self.direction, self._batches_per_pass
        rounding_seed = seed if self._rounds_stochastically else None
        epsilon = self._choose_epsilon(batches, rounding_seed, search=measure_noise)
        below, changed_fraction = compute_perturbed_losses(engine, direction, batches, epsilon, merge, rounding_seed)
        # With dropout the main forward's losses do not fit the perturbed ones, which have none.
        needs_base, base, noise = engine.has_dropout or precompute, list[Tensor](), None
        if needs_base or measure_noise:
            base = compute_losses(engine, batches, merge)
        if measure_noise:
            above, _ = compute_perturbed_losses(engine, direction, batches, -epsilon, merge, rounding_seed)
            noise = signal_to_noise(torch.cat(below), torch.cat(base), torch.cat(above))

        def run(k: int) -> MainLosses:
            losses = engine.token_losses(batches[k])
            return MainLosses(losses, ((base[k] if needs_base else losses.detach()) - below[k]) / epsilon)

        metrics = {"epsilon": epsilon, "changed_fraction": changed_fraction, "signal_to_noise": noise}
        pairs = [(at, (at - lower) / epsilon) for at, lower in zip(base, below, strict=True)] if precompute else []
        return MainForward(run, metrics, pairs)

    def _choose_epsilon(self, batches: Sequence[Batch], rounding_seed: int | None, search: bool) -> float:
        if self.epsilon != "auto":
            return self.epsilon
        norm = self.direction.norm
        if search or self.displacement is None:
            epsilon = choose_epsilon(self._engine, self.direction, batches, rounding_seed)
            # The distance at which rounding and curvature balance hardly changes from step to step, while the gradient
            # norm does.
            self.displacement = epsilon * norm if norm else None
            return epsilon
        return self.displacement / norm if norm else 1.0


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


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 values to one of their two bf16 neighbours, without bias; the result is fp32. Values that bf16
    represents exactly do not change."""
    # bf16 is the upper half of fp32: adding a random lower half carries into it with probability remainder / 2^16.
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return (values.contiguous().view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32)


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


RELATIVE_DISPLACEMENTS = tuple(10.0 ** (-exponent / 2) for exponent in range(19))
"""Lengths of the perturbation that `choose_epsilon` tries, relative to the parameter norm: from 1 down to 1e-9."""


def choose_epsilon(
    engine: Engine, direction: Direction, batches: Sequence[Batch], stochastic_rounding_seed: int | None = None
) -> float:
    """Choose the epsilon with the largest `signal_to_noise`: rounding dominates below, curvature above. Tries
    `RELATIVE_DISPLACEMENTS` in descending order on the first micro-batch of each rank, two forwards each, and stops
    when four in a row are worse than the best. A collective, with the same result on all ranks."""
    if not direction.norm:
        return 1.0  # the differences are zero for any epsilon
    batch = batches[:1]
    base = torch.cat(compute_losses(engine, batch, 1))
    norm = engine.shards.norm(engine.shards.masters())
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
