"""Token weights and alphas of each method, on plain tensors; log-probabilities of sequences under the model and under
the reference model of a LoRA run."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from runpy import run_path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.text import shorten
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.data.batches import Batch
from vcore_ds.distributed import layout
from vcore_ds.engine.zero3 import Engine
from vcore_ds.method import baselines
from vcore_ds.method.objective import (
    GlobalCounts,
    effective_sample_size_alpha,
    loss_ratio_alpha,
    sequence_shares,
    token_coefficients,
    utility_moments,
    utility_variances,
    variance_alpha,
)
from vcore_ds.method.weights import (
    GibbsWeights,
    Tokens,
    gibbs_weights,
    gibbs_weights_for_budget,
    log_probability_base,
    segment_sum,
    uniform_weights,
)


def token_weights(method: MethodConfig, tokens: Tokens) -> GibbsWeights:
    """Weights `q[i,t]` of all tokens (Algorithm 1, line 5); for the baselines, weights on the same scale without a
    tilt."""
    index, num_sequences = tokens.sequence_index, tokens.num_sequences
    if method.name == "vcore":
        assert tokens.utilities is not None
        is_dft = method.base_measure == "dft"
        log_base = log_probability_base(tokens.losses, index, num_sequences) if is_dft else None
        if method.kl_budget is not None:
            return gibbs_weights_for_budget(tokens.utilities, index, num_sequences, method.kl_budget, log_base)
        assert method.temperature is not None  # the recipe's rules
        return gibbs_weights(tokens.utilities, index, num_sequences, method.temperature, log_base)
    if method.name == "random":
        # A batch without a mask is an idle one.
        kept = torch.ones_like(tokens.losses, dtype=torch.bool) if tokens.kept is None else tokens.kept
        weights = baselines.random_weights(kept, index, num_sequences)
    else:
        weights = token_factors(method, tokens) * uniform_weights(index, num_sequences, tokens.losses.dtype)
    nothing = weights.new_zeros(num_sequences)
    return GibbsWeights(weights, temperature=nothing, kl=nothing, saturated=nothing.bool())


def token_factors(method: MethodConfig, tokens: Tokens) -> Tensor:
    """Factors `[N]` of the uniform weights, for methods that only scale each token's loss."""
    losses, statistics = tokens.losses, tokens.statistics
    if method.name == "custom" and len(losses):  # a function need not know of idle batches
        factors = call_function(method, tokens)
        if not isinstance(factors, Tensor) or factors.shape != losses.shape:
            found = f"a tensor {list(factors.shape)}" if isinstance(factors, Tensor) else shorten(repr(factors))
            raise UserError(
                f"method.function: {method.function}: found {found}; expected a tensor {list(losses.shape)}: a factor "
                "for each of the micro-batch's tokens"
            )
        factors = factors.detach().to(losses.dtype)
        return factors.where(factors >= 0, torch.nan)  # a negative one ends the run, as one that is not finite does
    if method.name in ("dft", "asft"):
        return torch.exp(-losses)
    if method.name == "profit":
        return (torch.exp(-losses) >= method.min_probability).to(losses.dtype)
    if method.name in ("eaft", "deft"):
        assert statistics is not None
        return statistics if method.name == "eaft" else baselines.deft_factors(losses, statistics)
    if method.name == "iw_sft" and tokens.reference_log_probability is not None:  # an idle batch has none
        reference = tokens.reference_log_probability
        return baselines.iw_sft_factors(losses, reference, tokens.sequence_index, tokens.num_sequences)
    if method.name == "stored" and tokens.loss_weights is not None:  # an idle batch has none
        return tokens.loss_weights
    return torch.ones_like(losses)


def call_function(method: MethodConfig, tokens: Tokens) -> Any:
    """Call the function of `custom` on the tokens of a micro-batch, of which it gets copies. Raises RuntimeError where
    it ends the process, whose exit code would be taken for that of the run."""
    assert method.function is not None  # the recipe's rules
    index, num_tokens = tokens.sequence_index, tokens.num_tokens().long()
    first = num_tokens.cumsum(0) - num_tokens
    losses = tokens.losses.clamp(min=0.0)  # rounding makes a few negative, whose roots would be NaN
    values = vars(tokens) | {
        "losses": losses,
        "probabilities": torch.exp(-losses),
        "entropies": tokens.statistics,
        "positions": torch.arange(len(index), device=index.device) - first[index],
    }
    inputs = {name: x.clone() if isinstance(x := values[name], Tensor) else x for name in method.function_inputs}
    try:
        return load_function(method.function, method.function_digest)(**inputs, **method.options)
    except SystemExit as error:
        raise RuntimeError(f"{method.function} has called sys.exit({error.code!r})") from error


