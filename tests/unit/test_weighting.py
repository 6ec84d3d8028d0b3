"""From a recipe's method to weights and alphas: every method, alpha, scope, cap and normalization against the papers'
formulas in numpy fp64."""

import math
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
import torch

from tests.helpers import oracle
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.method.objective import GlobalCounts, sequence_shares, utility_moments
from vcore_ds.method.weights import Tokens, uniform_weights
from vcore_ds.training.weighting import alpha_of_global_batch, alpha_of_micro_batch, token_weights

METHODS = {
    "sft": MethodConfig(name="sft"),
    "dft": MethodConfig(name="dft"),
    "asft": MethodConfig(name="asft"),
    "eaft": MethodConfig(name="eaft"),
    "deft": MethodConfig(name="deft"),
    "profit": MethodConfig(name="profit", min_probability=0.4),
    "iw_sft": MethodConfig(name="iw_sft"),
    "random": MethodConfig(name="random"),
    "vcore-temperature": MethodConfig(temperature=0.8),
    "vcore-budget": MethodConfig(kl_budget=0.05),
}
ALPHAS = ("loss_ratio", "variance", "effective_sample_size", "none")
SCOPES = ("global_batch", "micro_batch")
MICRO_BATCHES = ((5, 3, 2), (7, 0, 4))
"""Supervised tokens of each sequence."""


@dataclass(frozen=True)
class Sequence:
    """Losses, utilities and other inputs of one sequence; arrays `[n_i]` fp64."""

    losses: np.ndarray
    utilities: np.ndarray
    kept: np.ndarray
    reference_log_probability: float
    statistics: np.ndarray

    def __len__(self) -> int:
        return len(self.losses)


def draw_sequences() -> list[list[Sequence]]:
    """The sequences of each micro-batch of one step."""
    random = np.random.default_rng(5)

    def sequence(n: int) -> Sequence:
        kept = np.arange(n) == 0  # at least one
        values = random.exponential(1.0, n), random.normal(0.5, 1.0, n), kept | (random.random(n) < 0.4)
        return Sequence(*values, -float(random.exponential(1.0, n).sum()), random.random(n))

    return [[sequence(n) for n in lengths] for lengths in MICRO_BATCHES]


def make_tokens(sequences: list[Sequence]) -> Tokens:
    def ragged(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(sequence, name) for sequence in sequences]))

    return Tokens(
        ragged("losses").float(),
        torch.from_numpy(np.repeat(np.arange(len(sequences)), [len(sequence) for sequence in sequences])),
        len(sequences),
        ragged("utilities").float(),
        ragged("kept").bool(),
        torch.tensor([sequence.reference_log_probability for sequence in sequences]),
        ragged("statistics").float(),
    )


def compute_expected_weights(method: MethodConfig, sequence: Sequence) -> np.ndarray:
    """`q[i]`, `[n_i]`."""
    n, losses, utilities = len(sequence), sequence.losses, sequence.utilities
    if n == 0:
        return losses
    if method.name == "vcore":
        base = np.exp(-losses) if method.base_measure == "dft" else np.ones(n)
        base = torch.from_numpy(base / base.sum())
        tau = method.temperature or oracle.tau(torch.from_numpy(utilities), base, method.kl_budget)
        return oracle.tilted(torch.from_numpy(utilities), base, tau).numpy()
    if method.name == "random":
        return sequence.kept / sequence.kept.sum()
    factor = {
        "sft": 1.0,
        "dft": np.exp(-losses),
        "asft": np.exp(-losses),
        "eaft": sequence.statistics,
        "deft": np.exp(-losses * sequence.statistics) / (1 + 1e-6 / sequence.statistics),
        "profit": np.exp(-losses) >= method.min_probability,
        "iw_sft": min(np.exp((-losses.sum() - sequence.reference_log_probability) / n), 16.0),
    }[method.name]
    return factor * np.full(n, 1 / n)


def compute_expected_alpha(method: MethodConfig, sequences: list[Sequence], shares: list[float]) -> float:
    """Algorithm 1, line 6 (`loss_ratio`), or sqrt(V_u / V_q), over these sequences."""
    pairs = [
        (share, item, compute_expected_weights(method, item)) for share, item in zip(shares, sequences, strict=True)
    ]
    pairs = [(share, item, q) for share, item, q in pairs if len(item)]
    if method.alpha == "loss_ratio":
        uniform = sum(share * item.losses.mean() for share, item, _ in pairs)
        ratio = uniform / sum(share * (q * item.losses).sum() for share, item, q in pairs)
    else:
        uniform_std = np.std([item.utilities.mean() for _, item, _ in pairs])
        ratio = uniform_std / np.std([(q * item.utilities).sum() for _, item, q in pairs])
    return min(ratio, method.alpha_cap or math.inf)


def compute_expected_shares(normalization: str) -> list[list[float]]:
    """`w_i` of the sequences of each micro-batch."""
    lengths = [n for micro_batch in MICRO_BATCHES for n in micro_batch]
    if normalization == "token":
        return [[n / sum(lengths) for n in micro_batch] for micro_batch in MICRO_BATCHES]
    return [[(n > 0) / sum(n > 0 for n in lengths) for n in micro_batch] for micro_batch in MICRO_BATCHES]


