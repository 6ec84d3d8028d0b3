"""Measures of tokens in a byte each: 256 levels that a page knows, and the place of the nearest one."""

from typing import Any

import numpy as np


def weight_levels(weights: np.ndarray) -> np.ndarray:
    """256 relative weights, ascending: 0, then evenly spaced in their logarithm on either side of 1, the 129th."""
    positive = weights[weights > 0]
    low = max(2.0**-14, min(1 / 1.001, positive.min(initial=1.0)))
    high = max(1.001, weights.max(initial=1.0))
    return np.concatenate([[0.0], np.geomspace(low, 1.0, 128)[:-1], np.geomspace(1.0, high, 128)])


def loss_levels(losses: np.ndarray) -> np.ndarray:
    """256 losses, ascending from 0, the closer the smaller they are."""
    return max(1e-3, float(losses.max(initial=0.0))) * np.linspace(0.0, 1.0, 256) ** 2


def utility_levels(utilities: np.ndarray) -> np.ndarray:
    """256 utilities, ascending: 0 is the 129th, and they lie closer around it.

    Args:
        utilities: of supervised tokens alone: others have none, and their zeros would make the scale too fine near 0.
    """
    sizes = np.abs(utilities[utilities != 0])
    # Levels are evenly spaced in asinh(utility / unit). A unit far below the largest utility would leave few of them
    # for large ones: with 1e-4 of it, neighbours are 8% apart at most.
    unit = max(float(np.median(sizes)), 1e-4 * float(sizes.max()), 1e-30) if len(sizes) else 1e-30

    def side(most: float, number: int) -> np.ndarray:
        return unit * np.sinh(np.linspace(0.0, np.arcsinh(max(most / unit, 1e-3)), number))

    negative = -side(float(-utilities.min(initial=0.0)), 129)[:0:-1]
    return np.concatenate([negative, side(float(utilities.max(initial=0.0)), 128)])


def nearest(levels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """uint8, the place of the level that is nearest to each value."""
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, values).astype(np.uint8)


def rounded(levels: Any) -> Any:
    """For JSON: four digits, which are finer than the levels."""
    if isinstance(levels, dict):
        return {step: rounded(own) for step, own in levels.items()}
    return [float(f"{value:.4g}") for value in levels]
