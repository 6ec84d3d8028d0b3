"""Intervals and tests against scipy, statsmodels' numbers and numbers by hand, and how often intervals cover."""

import itertools
import math
from collections.abc import Callable
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.helpers.coverage import Setting, World, measure_coverage
from vcore_ds.common.statistics import (
    Estimate,
    Interval,
    accuracy_interval,
    cell,
    holm,
    paired,
    rank_correlation,
    sign_flip_p_value,
    t_estimate,
    two_way_estimate,
    wilson_interval,
)


def draw_answers(shape: tuple[int, ...], seed: int = 0, share: float = 0.5) -> np.ndarray:
    """Right and wrong answers."""
    return (np.random.default_rng(seed).random(shape) < share).astype(np.float64)


# ---- one run each ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [3, 60, 674])
def test_the_t_interval_and_its_p_value_are_scipys(num: int) -> None:
    side, reference = draw_answers((num, 4), 1, 0.6).mean(1), draw_answers((num, 4), 2, 0.5).mean(1)
    estimate = t_estimate(side - reference)
    expected = stats.ttest_rel(side, reference)
    assert estimate.value == pytest.approx(np.mean(side) - np.mean(reference))
    assert estimate.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert estimate.p_value == pytest.approx(expected.pvalue, rel=1e-6)


def test_values_without_spread_have_no_interval() -> None:
    # The last three are 0.1 but for rounding.
    for values in ([0.0] * 60, [0.25] * 60, [0.5, 0.25], [0.3 - 0.2, 0.4 - 0.3, 0.9 - 0.8]):
        assert t_estimate(values) == Estimate(pytest.approx(np.mean(values)), None, None)


@pytest.mark.parametrize(("better", "worse"), [(10, 3), (3, 10), (1, 0), (0, 0), (5, 5), (400, 330)])
def test_with_one_sample_the_sign_flip_is_mcnemars_exact_test(better: int, worse: int) -> None:
    counts = np.array([1] * better + [-1] * worse + [0] * 20)
    expected = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert sign_flip_p_value(counts) == pytest.approx(expected)


@pytest.mark.parametrize("counts", [[3, -1, 2, 0, 4, 1], [4, 4, 4, -4, 1], [-2, -2, -1, -3, 0, -1]])
def test_the_sign_flip_counts_all_signs(counts: list[int]) -> None:
    sums = [abs(np.dot(signs, counts)) for signs in itertools.product((-1, 1), repeat=len(counts))]
    assert sign_flip_p_value(np.array(counts)) == pytest.approx(np.mean(np.array(sums) >= abs(sum(counts))))


def test_the_sign_flip_of_many_problems_is_about_normal() -> None:
    counts = np.random.default_rng(0).integers(-16, 18, size=1000)
    expected = 2 * stats.norm.sf((abs(counts.sum()) - 0.5) / np.linalg.norm(counts))
    assert sign_flip_p_value(counts) == pytest.approx(expected, abs=0.002)


# ---- accuracies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "num"), [(0, 30), (7, 30), (30, 30), (500, 1000)])
def test_the_wilson_interval_is_scipys(right: int, num: int) -> None:
    expected = stats.binomtest(right, num).proportion_ci(method="wilson")
    assert wilson_interval(right / num, num) == pytest.approx(tuple(expected), abs=1e-12)
    assert accuracy_interval(np.array([[1.0]] * right + [[0.0]] * (num - right))) == pytest.approx(tuple(expected))


def test_more_samples_narrow_an_interval_only_as_far_as_they_differ() -> None:
    same = np.repeat(draw_answers((60, 1)), 16, axis=1)
    assert accuracy_interval(same) == pytest.approx(accuracy_interval(same[:, :1]))
    independent = draw_answers((60, 16))
    low, high = accuracy_interval(independent)
    expected = wilson_interval(independent.mean(), 60 * 16)
    assert high - low == pytest.approx(expected[1] - expected[0], rel=0.25)
    # Equal means of all problems are no proof of more trials than there were.
    assert accuracy_interval(np.array([[0.0, 1.0]] * 30)) == pytest.approx(wilson_interval(0.5, 60))
    # Where all answers are right, the samples of a problem may all be the same.
    assert accuracy_interval(np.ones((60, 16))) == pytest.approx(wilson_interval(1.0, 60))


