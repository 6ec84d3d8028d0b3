"""The interface between the step and the ways to estimate utilities `s[i,t] = <v, grad l[i,t]>`.

An estimator first runs the passes over the whole batch (`begin`). The object that it returns lives as long as the step,
and gives losses with a graph and utilities of one micro-batch after the other. Utilities are computed without gradient
and without dropout, so they belong to the deterministic model. No activations are kept, so several micro-batches may
share one such pass; every merged pass saves a gather of all parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from vcore_ds.data.batches import Batch, merge_batches
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.attention import TRAINING_ATTENTION
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.forward_mode import forward_mode, losses_and_utilities
from vcore_ds.utility.fused_forward import forward_mode_with_graph

# Gradient-free passes over several micro-batches at a time.


def measured_losses(engine: Engine, batches: Sequence[Batch], batches_per_pass: int) -> list[Tensor]:
    """Losses `[N]` of each micro-batch of this rank, without gradient and without dropout. A collective."""
    losses: list[Tensor] = []
    with engine.without_gradient():
        for merged, sizes in merged_passes(batches, batches_per_pass):
            losses += engine.token_losses(merged).split(sizes)
    return losses


def merged_passes(batches: Sequence[Batch], batches_per_pass: int) -> list[tuple[Batch, list[int]]]:
    """Consecutive micro-batches merged into passes, each with its micro-batches' numbers of supervised tokens.

    A pass is a collective, so the number of passes depends only on values that all ranks share, never on a batch's
    content.
    """
    merged = []
    for start in range(0, len(batches), batches_per_pass):
        part = list(batches[start : start + batches_per_pass])
        merged.append((merge_batches(part), [int(batch.num_supervised_tokens().sum()) for batch in part]))
    return merged


Measured = Mapping[str, float | None]
"""What an estimator measured beside the utilities, by its name in the metrics; None for what it did not this time."""


Known = Sequence[tuple[Tensor, Tensor]]


class MainForward(Protocol):
    """The forward passes of one step that have a graph."""

    @property
    def measured(self) -> Measured:
        """What was measured beside the utilities."""
        ...

    @property
    def known(self) -> "Known":
        """Losses and utilities `[N]` of all micro-batches, without a graph, where `begin` was asked for them ahead."""
        ...

    def __call__(self, k: int) -> tuple[Tensor, Tensor | None]:
        """Losses (nats, with a graph) and utilities (None without a direction) of micro-batch k, both `[N]`. A
        collective."""
        ...


@dataclass(frozen=True)
class PlainForward:
    """Losses, beside utilities that are known already, if any."""

    engine: Engine
    batches: Sequence[Batch]
    known: Known = ()

    @property
    def measured(self) -> Measured:
        return {}

    def __call__(self, k: int) -> tuple[Tensor, Tensor | None]:
        return self.engine.token_losses(self.batches[k]), self.known[k][1] if self.known else None


@dataclass(frozen=True)
class FusedForward:
    """Losses and utilities of one forward."""

    engine: Engine
    batches: Sequence[Batch]
    direction: Direction
    known: Known = ()

    @property
    def measured(self) -> Measured:
        return {}

    def __call__(self, k: int) -> tuple[Tensor, Tensor]:
        with forward_mode_with_graph(self.engine, self.direction):
            return losses_and_utilities(self.engine, self.batches[k])


class Estimator(Protocol):
    """Computes the losses and utilities of a step's micro-batches."""

    @property
    def direction(self) -> Direction | None:
        """The direction along which utilities are taken; None for a method without utilities."""
        ...

    def begin(
        self, batches: Sequence[Batch], *, seed: int = 0, measure_noise: bool = False, ahead: bool = False
    ) -> MainForward:
        """Runs the passes before the first backward. A collective.

        Args:
            batches: this rank's main micro-batches.
            seed: of the random numbers of this step; the same on all ranks.
            measure_noise: also measure the utilities' signal-to-noise ratio, where rounding is a concern.
            ahead: the utilities of all micro-batches are needed before the first backward (`MainForward.known`).
        """
        ...

    def state(self) -> dict[str, float | None] | None:
        """JSON values that a resumed run needs beside the direction's tensors; None without a direction."""
        ...

    def load_state(self, state: Mapping[str, float | None]) -> None:
        """Takes what `state` gave."""
        ...


class NoUtilities:
    """The estimator of methods that do not weight tokens by utilities."""

    direction = None

    def __init__(self, engine: Engine):
        self._engine = engine

    def begin(
        self, batches: Sequence[Batch], *, seed: int = 0, measure_noise: bool = False, ahead: bool = False
    ) -> PlainForward:
        return PlainForward(self._engine, batches)

    def state(self) -> None:
        return None

    def load_state(self, state: Mapping[str, float | None]) -> None:
        pass


class ForwardMode:
    """Exact utilities: from the main forward itself, or from one forward-mode pass over the batch before it."""

    def __init__(self, engine: Engine, direction: Direction, batches_per_pass: int = 1, *, fused: bool = False):
        """Args:
        batches_per_pass: number of main micro-batches in one gradient-free forward, where that is a pass of its own.
        fused: take utilities from the main forward, for an engine for which `why_not_fused` finds no reason.
        """
        self.direction = direction
        self._engine, self._batches_per_pass, self._fused = engine, batches_per_pass, fused

    def begin(
        self, batches: Sequence[Batch], *, seed: int = 0, measure_noise: bool = False, ahead: bool = False
    ) -> PlainForward | FusedForward:
        if self._fused and not ahead:
            return FusedForward(self._engine, batches, self.direction)
        known = jvp_losses_and_utilities(self._engine, self.direction, batches, self._batches_per_pass)
        return PlainForward(self._engine, batches, known)

    def along(self, direction: Direction) -> "ForwardMode":
        """The same estimator with another direction."""
        return ForwardMode(self._engine, direction, self._batches_per_pass, fused=self._fused)

    def state(self) -> dict[str, float | None]:
        return {**self.direction.state(), "displacement": None}

    def load_state(self, state: Mapping[str, float | None]) -> None:
        self.direction.load_state(state)


def why_not_fused(engine: Engine) -> str | None:
    """Why the main forward cannot carry tangents; None where it can."""
    if engine.has_dropout:
        return "dropout is on, and utilities belong to the model without it"
    config = engine.module.base.config.get_text_config()
    if config._attn_implementation != TRAINING_ATTENTION:
        return "the model has attention of its own (model.attention), which carries no tangents"
    shares = [name for name in ("hidden_size_per_layer_input", "num_kv_shared_layers") if getattr(config, name, None)]
    if shares and any(getattr(layer, "gradient_checkpointing", False) for layer in engine.module.layers):
        return f"layers whose activations are checkpointed take activations of others ({shares[0]})"
    return None


def jvp_losses_and_utilities(
    engine: Engine, direction: Direction, batches: Sequence[Batch], batches_per_pass: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """Losses and utilities `[N]` of each of this rank's micro-batches, in forward mode. A collective."""
    found: list[tuple[Tensor, Tensor]] = []
    with forward_mode(engine, direction):
        for merged, sizes in merged_passes(batches, batches_per_pass):
            losses, utilities = losses_and_utilities(engine, merged)
            found += zip(losses.detach().split(sizes), utilities.split(sizes), strict=True)
    return found


def jvp_utilities(
    engine: Engine, direction: Direction, batches: Sequence[Batch], batches_per_pass: int = 1
) -> list[Tensor]:
    """The utilities alone."""
    return [utilities for _, utilities in jvp_losses_and_utilities(engine, direction, batches, batches_per_pass)]
