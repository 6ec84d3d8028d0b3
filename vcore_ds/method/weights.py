"""From utilities to token weights: the Gibbs distribution, with a fixed temperature or a KL budget.

`q[i,t] = exp(tau * s[i,t]) / sum_j exp(tau * s[i,j])` within each sequence i (paper, Section "Optimal Reweighting under
SGD", Step 2): the weights that maximise the first-order decrease `sum_t q_t s_t` subject to `KL(q || u) <= delta`, u
uniform. With a base measure b in place of u: `q[i,t] ~ b[i,t] * exp(tau * s[i,t])`, subject to `KL(q || b) <= delta`.

Sequences have different numbers of supervised tokens, so tensors are ragged: `utilities[N]` over the tokens of all
sequences, and `sequence_index[N]`, the sequence of each token in `[0, num_sequences)`.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

KL_TOLERANCE = 1e-6
"""Nats; the root of `KL(q || b) = delta` is found to this accuracy."""

LARGEST_SCALED_TEMPERATURE = 1e20
"""Upper bound of the search for tau, for utilities scaled to a spread of 1: even a utility 1e-16 (fp64's resolution)
below the maximum gets weight 0."""

NUM_BISECTIONS = 36
"""Bisections of log(tau), on an interval shorter than 60: tau is found to a relative error of 1e-9, and the divergence,
which changes by `tau^2 Var_q(s)` times that, to 3e-8 nats on sequences of 30,000 tokens."""


@dataclass(frozen=True)
class GibbsWeights:
    """Gibbs weights of the tokens, and each sequence's temperature and divergence."""

    weights: Tensor  # `[N]`, sum to 1 over each sequence
    temperature: Tensor  # `[num_sequences]`, `tau`, the factor that multiplies utilities
    kl: Tensor  # `[num_sequences]`, `KL(q || b)` in nats; b is uniform unless a base measure was given
    saturated: Tensor  # `[num_sequences]`, bool: the KL budget cannot be reached (see `gibbs_weights_for_budget`)


def segment_sum(values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Sum over the tokens of each sequence: `[N] -> [num_sequences]`."""
    return values.new_zeros(num_sequences).index_add_(0, sequence_index, values)


def segment_max(values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Maximum over the tokens of each sequence: `[N] -> [num_sequences]`, -inf for one without tokens."""
    start = values.new_full((num_sequences,), -torch.inf)
    return start.scatter_reduce_(0, sequence_index, values, "amax")


def uniform_weights(sequence_index: Tensor, num_sequences: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`u[i,t] = 1 / n_i`, `[N]`: the weights of plain supervised fine-tuning."""
    ones = torch.ones(len(sequence_index), dtype=dtype, device=sequence_index.device)
    return ones / segment_sum(ones, sequence_index, num_sequences)[sequence_index]


def log_probability_base(losses: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """`log b`, `[N]` fp64, of the base measure `b[i,t] ~ p(y_t)`: the token weights of Dynamic Fine-Tuning (arXiv
    2508.05629), normalised over each sequence. `losses`: `[N]`, cross-entropy of the current model in nats."""
    log_p = -losses.double()
    shifted = log_p - segment_max(log_p, sequence_index, num_sequences)[sequence_index]
    return shifted - segment_sum(shifted.exp(), sequence_index, num_sequences).log()[sequence_index]


def gibbs_weights(
    utilities: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    temperature: Tensor | float,
    log_base: Tensor | None = None,
) -> GibbsWeights:
    """`q = softmax(tau * s)` over each sequence; `softmax(log b + tau * s)` with a base measure b. `utilities`: `[N]`,
    finite. `temperature`: `tau >= 0`, one number or `[num_sequences]`; 0 gives exactly `uniform_weights`, or b.
    `log_base`: `[N]`, `log b`, where b sums to 1 over each sequence; None for uniform."""
    tau = torch.as_tensor(temperature, dtype=utilities.dtype, device=utilities.device).expand(num_sequences)
    # Shifted before the multiplication: tau may be huge, and inf - inf would be NaN.
    shifted = utilities - segment_max(utilities, sequence_index, num_sequences)[sequence_index]
    exponents = tau[sequence_index] * shifted
    if log_base is not None:
        exponents = exponents + log_base.to(exponents.dtype)
        # The token of maximum utility may have almost no base weight: without a shift all exponentials could underflow.
        exponents = exponents - segment_max(exponents, sequence_index, num_sequences)[sequence_index]
    unnormalized = exponents.exp()
    normalizer = segment_sum(unnormalized, sequence_index, num_sequences)
    weights = unnormalized / normalizer[sequence_index]
    num_tokens = segment_sum(torch.ones_like(utilities), sequence_index, num_sequences)
    # KL(q||b) = sum q (log q - log b), with log q = exponent - log Z; q log q -> 0 where q underflows to 0.
    log_ratios = exponents if log_base is None else exponents - log_base.to(exponents.dtype)
    terms = torch.where(weights > 0, weights * log_ratios, 0.0)
    kl = segment_sum(terms, sequence_index, num_sequences) - normalizer.log()
    if log_base is None:
        kl = kl + num_tokens.log()
    kl = torch.where(num_tokens > 0, kl.clamp_min(0.0), 0.0)
    return GibbsWeights(weights, tau, kl, torch.zeros(num_sequences, dtype=torch.bool, device=utilities.device))


def gibbs_weights_for_budget(
    utilities: Tensor, sequence_index: Tensor, num_sequences: int, kl_budget: float, log_base: Tensor | None = None
) -> GibbsWeights:
    """Gibbs weights with `KL(q || b) = kl_budget` nats for each sequence.

    `KL(q_tau || b)` is strictly increasing in tau (the paper's appendix, for uniform b; for any b its derivative is tau
    times the variance of s under q), so the root is unique and bisection finds it. That variance is at most a quarter
    of the squared spread of s, so the divergence is at most `(tau * spread)^2 / 8`, which bounds the root from below. A
    sequence of constant utilities gets its base measure. The divergence stays below `-log b(M)`, where M are the tokens
    of maximum utility (`log(n / m)` for m of n tokens and uniform b). A sequence for which the budget is at or above
    that gets the sharpest weights and is marked as saturated.

    Computed in fp64, all sequences at once, on the tensors' device; returned in the utilities' dtype. `log_base`: as in
    `gibbs_weights`.
    """
    dtype = utilities.dtype
    exact = utilities.double()
    maximum = segment_max(exact, sequence_index, num_sequences)
    spread = maximum + segment_max(-exact, sequence_index, num_sequences)
    varies = spread > 0
    # With utilities scaled by their spread, temperatures of interest are between 1e-6 and 1e6 whatever the model is.
    inverse_spread = torch.where(varies, 1.0 / spread, 0.0)
    scaled = (exact - maximum[sequence_index]) * inverse_spread[sequence_index]  # all 0 where utilities are constant
    weights_at = partial(gibbs_weights, scaled, sequence_index, num_sequences, log_base=log_base)
    sharpest = torch.full_like(spread, LARGEST_SCALED_TEMPERATURE)
    saturated = varies & (weights_at(sharpest).kl < kl_budget - KL_TOLERANCE)
    # A fixed number of bisections: a test for convergence would synchronise host and device each time, and would make a
    # sequence's weights depend on the other sequences.
    low, high = torch.full_like(spread, math.log(8.0 * kl_budget) / 2.0), sharpest.log()
    for _ in range(NUM_BISECTIONS):
        middle = 0.5 * (low + high)
        too_low = weights_at(middle.exp()).kl < kl_budget
        low, high = torch.where(too_low, middle, low), torch.where(too_low, high, middle)
    root = torch.where(saturated, sharpest, (0.5 * (low + high)).exp())
    result = weights_at(root)
    return GibbsWeights(result.weights.to(dtype), (root * inverse_spread).to(dtype), result.kl.to(dtype), saturated)


@dataclass(frozen=True)
class Tokens:
    """The inputs of token weights. All tensors are on one device and without a graph."""

    losses: Tensor  # `[N]`, nats
    sequence_index: Tensor  # `[N]`, int64, the sequence of each token, in `[0, num_sequences)`
    num_sequences: int
    utilities: Tensor | None = None  # `[N]`; for `vcore`
    kept: Tensor | None = None  # `[N]`, bool, the tokens with nonzero weight, for `random`; None for all tokens
    reference_log_probability: Tensor | None = None
    """`[num_sequences]`, log-probability of each sequence under the reference model in nats, for `iw_sft`."""
    statistics: Tensor | None = None
    """`[N]`, of each prediction, for `eaft` and `deft`: see `models.token_loss.PredictionStatistic`."""
    loss_weights: Tensor | None = None  # `[N]`, 1 on average over a sequence, for `stored`

    def num_tokens(self) -> Tensor:
        """`n_i`, `[num_sequences]`."""
        return segment_sum(torch.ones_like(self.losses), self.sequence_index, self.num_sequences)

    def num_kept(self) -> Tensor:
        """Number of tokens with nonzero weight in each sequence, `[num_sequences]`."""
        if self.kept is None:
            return self.num_tokens()
        return segment_sum(self.kept.to(self.losses.dtype), self.sequence_index, self.num_sequences)
