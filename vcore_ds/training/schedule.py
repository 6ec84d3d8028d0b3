"""The learning rate of every step."""

import math
from dataclasses import dataclass
from typing import Literal

from vcore_ds.config.sections import ScheduleConfig


@dataclass(frozen=True)
class Schedule:
    """Learning rates as a function of the step k, from 0, so that resuming needs no state."""

    num_steps: int  # optimizer steps of the run
    num_warmup_steps: int
    first_decay_step: int  # first step of the decay, from 0, which still has the peak; `num_steps` for none
    peak_learning_rate: float
    min_ratio: float  # share of the peak that the decay leads to
    kind: Literal["cosine", "linear", "constant", "wsd"]

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


def warn_of_repeats(epochs_per_step: float) -> str | None:
    """A warning if an optimizer step takes the training data more than once."""
    if epochs_per_step <= 1:
        return None
    return f"batch.global_size: a step takes the training data {epochs_per_step:.3g} times; expected at most once"


def derive_schedule(config: ScheduleConfig, peak_learning_rate: float, num_sequences: int, per_step: int) -> Schedule:
    """Derive the schedule of a run on `num_sequences` training sequences, `per_step` in each optimizer step; epochs are
    rounded up to whole steps."""
    num_steps = config.num_steps
    if num_steps is None:
        assert config.num_epochs is not None  # the recipe's rules
        num_steps = max(1, math.ceil(config.num_epochs * num_sequences / per_step))
    num_warmup_steps = config.warmup_steps
    if num_warmup_steps is None:
        num_warmup_steps = math.ceil(config.warmup_ratio * num_steps)
    num_decay_steps = num_steps  # without subtracting the warm-up
    if config.kind == "wsd":
        num_decay_steps = max(1, round(config.decay_ratio * num_steps))
    elif config.kind == "constant":
        num_decay_steps = 0
    first_decay_step = max(num_warmup_steps, num_steps - num_decay_steps)
    return Schedule(num_steps, num_warmup_steps, first_decay_step, peak_learning_rate, config.min_ratio, config.kind)
