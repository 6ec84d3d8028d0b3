"""Power laws of the loss in the size of the model, N, and of the data, D: fitted, with their uncertainty.

The laws are `A N^-n D^-d + E`, which fine-tuning follows (arXiv 2402.17193), and Chinchilla's `A N^-n + B D^-d + E`;
with one of N and D constant, both are `A D^-d + E`. The fit minimises Huber's loss of the residuals of log(loss) from
many starts, because an optimizer that ended early has given intervals that were too narrow (2404.10102).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

HUBER_DELTA = 1e-3
"""Residuals of log(loss) beyond it count linearly, as in Chinchilla's fit."""
NUM_STEPS = 200
NUM_RESAMPLES = 200
START_EXPONENTS = (0.05, 0.2, 0.8)
START_SHARES = (0.05, 0.5, 0.9)
"""Shares of the smallest loss from which E starts."""

Terms = tuple[tuple[int, ...], ...]
"""For each term beside E, the columns of its product: ((0, 1),) or ((0,), (1,)), in the order of the columns."""


@dataclass(frozen=True)
class Fit:
    """A law, fitted without the largest point."""

    law: str
    names: list[str]
    """Exponents by name, then E."""
    values: list[float]
    intervals: list[tuple[float, float]]
    """95% of the resamples lie within."""
    predicted: float
    """Loss of the largest point."""
    predicted_interval: tuple[float, float]
    measured: float
    """Its loss, mean over its runs."""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def fit_laws(sizes: Sequence[Sequence[float]], losses: Sequence[float], columns: Sequence[str]) -> list[Fit]:
    """Fits the laws to all runs but those of the largest point, best prediction of that point first.

    Args:
        sizes: for each run, a value of each column, above 0.
        losses: of each run, above 0.
        columns: names, `N` and `D` or one of them, none of which is the same in all runs.

    Returns nothing where the other points are fewer than the parameters of every law.
    """
    table, values = np.log(np.asarray(sizes, dtype=float)), np.log(np.asarray(losses, dtype=float))
    largest = table.sum(1) == table.sum(1).max()
    points = np.unique(table[~largest], axis=0)
    product = f"A {' '.join(f'{name}^-{name.lower()}' for name in columns)} + E"
    laws: dict[str, Terms] = {product: (tuple(range(len(columns))),)}
    if len(columns) > 1:
        laws["A N^-n + B D^-d + E"] = tuple((i,) for i in range(len(columns)))
    fits = []
    for law, terms in laws.items():
        if len(points) > len(terms) + len(columns):
            fits.append(_fit_law(law, terms, columns, table, values, largest))
    return sorted(fits, key=lambda fit: abs(fit.error))


def _fit_law(
    law: str, terms: Terms, columns: Sequence[str], table: np.ndarray, values: np.ndarray, largest: np.ndarray
) -> Fit:
    center = table[~largest].mean(0)
    x, y = table[~largest] - center, values[~largest]
    generator = np.random.default_rng(0)
    draws = generator.integers(len(y), size=(NUM_RESAMPLES, len(y)))
    counts = np.stack([np.ones(len(y)), *(np.bincount(draw, minlength=len(y)) for draw in draws)])
    best = _minimise(x, y, terms, counts, _starts(x, y, terms))
    at_largest = np.exp(_predict(table[largest][:1] - center, terms, best)[0][:, 0])
    places = _exponent_places(terms)
    found = np.concatenate([best[:, places], np.exp(best[:, -1:])], axis=1)
    low, high = np.quantile(found[1:], [0.025, 0.975], axis=0)
    return Fit(
        law,
        [*(name.lower() for name in columns), "E"],
        found[0].tolist(),
        list(zip(low.tolist(), high.tolist(), strict=True)),
        float(at_largest[0]),
        (float(np.quantile(at_largest[1:], 0.025)), float(np.quantile(at_largest[1:], 0.975))),
        float(np.exp(values[largest]).mean()),
    )


