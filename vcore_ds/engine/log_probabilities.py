"""Log-probabilities of whole sequences, under the model and under the reference of a LoRA run."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from vcore_ds.data.batches import Batch
from vcore_ds.engine.zero3 import Engine
from vcore_ds.method.weights import segment_sum


def log_probabilities(engine: Engine, batches: Sequence[Batch]) -> list[Tensor]:
    """Log-probability `sum_t log p(y_t)` of each sequence, for every micro-batch of this rank. A collective.

    Returns:
        `[num_sequences]` fp32 for each micro-batch, in nats.
    """
    found = []
    with engine.without_gradient():
        for batch in batches:
            losses = engine.token_losses(batch)
            found.append(-segment_sum(losses, batch.sequence_index().to(losses.device), batch.num_sequences))
    return found


def with_reference_of_adapters(engine: Engine, batches: Sequence[Batch]) -> list[Batch]:
    """The batches with log-probabilities under the model without its adapters. A collective.

    Costs one forward and no second model.
    """
    with engine.without_adapters():
        found = log_probabilities(engine, batches)
    return [replace(b, reference_log_probability=values) for b, values in zip(batches, found, strict=True)]