@cache
def load_function(function: str, digest: str | None) -> Callable[..., Any]:
    """Run the file of `FILE.py:FUNCTION`, again for each `digest`, and return the function. It can import modules
    beside it and in the working directory."""
    path, _, name = function.rpartition(":")
    sys.path += [folder for folder in (str(Path(path).parent), os.getcwd()) if folder not in sys.path]
    return run_path(path, run_name=Path(path).stem)[name]


def check_function(method: MethodConfig, device: torch.device | None = None) -> None:
    """Try the function of `custom` on made-up tokens, before a model is loaded. Raises UserError if it fails, or its
    factors are not `[N]`, finite, at least 0 and the same in a second call; does nothing for other methods."""
    if method.name != "custom":
        return
    # Certain and nearly impossible tokens, utilities of both signs.
    columns = ((0.0, 1e-4, 0.7, 2.3, 20.0, 1.0), (0, 0, 0, 0, 1, 1), (0.0, 3e-3, -0.5, 40.0, -2.0, 0.1))
    losses, index, utilities = (torch.tensor(column, device=device) for column in columns)
    tokens = Tokens(losses, index, 2, utilities, statistics=losses / 2)
    try:
        factors, again = (call_function(method, tokens) for _ in range(2))
        is_valid = isinstance(factors, Tensor) and factors.shape == losses.shape and torch.equal(factors, again)
        found = "" if is_valid and ((factors >= 0) & factors.isfinite()).all() else f"{factors}, then {again}"
    except Exception as error:
        place = extract_tb(error.__traceback__)[-1]
        found = f"{type(error).__name__} in {place.filename}:{place.lineno} ({first_line(error)})"
    if found:
        expected = "a tensor [6] of finite factors of at least 0, the same in two calls"
        raise UserError(f"method.function: {method.function}: found {found}, for 6 made-up tokens; expected {expected}")


def sequence_weights(method: MethodConfig, utilities: Tensor, shares: Tensor) -> GibbsWeights:
    """Weights of a global batch's sequences, tilted by utility within `method.batch_kl_budget` nats of their shares:
    they maximise the first-order decrease `sum_i r_i sum_t q[i,t] s[i,t]` subject to `KL(r || shares) <= delta`, the
    paper's problem one level up, and need the whole batch before the first backward. `utilities`: `[S]` fp64,
    `sum_t q[i,t] s[i,t]`; `shares`: `[S]` fp64, positive, sum to 1."""
    assert method.batch_kl_budget is not None  # the recipe's rules
    one_segment = torch.zeros(len(utilities), dtype=torch.int64, device=utilities.device)
    return gibbs_weights_for_budget(utilities, one_segment, 1, method.batch_kl_budget, shares.log())


def alpha_of_micro_batch(
    method: MethodConfig, tokens: Tokens, weights: Tensor, sequence_shares: Tensor
) -> Tensor | float:
    """Alpha (Algorithm 1, line 6), if known before the backward: of each sequence, `[num_sequences]`, or of the
    micro-batch; 1 if alpha belongs to the global batch, and for methods without one. `weights`: `[N]`;
    `sequence_shares`: `[num_sequences]`, of the global batch's loss."""
    if not has_local_alpha(method):
        return 1.0
    losses, index, num_sequences = tokens.losses, tokens.sequence_index, tokens.num_sequences
    if method.alpha == "effective_sample_size":
        return effective_sample_size_alpha(weights, index, num_sequences, method.alpha_cap)
    if method.alpha == "variance":
        assert tokens.utilities is not None
        moments = utility_moments(tokens.utilities, weights, index, num_sequences)
        return variance_alpha(*utility_variances(moments), method.alpha_cap).to(losses.dtype)
    uniform = token_coefficients(uniform_weights(index, num_sequences), index, sequence_shares)
    weighted = token_coefficients(weights, index, sequence_shares)
    return loss_ratio_alpha((uniform * losses).sum(), (weighted * losses).sum(), method.alpha_cap).to(losses.dtype)


