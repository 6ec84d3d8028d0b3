"""Means over seeds with 95% intervals (Student's t), differences paired by seed, and Spearman's rank correlation."""

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

FEWEST_SEEDS = 3
"""Least number of values for a confidence interval."""


def interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean and half-width of its 95% confidence interval; NaN for fewer values than `FEWEST_SEEDS`."""
    table = np.asarray(values, dtype=np.float64)
    if len(table) < FEWEST_SEEDS:
        return float(table.mean()), math.nan
    half = student_t_quantile(0.975, len(table) - 1) * table.std(ddof=1) / math.sqrt(len(table))
    return float(table.mean()), float(half)


def cell(values: Sequence[float], digits: int, *, difference: bool = False) -> str:
    """Table cell `mean ± half-width`; a difference has a sign, and is bold if the interval does not contain 0."""
    mean, half = interval(values)
    text = f"{mean:{'+' if difference else ''}.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")
    return f"**{text}**" if difference and abs(mean) > half else text


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    """Differences at the common seeds, in order of the seeds."""
    return [values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())]


def rank_correlation(left: np.ndarray, right: np.ndarray) -> float | None:
    """Spearman's rank correlation, with mean ranks for ties; None for fewer than two values, or if a side is constant
    or not finite."""
    table = np.stack([left, right]).astype(np.float64)
    if table.shape[1] < 2 or not np.isfinite(table).all() or (np.ptp(table, axis=1) == 0).any():
        return None
    return float(np.corrcoef(_ranks(table[0]), _ranks(table[1]))[0, 1])


def rank_correlations_within(left: np.ndarray, right: np.ndarray, sequence_index: np.ndarray) -> list[float | None]:
    """`rank_correlation` of the tokens of each sequence; arrays `[N]`, sequences numbered from 0."""
    sequences = range(int(sequence_index.max(initial=-1)) + 1)
    return [rank_correlation(left[sequence_index == i], right[sequence_index == i]) for i in sequences]


def _ranks(values: np.ndarray) -> np.ndarray:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)  # groups in ascending order
    return (np.cumsum(counts) - (counts - 1) / 2)[group]


@functools.cache
def student_t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution for a probability in [0.5, 1), by bisection."""
    low, high = 0.0, 1.0
    while student_t_probability(high, degrees) < probability:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if student_t_probability(middle, degrees) < probability else (low, middle)
    return high


def student_t_probability(t: float, degrees: int) -> float:
    """Student's t distribution function at t >= 0, for integer degrees (Abramowitz and Stegun, 26.7.3, 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    is_odd = degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for k in range(1 + is_odd, degrees, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    both_sides = (angle + math.sin(angle) * total) * 2 / math.pi if is_odd else math.sin(angle) * total
    return 0.5 + both_sides / 2
