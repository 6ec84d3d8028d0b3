"""Log-probabilities of whole sequences, and those under the reference of a LoRA run, without a second model."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from vcore_ds.data import Batch
from vcore_ds.engine.zero3 import Engine
from vcore_ds.method import segment_sum


def log_probabilities(engine: Engine, batches: Sequence[Batch]) -> list[Tensor]:
    """`sum_t log p(y_t)` of each sequence, `[num_sequences]` fp32 in nats, for every micro-batch of this rank. A
    collective."""
    found = []
    with engine.without_gradient():
        for batch in batches:
            losses = engine.token_losses(batch)
            found.append(-segment_sum(losses, batch.sequence_index().to(losses.device), batch.num_sequences))
    return found


def with_reference_of_adapters(engine: Engine, batches: Sequence[Batch]) -> list[Batch]:
    """The batches with log-probabilities under the model that the adapters were added to: one more forward. A
    collective."""
    with engine.without_adapters():
        found = log_probabilities(engine, batches)
    return [replace(b, reference_log_probability=values) for b, values in zip(batches, found, strict=True)]
