"""The paper's mathematics on plain tensors. Knows no recipe, no engine, no process group.

Notation (see docs/method.md for the map from equations to functions to tests):

| symbol | here | shape |
|---|---|---|
| `i` | a sequence of the batch; a token's sequence is `sequence_index` | `[N]` |
| `n_i` | `num_tokens`, supervised tokens of a sequence | `[num_sequences]` |
| `l[i,t]` | `losses`, nats, fp32 | `[N]` |
| `s[i,t]` | `utilities`, directional derivative of `l` along the probe direction | `[N]` |
| `b[i,t]` | base measure, uniform unless `log_base` is given | `[N]` |
| `q[i,t]` | `weights`, sum to 1 over a sequence | `[N]` |
| `tau` | `temperature`, multiplies utilities | `[num_sequences]` |
| `alpha` | `alpha`, variance-control factor | scalar |

Ragged: N counts the supervised tokens of all sequences in a micro-batch, in row-major order.
"""

from vcore_ds.method.adam import adam_direction
from vcore_ds.method.baselines import dft_weights, iw_sft_weights, random_mask, random_weights
from vcore_ds.method.objective import (
    GlobalCounts,
    effective_sample_size,
    effective_sample_size_alpha,
    loss_ratio_alpha,
    sequence_shares,
    token_coefficients,
    utility_moments,
    utility_variances,
    variance_alpha,
)
from vcore_ds.method.token_loss import VocabularyPart, token_entropy, token_loss
from vcore_ds.method.tokens import Tokens
from vcore_ds.method.weights import (
    GibbsWeights,
    gibbs_weights,
    gibbs_weights_for_budget,
    log_probability_base,
    segment_sum,
    uniform_weights,
)

__all__ = [
    "GibbsWeights",
    "GlobalCounts",
    "Tokens",
    "VocabularyPart",
    "adam_direction",
    "dft_weights",
    "effective_sample_size",
    "effective_sample_size_alpha",
    "gibbs_weights",
    "gibbs_weights_for_budget",
    "iw_sft_weights",
    "log_probability_base",
    "loss_ratio_alpha",
    "random_mask",
    "random_weights",
    "segment_sum",
    "sequence_shares",
    "token_coefficients",
    "token_entropy",
    "token_loss",
    "uniform_weights",
    "utility_moments",
    "utility_variances",
    "variance_alpha",
]
