"""Settings of engine, steps and schedule, derived from the recipe once."""

import math
from dataclasses import dataclass
from typing import Literal

from vcore_ds.common.random_streams import Stream, torch_seed
from vcore_ds.config import sections
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.settings import count_trusted

MEASURE_NOISE_EVERY = 100
"""Optimizer steps between two measurements of a finite difference's noise (and searches for `epsilon: auto`)."""


@dataclass(frozen=True)
class StepSettings:
    """How an optimizer step weights tokens, takes its direction and estimates utilities."""

    method: sections.MethodConfig
    probe: sections.ProbeConfig
    utility: sections.UtilityConfig
    reference_is_base: bool  # whether the reference of the weights is the model without its adapters
    precision: Literal["bf16", "fp32"]  # of the parameters, which a finite difference has to resolve


def derive_step_settings(recipe: Recipe) -> StepSettings:
    """Derive the settings of a step from a recipe."""
    return StepSettings(
        recipe.method,
        recipe.probe,
        recipe.utility,
        reference_is_base=recipe.method.reads_reference and recipe.lora is not None,
        precision=recipe.model.precision,
    )


@dataclass(frozen=True)
class Schedule:
    """Values of step k, from 0: functions of run and step, so that resuming needs no state."""

    num_steps: int  # optimizer steps of the run
    num_warmup_steps: int
    first_decay_step: int  # first step of the decay, from 0, which still has the peak; `num_steps` for none
    peak_learning_rate: float
    min_ratio: float  # share of the peak that the decay leads to
    kind: Literal["cosine", "linear", "constant", "wsd"]
    seed: int
    measure_noise_every: int | None
    """Optimizer steps between two measurements of a finite difference's noise; None for methods without one."""

    def learning_rate(self, k: int) -> float:
        """Learning rate of step k: a linear warm-up to the peak, constant until the decay begins, then half a cosine or
        a line that would reach `min_ratio` in step `num_steps`."""
        if k < self.num_warmup_steps:
            return self.peak_learning_rate * (k + 1) / self.num_warmup_steps
        if k < self.first_decay_step:
            return self.peak_learning_rate
        progress = (k - self.first_decay_step) / max(1, self.num_steps - self.first_decay_step)
        share = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1.0 - progress
        return self.peak_learning_rate * (self.min_ratio + (1.0 - self.min_ratio) * share)

    def count_common_steps(self, other: "Schedule") -> int:
        """Count the first steps that have the same learning rates in both schedules."""
        shorter = min(self.num_steps, other.num_steps)
        return next((k for k in range(shorter) if self.learning_rate(k) != other.learning_rate(k)), shorter)

    def measures_noise(self, k: int) -> bool:
        return self.measure_noise_every is not None and k % self.measure_noise_every == 0

    def step_seed(self, k: int) -> int:
        return torch_seed(Stream.STOCHASTIC_ROUNDING, self.seed, k)


def derive_schedule(recipe: Recipe, num_sequences: int) -> Schedule:
    """Derive the schedule of a recipe for `num_sequences` of training data; epochs are rounded up to steps."""
    schedule = recipe.schedule
    if schedule.num_steps is not None:
        num_steps = schedule.num_steps
    else:
        assert schedule.num_epochs is not None  # the recipe's rules
        per_step = recipe.batch.global_size - count_trusted(recipe)
        num_steps = max(1, math.ceil(schedule.num_epochs * num_sequences / per_step))
    num_warmup_steps = schedule.warmup_steps
    if num_warmup_steps is None:
        num_warmup_steps = math.ceil(schedule.warmup_ratio * num_steps)
    uses_difference = recipe.method.uses_utilities and recipe.utility.estimator == "finite_difference"
    return Schedule(
        num_steps=num_steps,
        num_warmup_steps=num_warmup_steps,
        first_decay_step=max(num_warmup_steps, num_steps - _count_decay_steps(schedule, num_steps)),
        peak_learning_rate=recipe.optimizer.learning_rate,
        min_ratio=schedule.min_ratio,
        kind=schedule.kind,
        seed=recipe.run.seed,
        measure_noise_every=MEASURE_NOISE_EVERY if uses_difference else None,
    )


def _count_decay_steps(schedule: sections.ScheduleConfig, num_steps: int) -> int:
    """Count the steps of the decay, without subtracting the warm-up."""
    if schedule.kind == "wsd":
        return max(1, round(schedule.decay_ratio * num_steps))
    return 0 if schedule.kind == "constant" else num_steps
