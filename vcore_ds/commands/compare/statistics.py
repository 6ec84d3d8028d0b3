"""Intervals and tests for accuracies on problems, and for their differences, as pure functions of arrays.

What each of them answers, and how often its intervals cover: docs/comparing.md. The last axes are always problems and
then samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from vcore_ds.results.seed_statistics import interval, student_t_probability, student_t_quantile

NUM_RESAMPLES = 10_000
BOOTSTRAP_SEED = 0
"""Fixed, so that the same evaluations give the same interval."""
Z = NormalDist().inv_cdf(0.975)

NO_SPREAD = 1e-9
"""Values that differ by less are equal: means of the same shares are rounded differently."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A mean."""

    value: float
    interval: Interval | None
    """95%; None where the values have no spread or are too few to tell it."""
    p_value: float | None
    """Two-sided, of a mean of 0; None where there is no interval."""


def t_estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """Student's t for the mean of independent values: differences of problems, or of pairs of seeds.

    Samples of a problem enter as their mean, so that what they share is not counted as evidence: with problems as
    clusters this is the clustered standard error (Miller, arXiv 2411.00640).
    """
    table = np.asarray(values, dtype=np.float64)
    mean, half = interval(table)
    if math.isnan(half) or np.ptp(table) < NO_SPREAD:
        return Estimate(mean, None, None)
    return _estimate(mean, half / student_t_quantile(0.975, len(table) - 1), len(table) - 1)


def two_way_estimate(table: np.ndarray) -> Estimate:
    """The mean of differences [seeds, problems], both of which are samples of larger populations.

    Variance clustered by both (Cameron, Gelbach and Miller, 2011): of the means of seeds, plus that of the means of
    problems, minus that of single values, and no less than either of the first two; Student's t with one degree of
    freedom less than there are seeds.
    """
    num_seeds, num_problems = table.shape
    mean = float(table.mean())
    if num_seeds < 3 or num_problems < 3:
        return Estimate(mean, None, None)
    variances = [float(means.var(ddof=1) / len(means)) for means in (table.mean(1), table.mean(0), table.reshape(-1))]
    of_seeds, of_problems, of_values = variances
    variance = max(of_seeds + of_problems - of_values, of_seeds, of_problems)
    if variance < NO_SPREAD**2:
        return Estimate(mean, None, None)
    return _estimate(mean, math.sqrt(variance), num_seeds - 1)


def _estimate(mean: float, standard_error: float, degrees: int) -> Estimate:
    half = student_t_quantile(0.975, degrees) * standard_error
    p_value = 2 * (1 - student_t_probability(abs(mean) / standard_error, degrees))
    return Estimate(mean, (mean - half, mean + half), min(1.0, max(0.0, p_value)))


def bootstrap_interval(differences: np.ndarray) -> Interval:
    """Percentile interval of the mean over resampled problems, 95%.

    Equal differences are interchangeable, so that how often each value is drawn is all that a resample needs.
    """
    values, counts = np.unique(differences, return_counts=True)
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    draws = generator.multinomial(len(differences), counts / len(differences), size=NUM_RESAMPLES)
    low, high = np.quantile(draws @ values / len(differences), [0.025, 0.975])
    return float(low), float(high)


def sign_flip_p_value(counts: np.ndarray) -> float:
    """Exact two-sided p-value of the hypothesis that each problem's difference might as well have the other sign.

    With one sample a problem this is McNemar's exact test.

    Args:
        counts: right answers of one side minus those of the other, a whole number for each problem.
    """
    sizes, repeats = np.unique(np.abs(counts[counts != 0]), return_counts=True)
    observed = abs(int(counts.sum()))
    # The distribution of the sum over all choices of signs: sums of the problems with the same size are size times a
    # binomial number of steps of 2.
    total, probabilities = 0, np.ones(1)
    for size, repeat in zip(sizes.tolist(), repeats.tolist(), strict=True):
        steps = np.zeros(2 * size * repeat + 1)
        steps[:: 2 * size] = [math.comb(repeat, k) / 2**repeat for k in range(repeat + 1)]
        probabilities = np.convolve(probabilities, steps)
        total += size * repeat
    sums = np.arange(-total, total + 1)
    return min(1.0, float(probabilities[np.abs(sums) >= observed].sum()))


def wilson_interval(share: float, num: float) -> Interval:
    """Wilson's score interval of a share of `num` independent trials, which need not be a whole number; 95%."""
    center = (share + Z**2 / (2 * num)) / (1 + Z**2 / num)
    half = Z / (1 + Z**2 / num) * math.sqrt(share * (1 - share) / num + Z**2 / (4 * num**2))
    return max(0.0, center - half), min(1.0, center + half)


def accuracy_interval(correct: np.ndarray) -> Interval:
    """Wilson's interval of an accuracy, from [problems, samples].

    Samples of a problem resemble each other, so there are fewer trials than samples: as many as would have the variance
    that the problems' means show (Korn and Graubard, 1998). With one sample a problem that is the number of problems.
    """
    num_problems, num_samples = correct.shape
    share = float(correct.mean())
    variance = float(correct.mean(1).var() / num_problems)
    if share in (0.0, 1.0):
        return wilson_interval(share, num_problems)
    largest = num_problems * num_samples
    return wilson_interval(share, min(largest, share * (1 - share) / variance) if variance > 0 else largest)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number (Holm, 1979), whatever their dependence: calling those below 0.05 differences
    is wrong about one or more of them in 5% of all tables at most."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted
