"""From token weights to the number that is differentiated, and the sums that describe it.

Loss of one optimizer step: `alpha * sum_i w_i sum_t q[i,t] l[i,t]` with `w_i = 1/|B|` (`sequence`, the paper's
definition) or `w_i = n_i / sum_j n_j` (`token`, what the released code and common trainers do). The
functions get counts, not process groups: whoever calls them has reduced the counts over ranks and micro-batches before.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .weights import segment_sum

Normalization = Literal["sequence", "token"]


@dataclass(frozen=True)
class GlobalCounts:
    """Of the batch of one optimizer step, over all ranks and micro-batches."""

    num_sequences_global: int
    """Sequences with at least one supervised token."""
    num_supervised_tokens_global: int


def sequence_shares(num_tokens: Tensor, counts: GlobalCounts, normalization: Normalization) -> Tensor:
    """`w_i` of each sequence, `[num_sequences]` fp32; 0 for one without supervised tokens.

    Args:
        num_tokens: `[num_sequences]`, supervised tokens `n_i` of each sequence here.
    """
    if normalization == "token":
        return num_tokens.float() / max(counts.num_supervised_tokens_global, 1)
    return (num_tokens > 0).float() / max(counts.num_sequences_global, 1)


def token_coefficients(weights: Tensor, sequence_index: Tensor, shares: Tensor) -> Tensor:
    """`w_i q[i,t]`, `[N]`: what each token's loss is multiplied by, alpha aside. Detached by construction."""
    return weights.detach() * shares[sequence_index]


def loss_ratio_alpha(uniform_loss_global: float, weighted_loss_global: float, cap: float | None) -> float:
    """Variance-control factor `alpha` of Algorithm 1, line 6: uniform over reweighted loss of the global batch.

    Args:
        uniform_loss_global: `sum_i w_i mean_t l[i,t]`, nats.
        weighted_loss_global: `sum_i w_i sum_t q[i,t] l[i,t]`, nats.
        cap: upper bound, None for none. The authors' released code caps at 1.

    Returns 1 where the weighted loss is zero (nothing to scale).
    """
    if weighted_loss_global <= 0.0:
        return 1.0
    alpha = uniform_loss_global / weighted_loss_global
    return alpha if cap is None else min(alpha, cap)


def effective_sample_size(weights: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """`1 / sum_t q[i,t]^2`, `[num_sequences]`, in tokens: `n_i` for uniform weights, 1 for one-hot ones, 0 without
    tokens."""
    squares = segment_sum(weights * weights, sequence_index, num_sequences)
    return torch.where(squares > 0, 1.0 / squares, 0.0)
