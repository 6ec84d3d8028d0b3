"""The training objective: token coefficients from weights, and the variance-control factor alpha.

The loss of one optimizer step is `alpha * sum_i w_i sum_t q[i,t] l[i,t]`, with `w_i = 1/|B|` (`sequence`, the paper's
definition) or `w_i = n_i / sum_j n_j` (`token`, as in the released code and common trainers). Callers reduce counts
over ranks and micro-batches first.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vcore_ds.method.weights import segment_sum

Normalization = Literal["sequence", "token"]


@dataclass(frozen=True)
class GlobalCounts:
    """Counts over the batch of one optimizer step: all ranks and micro-batches."""

    num_sequences_global: int  # sequences with at least one supervised token
    num_supervised_tokens_global: int


def sequence_shares(num_tokens: Tensor, counts: GlobalCounts, normalization: Normalization) -> Tensor:
    """`w_i` of each sequence, `[num_sequences]` fp32; 0 for a sequence without supervised tokens. `num_tokens`:
    `[num_sequences]`, `n_i` of the micro-batch's sequences (kept tokens, if `counts` counts those)."""
    if normalization == "token":
        return num_tokens.float() / max(counts.num_supervised_tokens_global, 1)
    return (num_tokens > 0).float() / max(counts.num_sequences_global, 1)


def token_coefficients(weights: Tensor, sequence_index: Tensor, shares: Tensor) -> Tensor:
    """`w_i q[i,t]`, `[N]`, detached: the coefficient of each token's loss, without alpha."""
    return weights.detach() * shares[sequence_index]


def loss_ratio_alpha(uniform_loss: Tensor | float, weighted_loss: Tensor | float, cap: float | None) -> Tensor:
    """Variance-control factor `alpha` of Algorithm 1, line 6: the batch's uniform loss, `sum_i w_i mean_t l[i,t]`,
    divided by its weighted loss, `sum_i w_i sum_t q[i,t] l[i,t]`; 1 if that is zero. `cap`: upper bound, None for none;
    the authors' released code caps at 1."""
    uniform = torch.as_tensor(uniform_loss, dtype=torch.float64)
    return _capped_ratio(uniform, torch.as_tensor(weighted_loss, dtype=torch.float64, device=uniform.device), cap)


def utility_moments(utilities: Tensor, weights: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Moments for `utility_variances`, `[5]` fp64, additive over micro-batches and ranks: the number of sequences with
    tokens, then over these the sum and sum of squares of the mean utility `sum_t s[i,t] / n_i` and of the weighted
    utility `sum_t q[i,t] s[i,t]`."""
    num_tokens = segment_sum(torch.ones_like(utilities), sequence_index, num_sequences).double()
    mean = segment_sum(utilities, sequence_index, num_sequences).double() / num_tokens.clamp_min(1)
    weighted = segment_sum(weights * utilities, sequence_index, num_sequences).double()
    sums = mean.sum(), mean.square().sum(), weighted.sum(), weighted.square().sum()
    return torch.stack([(num_tokens > 0).sum().double(), *sums])


def utility_variances(moments: Tensor) -> tuple[Tensor, Tensor]:
    """`V_u` and `V_q` (see `variance_alpha`) from the sum of `utility_moments` over the batch."""
    count, mean, mean_square, weighted, weighted_square = moments.unbind()

    def variance(total: Tensor, total_square: Tensor) -> Tensor:
        mean_square = total_square / count.clamp_min(1)
        difference = mean_square - (total / count.clamp_min(1)) ** 2
        return torch.where(difference > 1e-12 * mean_square, difference, 0.0)  # below that it is rounding error

    return variance(mean, mean_square), variance(weighted, weighted_square)


def variance_alpha(uniform_variance: Tensor, weighted_variance: Tensor, cap: float | None) -> Tensor:
    """`alpha = sqrt(V_u / V_q)` (Section "Variance-Controlled Descent Scaling"), at most `cap`: `V_u` is the variance
    over the batch's sequences of the mean utility `sum_t s[i,t] / n_i`, `V_q` that of the weighted utility
    `sum_t q[i,t] s[i,t]`. 1 if a variance is zero, as for a single sequence."""
    # V_u = 0 must not scale the step to zero.
    return _capped_ratio(uniform_variance.sqrt(), torch.where(uniform_variance > 0, weighted_variance, 0.0).sqrt(), cap)


def effective_sample_size_alpha(
    weights: Tensor, sequence_index: Tensor, num_sequences: int, cap: float | None
) -> Tensor:
    """`alpha_i = 1 / sqrt(n_i sum_t q[i,t]^2)` of each sequence, `[num_sequences]`: 1 for uniform weights,
    `1 / sqrt(n_i)` if one token has all the weight (the paper's intuition in the same section); 1 without tokens."""
    num_tokens = segment_sum(torch.ones_like(weights), sequence_index, num_sequences)
    squares = segment_sum(weights * weights, sequence_index, num_sequences)
    return _capped_ratio(torch.ones_like(squares), (num_tokens * squares).sqrt(), cap)


def _capped_ratio(numerator: Tensor, denominator: Tensor, cap: float | None) -> Tensor:
    """Element-wise ratio, at most `cap`; 1 where the denominator is zero."""
    is_positive = denominator > 0
    ratio = numerator / torch.where(is_positive, denominator, 1.0)
    return torch.where(is_positive, ratio if cap is None else ratio.clamp_max(cap), 1.0)


def effective_sample_size(weights: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """`(sum_t q[i,t])^2 / sum_t q[i,t]^2`, `[num_sequences]`, in tokens: `n_i` for uniform weights, 1 for one-hot ones,
    0 without tokens. Weights need not sum to 1."""
    totals = segment_sum(weights, sequence_index, num_sequences)
    squares = segment_sum(weights * weights, sequence_index, num_sequences)
    return totals * totals / torch.where(squares > 0, squares, 1.0)
