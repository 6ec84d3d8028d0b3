"""Log-probabilities of sequences, under the model and under the reference model of a LoRA run."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from vcore_ds.data.batches import Batch
from vcore_ds.engine.zero3 import Engine
from vcore_ds.method.weights import segment_sum


def compute_log_probabilities(engine: Engine, batches: Sequence[Batch]) -> list[Tensor]:
    """Log-probability `sum_t log p(y_t)` of each sequence, for every micro-batch of this rank. A collective.

    Returns:
        `[num_sequences]` fp32 for each micro-batch, in nats.
    """
    log_probabilities = []
    with engine.without_gradient():
        for batch in batches:
            losses = engine.token_losses(batch)
            index = batch.sequence_index().to(losses.device)
            log_probabilities.append(-segment_sum(losses, index, batch.num_sequences))
    return log_probabilities


def add_reference_log_probabilities(engine: Engine, batches: Sequence[Batch]) -> list[Batch]:
    """Batches with `reference_log_probability`, computed by a forward without LoRA adapters. A collective."""
    with engine.without_adapters():
        reference = compute_log_probabilities(engine, batches)
    return [replace(b, reference_log_probability=values) for b, values in zip(batches, reference, strict=True)]