def has_local_alpha(method: MethodConfig) -> bool:
    """Whether alpha belongs to a sequence or a micro-batch, rather than to the global batch."""
    if method.applied_alpha == "none":
        return False
    return method.alpha == "effective_sample_size" or method.alpha_scope == "micro_batch"


def alpha_of_global_batch(
    method: MethodConfig, loss: float, weighted_loss: float, utility_moments: Tensor
) -> float | None:
    """Alpha (Algorithm 1, line 6) of the global batch; None if it belongs to sequences or micro-batches, exactly 1 for
    methods without one. `loss`, `weighted_loss`: nats, of the batch; `utility_moments`: `[5]`, summed over it."""
    if has_local_alpha(method):
        return None
    if method.applied_alpha == "loss_ratio":
        return float(loss_ratio_alpha(loss, weighted_loss, method.alpha_cap))
    if method.applied_alpha == "variance":
        return float(variance_alpha(*utility_variances(utility_moments), method.alpha_cap))
    return 1.0


def sequence_factors(
    method: MethodConfig, counts: GlobalCounts, batches: Sequence[Batch], known: Sequence[tuple[Tensor, Tensor]]
) -> tuple[list[Tensor], dict[str, float]]:
    """Factor `[num_sequences]` fp32 of each sequence's share in the global batch's loss (`method.scope:
    sequence_and_batch`), for each of this rank's `batches`; and metrics: `batch_tau`, `batch_kl` in nats, and
    `batch_effective_sample_size` in sequences. A collective. `known`: losses and utilities `[N]` of each micro-batch,
    before any backward."""
    gains, shares = [], []
    for batch, (losses, utilities) in zip(batches, known, strict=True):
        tokens = batch.tokens(losses, utilities)
        q = token_weights(method, tokens).weights
        gains.append(segment_sum(q * utilities, tokens.sequence_index, tokens.num_sequences))
        shares.append(sequence_shares(tokens.num_tokens(), counts, method.normalization))
    local = torch.stack([torch.cat(gains), torch.cat(shares)]).double()
    k = batches[0].sequence_parallel
    # Ranks of a sequence-parallel group hold the same sequences; one of them contributes.
    by_rank = layout.gather_objects("shards", local.cpu() if layout.rank("sequence", k) == 0 else local[:, :0].cpu())
    all_gains, all_shares = torch.cat(by_rank, 1)
    has_share = all_shares > 0  # an idle batch has no tokens
    tilted = sequence_weights(method, all_gains[has_share], all_shares[has_share])
    factors = torch.zeros_like(all_shares)
    factors[has_share] = tilted.weights / all_shares[has_share]
    start = sum(rank_values.shape[1] for rank_values in by_rank[: layout.rank("data", k) * k])
    sizes = [len(batch_gains) for batch_gains in gains]
    local_factors = factors[start : start + sum(sizes)].float().to(local.device)
    measured = {
        "batch_tau": float(tilted.temperature),
        "batch_kl": float(tilted.kl),
        "batch_effective_sample_size": float(1.0 / tilted.weights.square().sum()),
    }
    return list(local_factors.split(sizes)), measured


def compute_log_probabilities(engine: Engine, batches: Sequence[Batch]) -> list[Tensor]:
    """Compute the log-probability `sum_t log p(y_t)` of each sequence in nats, `[num_sequences]` fp32 for every
    micro-batch of this rank. A collective."""
    log_probabilities = []
    with engine.without_gradient():
        for batch in batches:
            losses = engine.token_losses(batch)
            index = batch.sequence_index().to(losses.device)
            log_probabilities.append(-segment_sum(losses, index, batch.num_sequences))
    return log_probabilities


def add_reference_log_probabilities(engine: Engine, batches: Sequence[Batch]) -> list[Batch]:
    """Set `reference_log_probability` of the batches by a forward without LoRA adapters. A collective."""
    with engine.without_adapters():
        reference = compute_log_probabilities(engine, batches)
    return [replace(b, reference_log_probability=values) for b, values in zip(batches, reference, strict=True)]
