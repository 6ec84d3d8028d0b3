"""Means over seeds with their 95% confidence intervals (Student's t), and differences that are paired by seed."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

FEWEST_SEEDS = 3
"""Fewer values support no interval."""


def interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean and half-width of its 95% confidence interval; nan for fewer values than `FEWEST_SEEDS`."""
    from scipy.special import stdtrit

    table = np.asarray(values, dtype=np.float64)
    if len(table) < FEWEST_SEEDS:
        return float(table.mean()), math.nan
    half = stdtrit(len(table) - 1, 0.975) * table.std(ddof=1) / math.sqrt(len(table))
    return float(table.mean()), float(half)


def cell(values: Sequence[float], digits: int, *, difference: bool = False) -> str:
    """`mean ± half-width`; a difference has its sign, and is bold where the interval does not contain 0."""
    mean, half = interval(values)
    text = f"{mean:{'+' if difference else ''}.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")
    return f"**{text}**" if difference and abs(mean) > half else text


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    """Differences at the seeds that both have, in the order of the seeds."""
    return [values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())]
