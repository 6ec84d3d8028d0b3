"""How many problems, samples and seeds it takes to detect a difference, as pure functions.

A difference is detected where Student's t says p < 0.05, two-sided. The spread is that of the evaluations at hand.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from scipy.special import nctdtr, nctdtrinc, stdtrit

POWER = 0.8
"""Share of comparisons that are to detect the difference."""
FEWEST = 3
"""Problems, or seeds, below which there are no intervals."""


@dataclass(frozen=True)
class Spread:
    """Variance of a difference of accuracies, by where it comes from."""

    between: float
    """What more samples do not remove: problems that suit one side more than the other; of seeds, the seeds."""
    within: float | None
    """What is divided by the number of samples; None where one sample a problem does not tell it from the former, and
    the whole variance is `between`."""

    def variance(self, num_samples: int) -> float:
        """With that many samples a problem."""
        return self.between + (self.within or 0.0) / num_samples


def spread_of_problems(side: np.ndarray, reference: np.ndarray) -> Spread:
    """Variance of a problem's difference, from right answers [problems, samples] of both sides."""
    total = _variance(side.mean(1) - reference.mean(1))
    within = _within(side, reference)
    num_samples = side.shape[1]
    return Spread(total, None) if within is None else Spread(max(0.0, total - within / num_samples), within)


def spread_of_seeds(side: np.ndarray, reference: np.ndarray) -> Spread:
    """Variance of a seed's difference over these problems, from right answers [seeds, problems, samples]."""
    total = _variance(side.mean((1, 2)) - reference.mean((1, 2)))
    within = _within(side, reference)
    _, num_problems, num_samples = side.shape
    if within is None:
        return Spread(total, None)
    return Spread(max(0.0, total - within / (num_problems * num_samples)), within / num_problems)


def _variance(values: np.ndarray) -> float:
    """0 of a single value, which shows no spread."""
    return float(values.var(ddof=1)) if len(values) > 1 else 0.0


def _within(side: np.ndarray, reference: np.ndarray) -> float | None:
    """Variance of a difference of two single samples of the same problem, mean over problems."""
    if side.shape[-1] < 2:
        return None
    return float(side.var(-1, ddof=1).mean() + reference.var(-1, ddof=1).mean())


def power(ratio: float, num: int) -> float:
    """Probability that `num` values detect a mean that is `ratio` standard deviations away from 0."""
    degrees, shift = num - 1, ratio * math.sqrt(num)
    quantile = stdtrit(degrees, 0.975)
    return float(1 - nctdtr(degrees, shift, quantile) + nctdtr(degrees, shift, -quantile))


def number_needed(difference: float, variance: float) -> int:
    """Fewest values with which `POWER` of all comparisons detect a mean of `difference`; `FEWEST` at least."""
    if variance == 0:
        return FEWEST
    ratio = difference / math.sqrt(variance)
    # With a known standard deviation 7.85 / ratio^2 values suffice, and Student's t takes a few more.
    candidates = range(FEWEST, FEWEST + 10 + math.ceil(8 / ratio**2))
    return candidates[bisect_left(candidates, POWER, key=lambda num: power(ratio, num))]


def detectable_difference(variance: float, num: int) -> float:
    """The difference that `POWER` of all comparisons of `num` values detect, without those that find the wrong sign."""
    shift = nctdtrinc(num - 1, 1 - POWER, stdtrit(num - 1, 0.975))
    return float(shift) * math.sqrt(variance / num)
