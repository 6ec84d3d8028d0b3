"""Token weights of the methods that VCORE is compared with: factors of the uniform weights `1 / n_i`, and masks.

Ragged as in `weights.py`: over all tokens `losses[N]`, the cross-entropy of the current model in nats (fp32, without a
graph), and `sequence_index[N]`. Three factors are no functions here: Dynamic Fine-Tuning (arXiv 2508.05629), `sg(p) *
-log p` per token, has p; Entropy-Adaptive Fine-Tuning (arXiv 2601.02151), linear gating, the statistic `top_entropy`;
ProFit (arXiv 2601.09195) 1 where p is large enough, else 0 (dropped tokens count in `n_i`, as in the authors' code).
"""

import numpy as np
import torch
from torch import Tensor

from vcore_ds.method.weights import segment_sum

IMPORTANCE_RATIO_CAP = 16.0
"""Upper bound of the importance ratio in the authors' code of iw-SFT (`bounding_trainers.py` in `emmyqin/iw_sft`)."""

DEFT_EPS = 1e-6
"""Epsilon in the authors' code of DEFT (`fsdp_sft_trainer.py` in `luludus/DEFT`)."""


def deft_factors(losses: Tensor, concentrations: Tensor) -> Tensor:
    """`p(y_t)^a_t * a_t / (a_t + 1e-6)`, `[N]`: Dynamic Entropy Fine-Tuning (arXiv 2602.11424), whose loss
    `(1 - p(y_t)^a_t) / (a_t + 1e-6)` has the gradient of a cross-entropy with these factors. `concentrations`: `[N]`,
    `a_t = sum_v p(v)^2`."""
    return torch.exp(-concentrations * losses) * concentrations / (concentrations + DEFT_EPS)


def iw_sft_factors(
    losses: Tensor, reference_log_probability: Tensor, sequence_index: Tensor, num_sequences: int
) -> Tensor:
    """`w_i`, `[N]`, `w_i = clamp(exp(mean_t [log p(y_t) - log p_ref(y_t)]), 0, 16)`: importance-weighted SFT
    (arXiv 2507.12856), in the sequence-level form that its authors train with. 1 while the model equals its reference.
    `reference_log_probability`: `[num_sequences]`, `sum_t log p_ref(y_t)` in nats."""
    num_tokens = segment_sum(torch.ones_like(losses), sequence_index, num_sequences)
    log_probability = -segment_sum(losses, sequence_index, num_sequences)
    ratio = torch.exp((log_probability - reference_log_probability.to(losses.dtype)) / num_tokens)
    return ratio.clamp_max(IMPORTANCE_RATIO_CAP)[sequence_index]


def random_weights(kept: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """Uniform weights over the kept tokens of each sequence, 0 elsewhere; `[N]` fp32. `kept`: `[N]`, bool, see
    `random_mask`."""
    ones = kept.float()
    return ones / segment_sum(ones, sequence_index, num_sequences).clamp_min(1)[sequence_index]


def random_mask(in_answer: np.ndarray, keep_share: float, generator: np.random.Generator) -> np.ndarray:
    r"""The supervised tokens of one sequence that the method `random` keeps, bool `[n_i]` (paper, "The implementation
    details of Method Random"): all tokens of the answer, and random others up to the share `keep_share` in total, at
    least one token, so that every sequence counts. `in_answer`: bool `[n_i]`, the tokens inside `\boxed{...}`;
    `generator`: draws `n_i` numbers, a new one for each sequence."""
    num_kept = max(1, round(keep_share * len(in_answer)), int(in_answer.sum()))
    priority = generator.random(len(in_answer))
    priority[in_answer] = -1.0
    kept = np.zeros(len(in_answer), dtype=np.bool_)
    kept[np.argsort(priority, kind="stable")[:num_kept]] = True
    return kept
