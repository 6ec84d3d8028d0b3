"""Sequence shares, alpha and the weighted loss of a step: hand-computed numbers and properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_weights import make_index
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
from vcore_ds.method.weights import gibbs_weights, uniform_weights

LOG2, LOG3 = math.log(2), math.log(3)


def test_shares_by_hand() -> None:
    # This rank holds sequences of 3, 0 and 5 tokens of a global batch of 4 sequences with tokens, 16 tokens in all.
    num_tokens = torch.tensor([3.0, 0.0, 5.0])
    counts = GlobalCounts(num_sequences_global=4, num_supervised_tokens_global=16)
    assert sequence_shares(num_tokens, counts, "sequence").tolist() == [0.25, 0.0, 0.25]
    assert sequence_shares(num_tokens, counts, "token").tolist() == [3 / 16, 0.0, 5 / 16]
    for normalization in ("sequence", "token"):
        assert sequence_shares(torch.zeros(2), GlobalCounts(0, 0), normalization).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("normalization", ["sequence", "token"])
@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=4), min_size=1, max_size=5), st.floats(0, 3))
def test_the_coefficients_of_all_micro_batches_sum_to_one(normalization, micro_batches, temperature: float) -> None:
    lengths = [n for batch in micro_batches for n in batch]
    counts = GlobalCounts(sum(n > 0 for n in lengths), sum(lengths))
    total = 0.0
    for k, batch in enumerate(micro_batches):
        index = make_index(batch)
        utilities = torch.randn(len(index), generator=torch.Generator().manual_seed(k))
        weights = gibbs_weights(utilities, index, len(batch), temperature).weights.requires_grad_()
        coefficients = token_coefficients(weights, index, sequence_shares(torch.tensor(batch), counts, normalization))
        assert not coefficients.requires_grad
        total += float(coefficients.double().sum())
    assert total == pytest.approx(1.0 if sum(lengths) else 0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("uniform", "weighted", "cap", "alpha"),
    [
        (1.5, 2.0, None, 0.75),
        (1.5, 2.0, 1.0, 0.75),
        (3.0, 2.0, None, 1.5),
        (3.0, 2.0, 1.0, 1.0),
        (3.0, 2.0, 1.25, 1.25),
        (0.0, 2.0, 1.0, 0.0),
        (2**-20, 2**-19, None, 0.5),
        *((loss, 0.0, cap, 1.0) for loss in (0.0, 2.0) for cap in (None, 0.5, 1.0)),
    ],
)
def test_alpha_is_the_uniform_over_the_weighted_loss(uniform: float, weighted: float, cap, alpha: float) -> None:
    assert loss_ratio_alpha(uniform, weighted, cap) == alpha


def test_the_variance_alpha_by_hand() -> None:
    """Mean utilities 1, 2 and 6 of three sequences: variance 14/3. With one-hot weights on the first token of each the
    weighted utilities are 0, 4 and 12: variance 224/9. Two micro-batches, the second with an empty row."""
    moments = torch.zeros(5, dtype=torch.float64)
    for utilities, lengths in (([0.0, 2.0, 4.0, 0.0], [2, 2]), ([12.0, 0.0], [0, 2])):
        index = make_index(lengths)
        first = torch.tensor([1.0, 0.0] * (len(utilities) // 2))
        moments += utility_moments(torch.tensor(utilities), first, index, len(lengths))
    assert moments.tolist() == [3, 9, 41, 16, 160]
    v_u, v_q = utility_variances(moments)
    assert (float(v_u), float(v_q)) == pytest.approx((14 / 3, 224 / 9))
    assert float(variance_alpha(v_u, v_q, cap=None)) == pytest.approx(math.sqrt((14 / 3) / (224 / 9)))
    assert float(variance_alpha(v_q, v_u, cap=1.5)) == 1.5
    means, weighted = torch.tensor([1.0, 2, 6], dtype=torch.float64), torch.tensor([0.0, 4, 12], dtype=torch.float64)
    assert float(v_u / v_q) == pytest.approx(float(means.var() / weighted.var()))


def test_the_variance_alpha_without_variance_is_one() -> None:
    index = make_index([3])
    one_sequence = utility_moments(torch.tensor([0.1, 0.7, 0.3]), torch.tensor([0.2, 0.5, 0.3]), index, 1)
    assert float(variance_alpha(*utility_variances(one_sequence), cap=None)) == 1.0
    nothing = torch.tensor(0.0, dtype=torch.float64)
    some = torch.tensor(2.0, dtype=torch.float64)
    for v_u, v_q in ((nothing, some), (some, nothing), (nothing, nothing)):
        assert float(variance_alpha(v_u, v_q, cap=None)) == 1.0
    equal = utility_moments(torch.full((6,), 0.1), torch.full((6,), 1 / 3), make_index([3, 3]), 2)
    assert float(variance_alpha(*utility_variances(equal), cap=None)) == 1.0
    # Not a ratio of two roundings: sums of squares that differ by 2e-15 from those of equal utilities.
    rounded = torch.tensor([2.0, 2.0, 2.0 + 4e-15, 4.0, 8.0 + 2e-14], dtype=torch.float64)
    assert [float(variance) for variance in utility_variances(rounded)] == [0.0, 0.0]
    # A deviation of 1% of the mean is none: utilities 99 and 101, and 198 and 202.
    small = torch.tensor([2.0, 200.0, 99**2 + 101**2, 400.0, 198**2 + 202**2], dtype=torch.float64)
    assert [float(variance) for variance in utility_variances(small)] == [1.0, 4.0]


def test_the_effective_sample_size_alpha_by_hand() -> None:
    weights = torch.tensor([0.25] * 4 + [1.0, 0, 0, 0] + [0.75, 0.25])
    alpha = effective_sample_size_alpha(weights, make_index([4, 4, 2, 0]), 4, cap=None)
    assert alpha.tolist() == pytest.approx([1.0, 1 / 2, 1 / math.sqrt(2 * (0.75**2 + 0.25**2)), 1.0])
    assert effective_sample_size_alpha(weights, make_index([4, 4, 2]), 3, cap=0.8).tolist()[0] == pytest.approx(0.8)


def test_effective_sample_size_by_hand() -> None:
    # Uniform over 4; one of 3; 1/6, 2/6, 3/6 -> 36 / (1 + 4 + 9); no tokens; whatever the weights' scale.
    weights = torch.tensor([0.25] * 4 + [0.0, 1.0, 0.0] + [1 / 6, 2 / 6, 3 / 6])
    for scale in (1.0, 0.01):
        size = effective_sample_size(weights * scale, make_index([4, 3, 3, 0]), 4)
        assert size.tolist() == pytest.approx([4.0, 1.0, 36 / 14, 0.0], rel=1e-6)


@pytest.mark.parametrize(
    ("normalization", "uniform", "weighted"),
    [
        # q = 1/6, 2/6, 3/6 and 1/4, 3/4; losses 6, 3, 2 and 4, 8: sum_t q l = 3 and 7, means 11/3 and 6.
        ("sequence", (11 / 3 + 6) / 2, (3 + 7) / 2),
        ("token", 23 / 5, 3 / 5 * 3 + 2 / 5 * 7),
    ],
)
def test_the_weighted_loss_and_its_gradient_by_hand(normalization, uniform: float, weighted: float) -> None:
    losses = torch.tensor([6.0, 3.0, 2.0, 4.0, 8.0], requires_grad=True)
    utilities, index = torch.tensor([0.0, LOG2, LOG3, 1.0, 1.0 + LOG3]), make_index([3, 2])
    weights = gibbs_weights(utilities, index, 2, 1.0).weights
    shares = sequence_shares(torch.tensor([3, 2]), GlobalCounts(2, 5), normalization)
    weighted_loss = (token_coefficients(weights, index, shares) * losses).sum()
    uniform_loss = (token_coefficients(uniform_weights(index, 2), index, shares) * losses).sum()
    assert (uniform_loss.item(), weighted_loss.item()) == pytest.approx((uniform, weighted), rel=1e-6)

    alpha = float(loss_ratio_alpha(uniform_loss.item(), weighted_loss.item(), cap=1.0))
    assert alpha == pytest.approx(min(1.0, uniform / weighted), rel=1e-6)
    (alpha * weighted_loss).backward()
    w = {"sequence": (1 / 2, 1 / 2), "token": (3 / 5, 2 / 5)}[normalization]
    expected = [w[0] / 6, w[0] * 2 / 6, w[0] * 3 / 6, w[1] / 4, w[1] * 3 / 4]
    assert losses.grad.tolist() == pytest.approx([alpha * x for x in expected], rel=1e-6)
