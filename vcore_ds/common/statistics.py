"""Means, paired differences and accuracies with 95% intervals, exact tests, and Spearman's rank correlation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

FEWEST_SEEDS = 3  # least number of values for a confidence interval


def cell(values: Sequence[float], digits: int, *, difference: bool = False) -> str:
    """Table cell `mean ± half of its 95% interval`; a difference has a sign, and is bold if the interval excludes 0."""
    estimate = t_estimate(values)
    text = f"{estimate.value:{'+' if difference else ''}.{digits}f}"
    if len(values) < FEWEST_SEEDS:
        return text
    low, high = estimate.interval or (estimate.value, estimate.value)  # none without spread
    text += f" ± {(high - low) / 2:.{digits}f}"
    return f"**{text}**" if difference and low * high > 0 else text


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    """Differences at the common seeds, in order of the seeds."""
    return [values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())]


def rank_correlation(left: np.ndarray, right: np.ndarray) -> float | None:
    """Spearman's rank correlation, with mean ranks for ties; None for fewer than two values, or if a side is constant
    or not finite."""
    from scipy.stats import rankdata  # here, as it takes a quarter of a second

    table = np.stack([left, right])
    if table.shape[1] < 2 or not np.isfinite(table).all() or (np.ptp(table, axis=1) == 0).any():
        return None
    return float(np.corrcoef(rankdata(table, axis=1))[0, 1])


def rank_correlations_within(left: np.ndarray, right: np.ndarray, sequence_index: np.ndarray) -> list[float | None]:
    """`rank_correlation` of the tokens of each sequence; arrays `[N]`, sequences numbered from 0."""
    sequences = range(int(sequence_index.max(initial=-1)) + 1)
    return [rank_correlation(left[sequence_index == i], right[sequence_index == i]) for i in sequences]


NO_SPREAD = 1e-9  # values closer than this are equal up to rounding
Z = NormalDist().inv_cdf(0.975)

Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A mean, its 95% interval and the two-sided p-value against 0; None for too few or equal values."""

    value: float
    interval: Interval | None
    p_value: float | None


@dataclass
class Difference:
    """A side minus the reference on a task. None: too few or equal values, or not asked of such evaluations."""

    value: float
    interval: Interval | None
    """Student's t, over problems for one evaluation per side, else over pairs of seeds."""
    p_value: float | None
    holm_p_value: float | None  # adjusted for all differences of a comparison
    num_better: int  # problems on which the side has more right answers, over all seeds
    num_worse: int
    sign_flip_p_value: float | None  # for one evaluation per side; McNemar's with one sample per problem
    by_seed: list[float]
    two_way: Estimate | None  # for several seeds: clustered by seed and problem


def paired_difference(correct: np.ndarray, expected: np.ndarray) -> Difference:
    """Compare right answers `[seeds, problems, samples]`, paired by seed and problem."""
    table = correct.mean(2) - expected.mean(2)
    counts = correct.sum((0, 2), dtype=int) - expected.sum((0, 2), dtype=int)
    is_single = len(table) == 1
    estimate = t_estimate(table[0] if is_single else table.mean(1))
    return Difference(
        estimate.value,
        estimate.interval,
        estimate.p_value,
        holm_p_value=None,
        num_better=int((counts > 0).sum()),
        num_worse=int((counts < 0).sum()),
        sign_flip_p_value=sign_flip_p_value(counts) if is_single else None,
        by_seed=table.mean(1).tolist(),
        two_way=None if is_single else two_way_estimate(table),
    )


def t_estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """Student's t interval of the mean of independent values: differences between pairs of seeds, or of problems' means
    over samples, which are standard errors clustered by problem (Miller, arXiv 2411.00640)."""
    table = np.asarray(values, dtype=np.float64)
    if len(table) < FEWEST_SEEDS or np.ptp(table) < NO_SPREAD:
        return Estimate(float(table.mean()), None, None)
    return _estimate(float(table.mean()), table.var(ddof=1) / len(table), len(table) - 1)


def two_way_estimate(table: np.ndarray) -> Estimate:
    """The mean of differences `[seeds, problems]`, clustered by both (Cameron, Gelbach and Miller, 2011): the variance
    by seed plus that by problem minus that of single values, and at least each of the first two."""
    mean = float(table.mean())
    if min(table.shape) < FEWEST_SEEDS:
        return Estimate(mean, None, None)
    by_seed, by_problem, single = (
        float(values.var(ddof=1) / len(values)) for values in (table.mean(1), table.mean(0), table.ravel())
    )
    variance = max(by_seed + by_problem - single, by_seed, by_problem)
    return Estimate(mean, None, None) if variance < NO_SPREAD**2 else _estimate(mean, variance, len(table) - 1)


def _estimate(mean: float, variance: float, degrees: int) -> Estimate:
    from scipy.stats import t

    error = math.sqrt(variance)
    low, high = t.interval(0.95, degrees, mean, error)
    return Estimate(mean, (float(low), float(high)), 2 * float(t.sf(abs(mean) / error, degrees)))


def sign_flip_p_value(counts: np.ndarray) -> float:
    """Exact two-sided p-value of the sign-flip test; with one sample per problem McNemar's exact test. `counts`: per
    problem, right answers of one side minus those of the other."""
    sizes, repeats = np.unique(np.abs(counts[counts != 0]), return_counts=True)
    # Distribution of the sum over all signs: `repeat` problems that differ by `size` add a scaled binomial.
    total, probabilities = 0, np.ones(1)
    for size, repeat in zip(sizes.tolist(), repeats.tolist(), strict=True):
        steps = np.zeros(2 * size * repeat + 1)
        steps[:: 2 * size] = [math.comb(repeat, k) / 2**repeat for k in range(repeat + 1)]
        probabilities = np.convolve(probabilities, steps)
        total += size * repeat
    sums = np.arange(-total, total + 1)
    return min(1.0, float(probabilities[np.abs(sums) >= abs(int(counts.sum()))].sum()))


def accuracy_interval(correct: np.ndarray) -> Interval:
    """Wilson's interval (95%) of an accuracy, from `[problems, samples]`. Samples of a problem are correlated, so the
    number of trials is the effective one, which gives the variance of the problems' means (Korn and Graubard, 1998)."""
    num_problems, num_samples = correct.shape
    share, variance = float(correct.mean()), float(correct.mean(1).var() / num_problems)
    if share in (0.0, 1.0):
        return wilson_interval(share, num_problems)
    most = num_problems * num_samples
    return wilson_interval(share, min(most, share * (1 - share) / variance) if variance > 0 else most)


def wilson_interval(share: float, num: float) -> Interval:
    """Wilson's score interval (95%) of a share of `num` independent trials, which may be a fraction."""
    center = (share + Z**2 / (2 * num)) / (1 + Z**2 / num)
    half = Z / (1 + Z**2 / num) * math.sqrt(share * (1 - share) / num + Z**2 / (4 * num**2))
    return max(0.0, center - half), min(1.0, center + half)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number, whatever their dependence (Holm, 1979)."""
    order = np.argsort(p_values, kind="stable")
    scaled = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return adjusted.tolist()
