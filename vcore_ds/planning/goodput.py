"""Failures of a long run: hours between them, the checkpoint interval that loses least, and the share of the time that
trains.

Failures come independently of each other. A run that fails goes on from its last checkpoint, and may fail again while
it starts. docs/planning.md has the sources of what is assumed.
"""

import math
from dataclasses import dataclass

from vcore_ds.planning.hardware import Cluster
from vcore_ds.planning.memory import MemorySettings, ParameterCounts
from vcore_ds.planning.step_cost import HOST_LINK

GPU_HOURS_BETWEEN_FAILURES = 20_000.0
"""The geometric mean of the two below."""

WORST_GPU_HOURS, BEST_GPU_HOURS = 7_400.0, 50_700.0
"""OPT-175B on 992 A100 (2021): 7.5 hours between failures. Llama 3 on 16,384 H100 (2024): 419 in 54 days."""

RESTART_SECONDS = 300.0
"""From a failure to the first step but for reading the checkpoint: a lost rank is noticed after a minute, then the job
is queued, starts its processes and connects them. Assumed."""

_FP32 = 4


@dataclass(frozen=True)
class Goodput:
    """What failures and checkpoints take of a run."""

    seconds_checkpoint: float
    """For which training waits: a checkpoint is written and read back, or with `checkpoint.async` copied to the
    host."""
    seconds_write: float
    """In which it is written and read back; a checkpoint waits for the one before."""
    seconds_restart: float
    """From a failure to the next step."""
    num_gpus: int

    @classmethod
    def derive(cls, cluster: Cluster, counts: ParameterCounts, settings: MemorySettings) -> "Goodput":
        """Of a run whose ranks write the fp32 parameters that are trained, and Adam's moments; Muon's one moment
        counts as two."""
        num_bytes = counts.trained * _FP32 * (1 if settings.optimizer == "sgd" else 3)
        seconds = 2 * num_bytes / cluster.storage_bandwidth  # written and read back, or verified and read
        waits = num_bytes / cluster.num_gpus / HOST_LINK if settings.stages_checkpoints else seconds
        return cls(waits, seconds, RESTART_SECONDS + seconds, cluster.num_gpus)

    def hours_between_failures(self, gpu_hours: float = GPU_HOURS_BETWEEN_FAILURES) -> float:
        """Mean hours between failures of any GPU of the run."""
        return gpu_hours / self.num_gpus

    @property
    def best_minutes(self) -> float:
        """`checkpoint.every_minutes` with the largest share, by the formula of Daly, "A higher order estimate of the
        optimum checkpoint interval" (2006), whose first term is Young's."""
        seconds, between = self.seconds_checkpoint, 3600 * self.hours_between_failures()
        if seconds >= 2 * between:
            return between / 60
        x = seconds / (2 * between)
        best = math.sqrt(2 * seconds * between) * (1 + math.sqrt(x) / 3 + x / 9) - seconds
        return max(best, self.seconds_write - seconds) / 60

    def share(self, minutes: float, gpu_hours: float = GPU_HOURS_BETWEEN_FAILURES) -> float:
        """The share of the time in which the run takes steps that are not lost, by Daly's model of a whole run.

        Args:
            minutes: of training between two checkpoints.
        """
        between, seconds = 3600 * self.hours_between_failures(gpu_hours), 60 * minutes
        if seconds > 100 * between:  # no checkpoint is ever reached
            return 0.0
        lost = math.exp(self.seconds_restart / between) * math.expm1((seconds + self.seconds_checkpoint) / between)
        return seconds / (between * lost)