@pytest.mark.parametrize("name", METHODS)
def test_the_weights_of_every_method_follow_their_formulas(name: str) -> None:
    for sequences in draw_sequences():
        tokens = make_tokens(sequences)
        weights = token_weights(METHODS[name], tokens)
        expected = [compute_expected_weights(METHODS[name], sequence) for sequence in sequences]
        # A budget is met to 1e-6 of its 0.05 nats; the rest is fp32's rounding.
        tolerance = 1e-4 if name == "vcore-budget" else 1e-6
        np.testing.assert_allclose(weights.weights.numpy(), np.concatenate(expected), rtol=tolerance)
        has_tokens = [len(sequence) > 0 for sequence in sequences]
        tilted = [bool(kl > 0) for kl in weights.kl]
        assert tilted == (has_tokens if name.startswith("vcore") else [False] * len(sequences))


def test_an_importance_ratio_above_16_is_16() -> None:
    likely = Sequence(np.zeros(4), np.zeros(4), np.ones(4), -4 * math.log(16.5), np.zeros(4))
    below = Sequence(np.zeros(4), np.zeros(4), np.ones(4), -4 * math.log(15.5), np.zeros(4))
    weights = token_weights(METHODS["iw_sft"], make_tokens([likely, below])).weights
    assert weights.tolist() == pytest.approx([16 / 4] * 4 + [15.5 / 4] * 4)


@pytest.mark.parametrize("name", METHODS)
def test_a_micro_batch_without_tokens_has_neither_weights_nor_an_alpha(name: str) -> None:
    """As the micro-batch of an idle rank, which has no mask and no reference either."""
    nothing = torch.zeros(0)
    idle = Tokens(nothing, torch.zeros(0, dtype=torch.int64), 1, utilities=nothing, statistics=nothing)
    weights = token_weights(METHODS[name], idle)
    assert weights.weights.shape == (0,) and not weights.saturated.any()
    for alpha in ALPHAS:
        method = METHODS[name].model_copy(update={"alpha": alpha, "alpha_scope": "micro_batch"})
        assert alpha_of_micro_batch(method, idle, weights.weights, torch.zeros(1)) == 1.0


@pytest.mark.parametrize("normalization", ["sequence", "token"])
@pytest.mark.parametrize("cap", [0.7, 1.0, None])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_every_alpha_follows_its_formula(alpha: str, scope: str, cap: float | None, normalization: str) -> None:
    """An alpha belongs to the global batch, a micro-batch or a sequence; at the other levels it is 1."""
    method = MethodConfig(temperature=0.8, alpha=alpha, alpha_scope=scope, alpha_cap=cap, normalization=normalization)
    micro_batches, expected = draw_sequences(), compute_expected_shares(normalization)
    lengths = [n for micro_batch in MICRO_BATCHES for n in micro_batch]
    counts = GlobalCounts(sum(n > 0 for n in lengths), sum(lengths))
    loss = weighted_loss = 0.0
    moments = torch.zeros(5, dtype=torch.float64)
    for sequences, shares_expected in zip(micro_batches, expected, strict=True):
        tokens = make_tokens(sequences)
        q = token_weights(method, tokens).weights
        shares = sequence_shares(tokens.num_tokens(), counts, normalization)
        assert shares.tolist() == pytest.approx(shares_expected)
        micro_batch_alpha = alpha_of_micro_batch(method, tokens, q, shares)
        if alpha == "effective_sample_size":
            weights = [compute_expected_weights(method, sequence) for sequence in sequences]
            ratios = [1 / math.sqrt(len(p) * (p**2).sum()) if len(p) else 1.0 for p in weights]
            capped = [min(ratio, cap or math.inf) if len(p) else 1.0 for ratio, p in zip(ratios, weights, strict=True)]
            assert micro_batch_alpha.tolist() == pytest.approx(capped, rel=1e-6)
        elif alpha == "none" or scope == "global_batch":
            assert micro_batch_alpha == 1.0
        else:
            assert float(micro_batch_alpha) == pytest.approx(
                compute_expected_alpha(method, sequences, shares_expected), rel=1e-6
            )
        share = shares[tokens.sequence_index]
        loss += float((share * uniform_weights(tokens.sequence_index, tokens.num_sequences) * tokens.losses).sum())
        weighted_loss += float((share * q * tokens.losses).sum())
        moments += utility_moments(tokens.utilities, q, tokens.sequence_index, tokens.num_sequences)
    batch_alpha = alpha_of_global_batch(method, loss=loss, weighted_loss=weighted_loss, utility_moments=moments)
    if alpha == "none":
        assert batch_alpha == 1.0
    elif scope == "micro_batch" or alpha == "effective_sample_size":
        assert batch_alpha is None
    else:
        assert batch_alpha == pytest.approx(
            compute_expected_alpha(method, list(chain(*micro_batches)), list(chain(*expected))), rel=1e-6
        )


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith("vcore")])
def test_the_baselines_have_no_alpha_whatever_the_recipe_says(name: str, alpha: str, scope: str) -> None:
    method = MethodConfig(name=name, alpha=alpha, alpha_scope=scope)
    tokens = make_tokens(draw_sequences()[0])
    weights = token_weights(method, tokens).weights
    assert alpha_of_micro_batch(method, tokens, weights, torch.ones(3) / 3) == 1.0
    moments = utility_moments(tokens.utilities, weights, tokens.sequence_index, tokens.num_sequences)
    assert alpha_of_global_batch(method, loss=2.0, weighted_loss=4.0, utility_moments=moments) == 1.0
