"""From utilities to token weights: the Gibbs distribution, with a fixed temperature or a KL budget.

`q[i,t] = exp(tau * s[i,t]) / sum_j exp(tau * s[i,j])` within each sequence i (paper, Section "Optimal
Reweighting under SGD", Step 2): the weights that maximise the first-order decrease `sum_t q_t s_t` subject to
`KL(q || u) <= delta`, u uniform.

Sequences have different numbers of supervised tokens, so tensors are ragged: `utilities[N]` over all tokens and
`sequence_index[N]`, the row of each token in `[0, num_sequences)`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

KL_TOLERANCE = 1e-6
"""Nats; the root of `KL(q || u) = delta` is found to this accuracy."""


@dataclass(frozen=True)
class GibbsWeights:
    weights: Tensor
    """`[N]`, sum to 1 over each sequence."""
    temperature: Tensor
    """`[num_sequences]`, the `tau` that was used (the factor that multiplies utilities)."""
    kl: Tensor
    """`[num_sequences]`, `KL(q || u)` in nats."""
    saturated: Tensor
    """`[num_sequences]`, bool: the budget is out of reach (see `gibbs_weights_for_budget`)."""


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


def gibbs_weights(
    utilities: Tensor, sequence_index: Tensor, num_sequences: int, temperature: Tensor | float
) -> GibbsWeights:
    """`softmax(temperature * utilities)` over each sequence.

    Args:
        utilities: `[N]`, finite.
        sequence_index: `[N]`, int64.
        temperature: `tau >= 0`, one number or `[num_sequences]`. 0 gives exactly `uniform_weights`.
    """
    tau = torch.as_tensor(temperature, dtype=utilities.dtype, device=utilities.device).expand(num_sequences)
    # Shifted before the product: tau may be huge, and inf - inf would be nan.
    shifted = utilities - segment_max(utilities, sequence_index, num_sequences)[sequence_index]
    exponents = tau[sequence_index] * shifted
    unnormalized = exponents.exp()
    normalizer = segment_sum(unnormalized, sequence_index, num_sequences)
    weights = unnormalized / normalizer[sequence_index]
    num_tokens = segment_sum(torch.ones_like(utilities), sequence_index, num_sequences)
    # KL(q||u) = sum q log q + log n, with log q = exponent - log Z; q log q -> 0 where q underflows to 0.
    entropy_terms = torch.where(weights > 0, weights * exponents, 0.0)
    kl = segment_sum(entropy_terms, sequence_index, num_sequences) - normalizer.log() + num_tokens.log()
    kl = torch.where(num_tokens > 0, kl.clamp_min(0.0), 0.0)
    return GibbsWeights(weights, tau, kl, torch.zeros(num_sequences, dtype=torch.bool, device=utilities.device))


def gibbs_weights_for_budget(
    utilities: Tensor, sequence_index: Tensor, num_sequences: int, kl_budget: float
) -> GibbsWeights:
    """The Gibbs weights of each sequence whose `KL(q || u)` is `kl_budget` nats.

    `KL(q_tau || u)` is strictly increasing in tau (the paper's appendix), so the root is unique and bisection
    cannot miss it. A sequence of constant utilities gets uniform weights. With m tokens sharing the maximum
    utility the divergence stays below `log(n / m)`; a budget at or above that saturates: the sequence is
    given the sharpest weights found and marked.

    Computed in fp64, all sequences at once, on the tensors' device; returned in the utilities' dtype.
    """
    dtype = utilities.dtype
    exact = utilities.double()
    highest = segment_max(exact, sequence_index, num_sequences)
    spread = highest + segment_max(-exact, sequence_index, num_sequences)
    varies = spread > 0
    # In units of the spread the interesting temperatures lie between 1e-6 and 1e6 whatever the model is.
    unit = torch.where(varies, 1.0 / spread, 0.0)
    scaled = (exact - highest[sequence_index]) * unit[sequence_index]  # all 0 where utilities are constant
    low = torch.zeros_like(spread)
    high = torch.ones_like(spread)
    for _ in range(60):
        too_low = gibbs_weights(scaled, sequence_index, num_sequences, high).kl < kl_budget
        if not bool((too_low & varies & (high < 1e20)).any()):
            break
        high = torch.where(too_low, high * 4.0, high)
    saturated = varies & (gibbs_weights(scaled, sequence_index, num_sequences, high).kl < kl_budget - KL_TOLERANCE)
    for _ in range(100):
        middle = 0.5 * (low + high)
        kl = gibbs_weights(scaled, sequence_index, num_sequences, middle).kl
        if bool(((kl - kl_budget).abs() < 0.1 * KL_TOLERANCE).logical_or(~varies | saturated).all()):
            low = high = middle
            break
        low, high = torch.where(kl < kl_budget, middle, low), torch.where(kl < kl_budget, high, middle)
    root = torch.where(saturated, high, 0.5 * (low + high))
    found = gibbs_weights(scaled, sequence_index, num_sequences, root)
    return GibbsWeights(found.weights.to(dtype), (root * unit).to(dtype), found.kl.to(dtype), saturated)
