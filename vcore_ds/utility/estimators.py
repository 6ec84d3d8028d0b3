"""Estimators of the token utilities `s[i,t] = <v, grad l[i,t]>`, behind one interface for the step.

`begin` runs the passes that come before the main forward, over the whole batch. It returns the step's `MainForward`,
which computes losses with a graph and utilities, micro-batch by micro-batch. Utilities are computed without dropout and
gradients, so these passes keep no activations and may merge micro-batches; each one merged saves an all-gather of all
parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from vcore_ds.data.batches import Batch, merge_batches
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


def merge_into_passes(batches: Sequence[Batch], batches_per_pass: int) -> list[tuple[Batch, list[int]]]:
    """Merge consecutive micro-batches; each result comes with the numbers of supervised tokens of its micro-batches.

    Each pass is a collective, so the number of passes may depend only on values that all ranks share, never on the
    content of a batch.
    """
    merged = []
    for start in range(0, len(batches), batches_per_pass):
        part = list(batches[start : start + batches_per_pass])
        merged.append((merge_batches(part), [int(batch.num_supervised_tokens().sum()) for batch in part]))
    return merged


Metrics = Mapping[str, float | None]
"""Values under their names in metrics.jsonl; None where not measured at this step."""

LossesAndUtilities = Sequence[tuple[Tensor, Tensor]]
"""Losses and utilities `[N]` of each micro-batch, without a graph."""


@dataclass(frozen=True)
class MainLosses:
    """The main forward of one micro-batch; all `[N]`."""

    losses: Tensor  # nats, with a graph
    utilities: Tensor | None = None  # None without a direction
    statistics: Tensor | None = None  # of each prediction, without a graph, if the method's weights use one
    divergences: Tensor | None = None  # `KL(base || model)` in nats, with a graph, if part of the method's loss


class MainForward(Protocol):
    """The main forward passes of one step, which record the graph of the losses."""

    @property
    def metrics(self) -> Metrics:
        """Measurements of the estimator other than utilities."""
        ...

    @property
    def precomputed(self) -> LossesAndUtilities:
        """Losses and utilities of all micro-batches, if `begin` was called with `precompute`."""
        ...

    def __call__(self, k: int) -> MainLosses:
        """Run micro-batch k. A collective."""
        ...


@dataclass(frozen=True)
class PlainForward:
    """A forward for losses, and for statistics or divergences if the method uses them; utilities are precomputed."""

    engine: Engine
    batches: Sequence[Batch]
    precomputed: LossesAndUtilities = ()
    statistic: PredictionStatistic | None = None
    is_anchored: bool = False  # whether the loss includes the divergence from the base model; without a `statistic`
    metrics: Metrics = field(default_factory=dict)

    def __call__(self, k: int) -> MainLosses:
        batch = self.batches[k]
        if self.statistic is not None:
            losses, statistics = self.engine.losses_and_statistics(batch, self.statistic)
            return MainLosses(losses, statistics=statistics)
        if self.is_anchored:
            losses, divergences = self.engine.losses_and_divergences(batch)
            return MainLosses(losses, divergences=divergences)
        utilities = self.precomputed[k][1] if self.precomputed else None
        return MainLosses(self.engine.token_losses(batch), utilities)


@dataclass(frozen=True)
class FusedForward:
    """A forward that computes losses and utilities together."""

    engine: Engine
    batches: Sequence[Batch]
    direction: Direction
    precomputed: LossesAndUtilities = ()
    metrics: Metrics = field(default_factory=dict)

    def __call__(self, k: int) -> MainLosses:
        with forward_mode_with_graph(self.engine, self.direction):
            return MainLosses(*compute_losses_and_utilities(self.engine, self.batches[k]))


class Estimator(Protocol):
    """Computes the losses and utilities of a step's micro-batches."""

    @property
    def direction(self) -> Direction | None:
        """The probe direction `v`; None for a method without utilities."""
        ...

    def begin(
        self, batches: Sequence[Batch], *, seed: int = 0, measure_noise: bool = False, precompute: bool = False
    ) -> MainForward:
        """Run the passes that come before the main forward of this rank's micro-batches. A collective. `seed`: of this
        step's random numbers, the same on all ranks; `measure_noise`: also measure the utilities' signal-to-noise
        ratio, if the estimator is subject to rounding; `precompute`: compute `MainForward.precomputed`, before the
        first backward."""
        ...

    def state(self) -> dict[str, float | None] | None:
        """Scalars to checkpoint in addition to the direction's tensors, as JSON values; None without a direction."""
        ...

    def load_state(self, state: Mapping[str, float | None]) -> None:
        """Restore the scalars of `state`."""
        ...


class NoUtilities:
    """The estimator of methods that do not use utilities."""

    direction = None

    def __init__(self, engine: Engine, *, statistic: PredictionStatistic | None = None, is_anchored: bool = False):
        """`statistic`, `is_anchored`: as in `PlainForward`."""
        self._engine, self._statistic, self._is_anchored = engine, statistic, is_anchored

    def begin(
        self, batches: Sequence[Batch], *, seed: int = 0, measure_noise: bool = False, precompute: bool = False
    ) -> PlainForward:
        return PlainForward(self._engine, batches, statistic=self._statistic, is_anchored=self._is_anchored)

    def state(self) -> None:
        return None

    def load_state(self, state: Mapping[str, float | None]) -> None:
        pass


class ForwardMode:
    """Exact utilities by forward-mode differentiation, in the main forward or in JVP passes before it."""

    def __init__(self, engine: Engine, direction: Direction, batches_per_pass: int = 1, *, fused: bool = False):
        """`batches_per_pass`: number of main micro-batches in a separate JVP pass; `fused`: compute utilities in the
        main forward, for which `why_not_fused` must be None."""
        self.direction = direction
        self._engine, self._batches_per_pass, self._fused = engine, batches_per_pass, fused

    def begin(
        self, batches: Sequence[Batch], *, seed: int = 0, measure_noise: bool = False, precompute: bool = False
    ) -> PlainForward | FusedForward:
        if self._fused and not precompute:
            return FusedForward(self._engine, batches, self.direction)
        precomputed = compute_jvp_losses_and_utilities(self._engine, self.direction, batches, self._batches_per_pass)
        return PlainForward(self._engine, batches, precomputed)

    def with_direction(self, direction: Direction) -> "ForwardMode":
        """Return a copy of this estimator with another direction."""
        return ForwardMode(self._engine, direction, self._batches_per_pass, fused=self._fused)

    def state(self) -> dict[str, float | None]:
        return {"norm": self.direction.norm, "displacement": None}

    def load_state(self, state: Mapping[str, float | None]) -> None:
        self.direction.norm = state["norm"]


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
