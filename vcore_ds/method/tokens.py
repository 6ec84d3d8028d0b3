"""The supervised tokens of a micro-batch: ragged tensors, in row-major order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vcore_ds.method.weights import segment_sum


@dataclass(frozen=True)
class Tokens:
    """The inputs of token weights. All tensors are on one device and without a graph."""

    losses: Tensor
    """`[N]`, nats."""
    sequence_index: Tensor
    """`[N]`, int64, the sequence of each token, in `[0, num_sequences)`."""
    num_sequences: int
    utilities: Tensor | None = None
    """`[N]`; for `vcore`."""
    kept: Tensor | None = None
    """`[N]`, bool, the tokens with nonzero weight, for `random`; None for all tokens."""
    reference_log_probability: Tensor | None = None
    """`[num_sequences]`, log-probability of each sequence under the reference model in nats, for `iw_sft`."""
    statistics: Tensor | None = None
    """`[N]`, of each prediction, for `eaft` and `deft`: see `models.token_loss.PredictionStatistic`."""
    loss_weights: Tensor | None = None
    """`[N]`, 1 on average over a sequence, for `stored`."""

    def num_tokens(self) -> Tensor:
        """`n_i`, `[num_sequences]`."""
        return segment_sum(torch.ones_like(self.losses), self.sequence_index, self.num_sequences)

    def num_kept(self) -> Tensor:
        """Number of tokens with nonzero weight in each sequence, `[num_sequences]`."""
        if self.kept is None:
            return self.num_tokens()
        return segment_sum(self.kept.to(self.losses.dtype), self.sequence_index, self.num_sequences)
