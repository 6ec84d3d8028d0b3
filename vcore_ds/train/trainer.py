"""What takes the steps of a run; `vcore-ds fidelity` takes those before it measures with it too."""

from dataclasses import dataclass

from vcore_ds.data.step_batches import StepBatches
from vcore_ds.engine.non_finite import NonFiniteGradient, NonFiniteLoss, sequences_by_rank
from vcore_ds.engine.zero3 import Engine
from vcore_ds.track.step_metrics import StepMetrics, StepRecorder
from vcore_ds.train.settings import Schedule, StepSettings
from vcore_ds.train.step import train_step
from vcore_ds.utility.estimators import Estimator


@dataclass(frozen=True)
class Trainer:
    """An engine, and how it is trained."""

    engine: Engine
    estimator: Estimator
    settings: StepSettings
    schedule: Schedule

    def step(self, k: int, batches: StepBatches, *, keep_tokens: bool = False) -> StepMetrics:
        """Optimizer step k, from 0. A collective.

        Args:
            keep_tokens: the result has this rank's single tokens.

        Raises:
            NonFiniteLoss, NonFiniteGradient: with step, rank and sequence ids, on all ranks alike.
        """
        try:
            return train_step(
                self.engine,
                self.settings,
                batches,
                self.estimator,
                StepRecorder(self.engine.device, keep_tokens=keep_tokens),
                learning_rate=self.schedule.learning_rate(k),
                measure_noise=self.schedule.measures_noise(k),
                seed=self.schedule.step_seed(k),
            )
        except (NonFiniteLoss, NonFiniteGradient) as error:
            raise type(error)(f"step {k + 1}: {describe_fault(error, batches)}") from None


def describe_fault(error: Exception, batches: StepBatches) -> str:
    """The message of a non-finite loss or gradient, with the sequences of this step where the error names none."""
    if isinstance(error, NonFiniteLoss):
        return f"{error}. The parameters were not updated."
    ids = [i for batch in batches.main for i in batch.sequence_ids]
    sequences = sequences_by_rank(ids, batches.main[0].sequence_parallel)
    return f"{error}; it is summed over {sequences}. The parameters were not updated."
