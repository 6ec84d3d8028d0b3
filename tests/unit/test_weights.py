"""Weights from utilities: hand-computed numbers, and properties for all inputs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.soak import IS_SOAK
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.method.weights import (
    Tokens,
    gibbs_weights,
    gibbs_weights_for_budget,
    log_probability_base,
    segment_sum,
    uniform_weights,
)
from vcore_ds.training.weighting import sequence_weights

LOG2, LOG3 = math.log(2), math.log(3)
KL_ACCURACY = 1e-6  # nats, as documented


def make_index(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


several = settings(max_examples=200 if IS_SOAK else 50)


def compute_kl_to_uniform(weights: Tensor, index: Tensor, num_sequences: int) -> Tensor:
    """`KL(q || u)` from the weights: `sum q log(n q)`."""
    num_tokens = torch.bincount(index, minlength=num_sequences).to(weights)
    terms = torch.special.xlogy(weights, weights * num_tokens[index])
    return segment_sum(terms, index, num_sequences)


@st.composite
def ragged(draw: st.DrawFn, min_length: int = 0, scales: tuple[float, float] = (-8, 6)) -> tuple[Tensor, Tensor, int]:
    """(utilities fp64, sequence index, number of sequences), tokens in a shuffled order, utilities of any magnitude."""
    lengths = draw(st.lists(st.integers(min_length, 40), min_size=1, max_size=6))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    index = make_index(lengths)
    index = index[torch.randperm(len(index), generator=generator)]
    scale = 10.0 ** torch.empty(len(lengths), dtype=torch.float64).uniform_(*scales, generator=generator)
    offset = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["normal", "heavy", "ties"]))
    values = torch.randn(len(index), generator=generator, dtype=torch.float64)
    if kind == "heavy":
        values = values**5
    if kind == "ties":
        values = values.round()
    return (values + offset[index]) * scale[index], index, len(lengths)


def test_weights_and_divergence_by_hand() -> None:
    # exp(1 * [0, log 2, log 3]) = 1, 2, 3 and exp(0.5 * [-2 log 3, 0]) = 1/3, 1, and one token alone.
    utilities = torch.tensor([0.0, LOG2, LOG3, -2 * LOG3, 0.0, 7.0], dtype=torch.float64)
    result = gibbs_weights(utilities, make_index([3, 2, 1]), 3, torch.tensor([1.0, 0.5, 4.0], dtype=torch.float64))
    right = [1 / 6, 2 / 6, 3 / 6, 1 / 4, 3 / 4, 1.0]
    torch.testing.assert_close(result.weights, torch.tensor(right, dtype=torch.float64), rtol=1e-14, atol=0)
    # 1/6 log(1/2) + 1/3 log 1 + 1/2 log(3/2) and 1/4 log(1/2) + 3/4 log(3/2)
    kl = [0.5 * math.log(1.5) - LOG2 / 6, 0.75 * math.log(1.5) - LOG2 / 4, 0.0]
    assert kl[:2] == pytest.approx([0.087208, 0.130812], abs=1e-6)
    torch.testing.assert_close(result.kl, torch.tensor(kl, dtype=torch.float64), rtol=1e-13, atol=1e-15)
    assert result.temperature.tolist() == [1.0, 0.5, 4.0]
    assert result.saturated.tolist() == [False] * 3


def test_a_budget_by_hand() -> None:
    # The temperature that gives 1/6, 2/6, 3/6 is 1, and its divergence is known.
    utilities = torch.tensor([0.0, LOG2, LOG3, 5.0, 5.0 + LOG3], dtype=torch.float64)
    for sequence, kl in [(0, 0.5 * math.log(1.5) - LOG2 / 6), (1, 0.75 * math.log(1.5) - LOG2 / 4)]:
        result = gibbs_weights_for_budget(utilities, make_index([3, 2]), 2, kl)
        assert float(result.temperature[sequence]) == pytest.approx(1.0, abs=1e-5)
        weights = result.weights[make_index([3, 2]) == sequence].tolist()
        assert weights == pytest.approx([[1 / 6, 2 / 6, 3 / 6], [1 / 4, 3 / 4]][sequence], abs=1e-5)


def test_a_base_measure_by_hand() -> None:
    # b = 1/2, 1/4, 1/4 from losses log 2, log 4, log 4 (any constant added); tilted by 1, 1, 2 it is 2, 1, 2 fifths.
    losses, index = torch.tensor([LOG2, 2 * LOG2, 2 * LOG2], dtype=torch.float64) + 3.0, make_index([3])
    log_base = log_probability_base(losses, index, 1)
    assert log_base.exp().tolist() == pytest.approx([1 / 2, 1 / 4, 1 / 4], rel=1e-14)
    utilities = torch.tensor([0.0, 0.0, LOG2], dtype=torch.float64)
    result = gibbs_weights(utilities, index, 1, 1.0, log_base)
    assert result.weights.tolist() == pytest.approx([2 / 5, 1 / 5, 2 / 5], rel=1e-14)
    kl = 0.4 * math.log(0.8) + 0.2 * math.log(0.8) + 0.4 * math.log(1.6)
    assert float(result.kl) == pytest.approx(kl, rel=1e-12)
    solved = gibbs_weights_for_budget(utilities, index, 1, kl, log_base)
    assert float(solved.temperature) == pytest.approx(1.0, abs=1e-5)
    assert solved.weights.tolist() == pytest.approx([2 / 5, 1 / 5, 2 / 5], abs=1e-5)
    # All mass on the last token is -log b = log 4 away: a larger budget saturates.
    assert not gibbs_weights_for_budget(utilities, index, 1, 1.38, log_base).saturated
    beyond = gibbs_weights_for_budget(utilities, index, 1, 1.40, log_base)
    assert bool(beyond.saturated) and float(beyond.kl) == pytest.approx(2 * LOG2, rel=1e-6)


@several
@given(ragged(min_length=1, scales=(-4, 2)), st.floats(0.01, 120), st.floats(0.001, 2.0), st.integers(0, 2**31))
def test_the_budget_is_met_relative_to_any_base_measure(drawn, spread: float, budget: float, seed: int) -> None:
    """Losses up to hundreds of nats, so that a token of large utility may have almost no base weight."""
    utilities, index, num_sequences = drawn
    losses = torch.rand(len(index), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread
    log_base = log_probability_base(losses, index, num_sequences)
    ones = torch.ones(num_sequences, dtype=torch.float64)
    torch.testing.assert_close(segment_sum(log_base.exp(), index, num_sequences), ones)
    untilted = gibbs_weights(utilities, index, num_sequences, 0.0, log_base)
    torch.testing.assert_close(untilted.weights, log_base.exp(), rtol=1e-9, atol=1e-15)
    result = gibbs_weights_for_budget(utilities, index, num_sequences, budget, log_base)
    q = result.weights
    torch.testing.assert_close(segment_sum(q, index, num_sequences), ones)
    kl = segment_sum(torch.special.xlogy(q, q) - q * log_base, index, num_sequences)
    gain = segment_sum((q - log_base.exp()) * utilities, index, num_sequences)
    size = segment_sum(utilities.abs(), index, num_sequences)
    assert (gain >= -1e-9 * size).all()  # E_q[s] >= E_b[s]
    for i in range(num_sequences):
        sequence_utilities = utilities[index == i]
        if bool(result.saturated[i]) or float(sequence_utilities.max() - sequence_utilities.min()) == 0:
            assert float(kl[i]) <= budget + KL_ACCURACY
        else:
            assert abs(float(kl[i]) - budget) <= KL_ACCURACY


def test_sequence_weights_leave_a_budget_over_the_batch() -> None:
    method = MethodConfig(kl_budget=0.1, scope="sequence_and_batch", batch_kl_budget=0.05)
    shares = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    utilities = torch.tensor([-1.0, 2.0, 0.5], dtype=torch.float64)
    r = sequence_weights(method, utilities, shares).weights
    assert float(r.sum()) == pytest.approx(1.0) and float((r * (r / shares).log()).sum()) == pytest.approx(
        0.05, abs=1e-6
    )
    # Tilted by one temperature: log ratios are linear in the utilities.
    log_ratios = (r / shares).log()
    slopes = (log_ratios - log_ratios[0])[1:] / (utilities - utilities[0])[1:]
    assert float(slopes[0]) == pytest.approx(float(slopes[1]), rel=1e-9) and float(slopes[0]) > 0


def test_a_token_of_the_highest_utility_that_has_no_base_weight() -> None:
    """`softmax([-3000, -1000])`: without a shift both exponentials would underflow, and their ratio be NaN."""
    result = gibbs_weights(torch.tensor([0.0, -1.0]), make_index([2]), 1, 1000.0, torch.tensor([-3000.0, 0.0]))
    assert result.weights.tolist() == [0.0, 1.0] and result.kl.tolist() == [0.0]


def test_no_divergence_is_negative() -> None:
    """That of weights so close to uniform is below the rounding of its terms."""
    utilities = 1e-5 * torch.randn(7000, generator=torch.Generator().manual_seed(0))
    assert gibbs_weights(utilities, make_index([7] * 1000), 1000, 1.0).kl.min() >= 0.0


def test_kept_tokens_are_counted_by_sequence() -> None:
    kept = torch.tensor([True, False, False, True, True])
    tokens = Tokens(torch.ones(5), make_index([3, 2]), 2, kept=kept)
    assert tokens.num_tokens().tolist() == [3, 2] and tokens.num_kept().tolist() == [1, 2]
    assert Tokens(torch.ones(5), make_index([3, 2]), 2).num_kept().tolist() == [3, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperature_zero_is_uniform_bit_for_bit(dtype: torch.dtype) -> None:
    index = make_index([1, 7, 0, 300, 49])[torch.randperm(357, generator=torch.Generator().manual_seed(0))]
    utilities = torch.randn(357, generator=torch.Generator().manual_seed(1), dtype=dtype) * 1e4
    result = gibbs_weights(utilities, index, 5, 0.0)
    uniform = uniform_weights(index, 5, dtype)
    assert torch.equal(result.weights, uniform)
    assert torch.equal(uniform, (1.0 / torch.tensor([1, 7, 1, 300, 49], dtype=dtype))[index])
    assert float(result.kl.max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [5e3, 1e12])
def test_a_huge_temperature_is_finite_and_one_hot(temperature: float, dtype: torch.dtype) -> None:
    utilities, largest = torch.linspace(1, 100, 64, dtype=dtype).flip(0), torch.finfo(dtype).max / 200
    # With 1e12 exponents of the second sequence are -inf.
    result = gibbs_weights(torch.cat([utilities, -utilities * largest]), make_index([64, 64]), 2, temperature)
    assert result.weights.tolist() == [1.0] + [0.0] * 126 + [1.0]
    assert result.kl.tolist() == pytest.approx([math.log(64)] * 2, rel=1e-6)


def test_sequences_without_tokens_and_of_one_token_are_not_tilted() -> None:
    utilities, index = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1, 4, 4])
    for result in (gibbs_weights(utilities, index, 6, 2.0), gibbs_weights_for_budget(utilities, index, 6, 0.1)):
        assert result.weights[0] == 1.0
        for values in (result.weights, result.temperature, result.kl):
            assert values.isfinite().all()
        assert result.kl[[0, 1, 2, 3, 5]].tolist() == [0.0] * 5
        assert result.kl[4] > 0.09
        assert not result.saturated.any()


def test_no_tokens_at_all_give_no_weights() -> None:
    nothing, index = torch.empty(0), torch.empty(0, dtype=torch.int64)
    for result in (gibbs_weights(nothing, index, 2, 1.0), gibbs_weights_for_budget(nothing, index, 2, 0.1)):
        assert result.weights.shape == (0,)
        assert result.kl.tolist() == [0.0, 0.0]
    assert uniform_weights(index, 2).shape == (0,)


@several
@given(ragged(min_length=1, scales=(-3, 1)), st.floats(0.01, 50))
def test_each_sequence_sums_to_one_and_its_divergence_is_that_of_its_weights(drawn, temperature: float) -> None:
    utilities, index, num_sequences = drawn
    result = gibbs_weights(utilities, index, num_sequences, temperature)
    torch.testing.assert_close(segment_sum(result.weights, index, num_sequences), torch.ones(num_sequences).double())
    torch.testing.assert_close(
        result.kl, compute_kl_to_uniform(result.weights, index, num_sequences), rtol=1e-9, atol=1e-12
    )


@several
@given(ragged(min_length=1, scales=(-2, 2)), st.floats(-1e4, 1e4), st.floats(0.01, 10))
def test_a_shift_of_the_utilities_changes_nothing(drawn, shift: float, temperature: float) -> None:
    utilities, index, num_sequences = drawn
    before = gibbs_weights(utilities, index, num_sequences, temperature).weights
    after = gibbs_weights(utilities + shift, index, num_sequences, temperature).weights
    torch.testing.assert_close(before, after, rtol=0, atol=1e-5)


@settings(several, max_examples=400 if IS_SOAK else 100)
@given(ragged(), st.floats(1e-4, 3.0))
def test_the_budget_is_met_whatever_the_scale(drawn, budget: float) -> None:
    utilities, index, num_sequences = drawn
    result = gibbs_weights_for_budget(utilities, index, num_sequences, budget)
    kl = compute_kl_to_uniform(result.weights, index, num_sequences)
    for sequence in range(num_sequences):
        mine = utilities[index == sequence]
        if mine.numel() == 0 or float(mine.max()) == float(mine.min()):
            assert float(result.kl[sequence]) == 0.0 and not result.saturated[sequence]
            continue
        reachable = math.log(len(mine) / int((mine == mine.max()).sum()))
        if budget >= reachable + 2 * KL_ACCURACY:
            assert result.saturated[sequence]
            assert float(kl[sequence]) == pytest.approx(reachable, abs=KL_ACCURACY)
        elif budget <= reachable - 2 * KL_ACCURACY:
            assert not result.saturated[sequence]
            assert float(kl[sequence]) == pytest.approx(budget, abs=KL_ACCURACY)
            assert float(result.kl[sequence]) == pytest.approx(budget, abs=KL_ACCURACY)


@several
@given(ragged(min_length=1), st.floats(0.001, 1.0))
def test_a_budgets_weights_are_those_of_its_temperature(drawn, budget: float) -> None:
    utilities, index, num_sequences = drawn
    result = gibbs_weights_for_budget(utilities, index, num_sequences, budget)
    again = gibbs_weights(utilities, index, num_sequences, result.temperature)
    torch.testing.assert_close(result.weights, again.weights, rtol=0, atol=1e-7)


def test_fp32_utilities_meet_the_budget_and_keep_their_dtype() -> None:
    generator = torch.Generator().manual_seed(0)
    index = make_index([16_000, 500, 3])
    for scale in (1e-8, 1.0, 1e6):
        utilities = torch.randn(16_503, generator=generator) ** 3 * scale
        result = gibbs_weights_for_budget(utilities, index, 3, 0.05)
        assert result.weights.dtype == result.temperature.dtype == result.kl.dtype == torch.float32
        kl = compute_kl_to_uniform(result.weights.double(), index, 3)
        assert kl.tolist() == pytest.approx([0.05] * 3, abs=KL_ACCURACY)


def test_constant_utilities_get_uniform_weights() -> None:
    for value in (0.0, 0.1, -3e7):
        index = make_index([3, 7, 1])
        result = gibbs_weights_for_budget(torch.full((11,), value), index, 3, 0.3)
        assert torch.equal(result.weights, uniform_weights(index, 3))
        assert (result.temperature.tolist(), result.kl.tolist()) == ([0.0] * 3, [0.0] * 3)
        assert not result.saturated.any()


@pytest.mark.parametrize("num_highest", [1, 2, 3])
def test_a_budget_out_of_reach_saturates(num_highest: int) -> None:
    # m of n = 4 tokens share the maximum: the divergence stays below log(4 / m).
    utilities = torch.tensor([2.0] * num_highest + [1.0] * (4 - num_highest) + [0.0, 1.0, 2.0, 3.0])
    bound = math.log(4 / num_highest)
    for budget in (bound + 1e-5, 10.0):
        result = gibbs_weights_for_budget(utilities, make_index([4, 4]), 2, budget)
        assert result.saturated.tolist() == [True, budget == 10.0 or num_highest == 1]
        expected = [1 / num_highest] * num_highest + [0.0] * (4 - num_highest)
        assert result.weights[:4].tolist() == pytest.approx(expected, abs=1e-6)
        assert result.weights.isfinite().all()
    inside = gibbs_weights_for_budget(utilities, make_index([4, 4]), 2, bound - 1e-3)
    assert not inside.saturated.any()
    assert inside.kl.tolist() == pytest.approx([bound - 1e-3] * 2, abs=KL_ACCURACY)


@several
@given(ragged(min_length=1), st.floats(0.001, 1.0))
def test_sequences_do_not_see_each_other(drawn, budget: float) -> None:
    utilities, index, num_sequences = drawn
    together = gibbs_weights_for_budget(utilities, index, num_sequences, budget)
    for sequence in range(num_sequences):
        mine = index == sequence
        alone = gibbs_weights_for_budget(utilities[mine], torch.zeros_like(index[mine]), 1, budget)
        torch.testing.assert_close(together.weights[mine], alone.weights, rtol=0, atol=1e-12)
        assert bool(together.saturated[sequence]) == bool(alone.saturated)


@pytest.mark.parametrize("gap", [1e-9, 1e-13, 1e-15])
def test_a_budget_that_needs_to_tell_near_ties_apart_is_met(gap: float) -> None:
    """A temperature of 1e12, relative to the spread, was not always enough."""
    utilities = torch.tensor([1.0, 1.0 - gap, 0.3, 0.0], dtype=torch.float64)
    result = gibbs_weights_for_budget(utilities, torch.zeros(4, dtype=torch.long), 1, 1.2)
    assert float(result.kl[0]) == pytest.approx(1.2, abs=KL_ACCURACY) and not result.saturated[0]


def test_the_budget_is_solved_without_asking_the_device():
    """A fake tensor has no values, so a host-device synchronisation is an error."""
    with FakeTensorMode():
        result = gibbs_weights_for_budget(
            torch.randn(12), torch.arange(12) // 4, 3, 0.05, torch.full((12,), 0.25).log()
        )
    assert result.weights.shape == (12,) and result.temperature.shape == (3,)