def _exponent_places(terms: Terms) -> list[int]:
    """Where exponents are among the parameters, which are log A and the exponents of each term, then log E."""
    places: list[int] = []
    at = 0
    for term in terms:
        places += range(at + 1, at + 1 + len(term))
        at += 1 + len(term)
    return places


def _starts(x: np.ndarray, y: np.ndarray, terms: Terms) -> np.ndarray:
    """Parameters to start from: [starts, parameters]."""
    num_exponents = sum(map(len, terms))
    starts = []
    for share, *exponents in itertools.product(START_SHARES, *[START_EXPONENTS] * num_exponents):
        start = np.empty(len(terms) + num_exponents + 1)
        start[:] = np.log((np.exp(y).mean() - share * np.exp(y).min()) / len(terms))
        start[_exponent_places(terms)] = exponents
        start[-1] = np.log(share) + y.min()
        starts.append(start)
    return np.array(starts)


def _predict(x: np.ndarray, terms: Terms, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log(loss) at the points and its derivative: [fits, points] and [fits, points, parameters]."""
    logs, features, at = [], [], 0
    num_points = len(x)
    for term in terms:
        own = np.concatenate([np.ones((num_points, 1)), -x[:, list(term)]], axis=1)
        logs.append(parameters[:, at : at + own.shape[1]] @ own.T)
        features.append(own)
        at += own.shape[1]
    logs.append(np.repeat(parameters[:, -1:], num_points, axis=1))
    features.append(np.ones((num_points, 1)))
    stacked = np.stack(logs)
    top = stacked.max(0)
    shares = np.exp(stacked - top)
    total = shares.sum(0)
    derivative = [share[..., None] * own for share, own in zip(shares / total, features, strict=True)]
    return top + np.log(total), np.concatenate(derivative, axis=2)


def _minimise(x: np.ndarray, y: np.ndarray, terms: Terms, counts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Levenberg and Marquardt from every start for every row of counts [fits, runs]; the best parameters of each row.

    Huber's loss is minimised by reweighting: what exceeds `HUBER_DELTA` weighs in proportion to the inverse of its
    size.
    """
    weights = np.repeat(counts, len(starts), axis=0)
    parameters = np.tile(starts, (len(counts), 1))
    damping = np.full(len(parameters), 1e-2)
    cost = _huber(_predict(x, terms, parameters)[0] - y, weights)
    identity = np.eye(parameters.shape[1])
    for _ in range(NUM_STEPS):
        predicted, derivative = _predict(x, terms, parameters)
        residuals = predicted - y
        own = weights * np.minimum(1.0, HUBER_DELTA / np.maximum(np.abs(residuals), 1e-300))
        weighted = derivative * own[..., None]
        normal = np.einsum("bnp,bnq->bpq", weighted, derivative)
        scale = np.trace(normal, axis1=1, axis2=2)[:, None, None] / len(identity) + 1e-30
        step = np.linalg.solve(
            normal + damping[:, None, None] * scale * identity, np.einsum("bnp,bn->bp", weighted, residuals)[..., None]
        )[..., 0]
        tried = parameters - np.clip(step, -1.0, 1.0)
        tried_cost = _huber(_predict(x, terms, tried)[0] - y, weights)
        better = tried_cost < cost
        parameters = np.where(better[:, None], tried, parameters)
        cost = np.where(better, tried_cost, cost)
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-12, 1e6)
    best = cost.reshape(len(counts), len(starts)).argmin(1)
    return parameters.reshape(len(counts), len(starts), -1)[np.arange(len(counts)), best]


def _huber(residuals: np.ndarray, weights: np.ndarray) -> np.ndarray:
    size = np.abs(residuals)
    each = np.where(size <= HUBER_DELTA, 0.5 * size**2, HUBER_DELTA * (size - 0.5 * HUBER_DELTA))
    return (weights * each).sum(1)