# ---- seeds and benchmarks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "variance"),
    [
        # Means of seeds and of problems vary by 1 each, single values by 12/8. cov_cluster_2groups of statsmodels
        # 0.15.0, for a regression on a constant, says 1/2 too.
        ([[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]], 1 / 3 + 1 / 3 - 1.5 / 9),
        # These vary by 4/27, 1/27 and 5/18: the sum would be below the variance of the seeds alone.
        ([[0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]], 4 / 27 / 3),
    ],
)
def test_two_way_clustering_by_hand(table: list[list[float]], variance: float) -> None:
    estimate, mean = two_way_estimate(np.array(table)), float(np.mean(table))
    assert estimate.value == pytest.approx(mean)
    assert estimate.interval == pytest.approx(stats.t.interval(0.95, 2, mean, math.sqrt(variance)))
    assert estimate.p_value == pytest.approx(2 * stats.t.sf(mean / math.sqrt(variance), 2))


def test_holm_by_hand() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02] and holm([]) == []


def test_table_cells_have_the_mean_and_its_interval() -> None:
    assert cell([1.0, 2.0], 2) == "1.50"
    assert cell([1.0, 2.0, 3.0], 2) == "2.00 ± 2.48"
    assert cell([1.0, 1.1, 0.9], 2, difference=True) == "**+1.00 ± 0.25**"
    assert cell([1.0, -1.1, 0.9], 2, difference=True) == "+0.27 ± 2.94"
    assert paired({1: 5.0, 2: 7.0, 3: 9.0}, {3: 1.0, 1: 2.0}) == [3.0, 8.0]


# ---- rank correlation ------------------------------------------------------------------------------------------------

few_values = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=40)


@given(few_values)
def test_the_rank_correlation_is_scipys_also_with_ties(pairs: list[tuple[int, int]]) -> None:
    left, right = np.array(pairs, dtype=np.float32).T
    correlation = rank_correlation(left, right)
    if len(set(left)) == 1 or len(set(right)) == 1:
        assert correlation is None
    else:
        assert correlation == pytest.approx(stats.spearmanr(left, right).statistic, abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_rank_correlation_of_non_finite_values_is_undefined(bad: float) -> None:
    assert rank_correlation(np.array([1.0, bad, 2.0]), np.array([1.0, 2.0, 3.0])) is None
    assert rank_correlation(np.array([1.0]), np.array([1.0])) is None


# ---- coverage --------------------------------------------------------------------------------------------------------

NUM_WORLDS = 1900
"""0.02 on either side of 0.95 is then four binomial standard errors: 4 sqrt(0.95 * 0.05 / 1900)."""


INTERVALS: dict[str, Callable[[World], Interval | None]] = {
    "problems": lambda world: t_estimate(world.differences[0]).interval,
    "seeds": lambda world: t_estimate(world.differences.mean(1)).interval,
    "mean over seeds": lambda world: t_estimate(world.differences.mean(0)).interval,
    "two-way": lambda world: two_way_estimate(world.differences).interval,
    "accuracy": lambda world: accuracy_interval(world.samples),
}
checkpoints, methods, methods_here = (attrgetter(name) for name in ("checkpoints", "methods", "methods_here"))


@pytest.mark.parametrize(("num_problems", "num_samples"), [(674, 1), (60, 4)])
def test_intervals_of_one_run_each_cover_the_checkpoints(num_problems: int, num_samples: int) -> None:
    pairs = [(INTERVALS["problems"], checkpoints), (INTERVALS["accuracy"], attrgetter("accuracy"))]
    for share in measure_coverage(Setting(num_problems, num_samples), pairs, num_worlds=NUM_WORLDS):
        assert 0.93 <= share <= 0.97


@pytest.mark.parametrize(("num_problems", "num_seeds"), [(674, 3), (60, 5)])
def test_intervals_over_seeds_cover_the_methods(num_problems: int, num_seeds: int) -> None:
    setting = Setting(num_problems, 1, num_seeds)
    (share,) = measure_coverage(setting, [(INTERVALS["seeds"], methods_here)], num_worlds=NUM_WORLDS)
    assert 0.93 <= share <= 0.97


def test_intervals_that_ignore_a_source_of_spread_do_not_cover_the_methods() -> None:
    """Why problems alone are not enough, and what two-way clustering is for."""

    def measure(setting: Setting, name: str) -> float:
        return measure_coverage(setting, [(INTERVALS[name], methods)], num_worlds=400)[0]

    assert measure(Setting(674, 4), "problems") < 0.8 and measure(Setting(674, 4, 3), "mean over seeds") < 0.8
    setting = Setting(60, 4, 3, seed_noise=0.05, problem_noise=0.3, method_noise=1.0)
    assert measure(setting, "seeds") < 0.9
    assert measure(setting, "two-way") >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 400)
