"""How many problems, samples and seeds it takes to detect a difference, as pure functions.

A difference is detected where Student's t says p < 0.05, two-sided. The spread is that of the evaluations at hand.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from vcore_ds.commands.compare.statistics import Z
from vcore_ds.results.seed_statistics import student_t_quantile

POWER = 0.8
"""Share of comparisons that are to detect the difference."""
FEWEST = 3
"""Problems, or seeds, below which there are no intervals."""
SMALL = 200
"""Numbers up to which power is computed exactly; beyond, Guenther's formula is right to less than 1."""
_Z_POWER = NormalDist().inv_cdf(POWER)


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
    """Probability that `num` values detect a mean that is `ratio` standard deviations away from 0.

    The standard deviation is estimated from the values too, so the normal probability at each possible estimate is
    averaged over its distribution (the noncentral t distribution by quadrature).
    """
    degrees = num - 1
    quantile = student_t_quantile(0.975, degrees)
    width = 8 / math.sqrt(2 * degrees)
    estimates = np.linspace(max(1e-6, 1 - width), 1 + width, 801)  # in units of the true standard deviation
    logs = (degrees - 1) * np.log(estimates) - degrees * estimates**2 / 2
    weights = np.exp(logs - logs.max())
    shift = ratio * math.sqrt(num)
    detected = [_normal(shift - quantile * one) + _normal(-shift - quantile * one) for one in estimates.tolist()]
    return float(np.dot(weights, detected) / weights.sum())


def number_needed(difference: float, variance: float) -> int:
    """Fewest values with which `POWER` of all comparisons detect a mean of `difference`; `FEWEST` at least."""
    if variance == 0:
        return FEWEST
    ratio = difference / math.sqrt(variance)
    guess = math.ceil(((Z + _Z_POWER) / ratio) ** 2 + Z**2 / 2)
    if guess > SMALL:
        return guess
    num = FEWEST
    while power(ratio, num) < POWER:
        num += 1
    return num


def detectable_difference(variance: float, num: int) -> float:
    """The difference that `POWER` of all comparisons of `num` values detect."""
    low, high = 0.0, 1.0
    while power(high, num) < POWER:
        high *= 2
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, num) < POWER else (low, middle)
    return high * math.sqrt(variance)


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
