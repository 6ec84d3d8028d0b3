"""What a frozen reference model says of the batch, without a second model in memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..data import Batch
from ..method import segment_sum
from .zero3 import Engine


def log_probabilities(engine: Engine, batches: Sequence[Batch]) -> list[Tensor]:
    """`sum_t log p(y_t)` of each sequence, `[num_sequences]` fp32 in nats, for every micro-batch of this rank. A
    collective."""
    found = []
    with engine.without_gradient():
        for batch in batches:
            losses = engine.token_losses(batch)
            found.append(-segment_sum(losses, batch.sequence_index().to(losses.device), batch.num_sequences))
    return found


def reference_log_probabilities(engine: Engine, batches: Sequence[Batch], *, lora: bool) -> list[Tensor]:
    """Of each sequence under the model that training started from: with adapters the model without them, one more
    forward; otherwise what was computed before training and comes with the batch. A collective with `lora`."""
    if lora:
        with engine.without_adapters():
            return log_probabilities(engine, batches)
    missing = torch.zeros(1)  # of an idle batch, which has one row without tokens
    stored = [missing if b.reference_log_probability is None else b.reference_log_probability for b in batches]
    return [values.to(engine.device) for values in stored]
