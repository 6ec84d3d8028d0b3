"""Power laws of a loss in model and data size.

They are `A N^-n D^-d + E`, which fine-tuning follows (arXiv:2402.17193), and Chinchilla's
`A N^-n + B D^-d + E`, with model size N and data size D; if one of them is constant, both are `A D^-d + E`. The fit
minimises the Huber loss of the residuals of log(loss) from many starts: an optimizer that stopped early has given
intervals that were too narrow (arXiv:2404.10102).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

HUBER_DELTA = 1e-3  # larger residuals of log(loss) count linearly, as in Chinchilla's fit
NUM_STEPS = 200
NUM_RESAMPLES = 200
START_EXPONENTS = (0.05, 0.2, 0.8)
START_SHARES = (0.05, 0.5, 0.9)  # start values of E, as shares of the smallest loss

Terms = tuple[tuple[int, ...], ...]  # of each but E, the columns of its product: ((0, 1),) or ((0,), (1,))


@dataclass(frozen=True)
class Fit:
    """A power law, fitted without the largest point."""

    law: str
    names: list[str]  # names of the exponents, then E
    values: list[float]
    intervals: list[tuple[float, float]]  # 95% intervals over bootstrap resamples
    predicted: float  # predicted loss of the largest point
    predicted_interval: tuple[float, float]
    measured: float  # measured loss of the largest point, mean over its runs
    predict: Callable[[np.ndarray], np.ndarray] = field(repr=False, compare=False)  # of sizes [points, columns]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def fit_laws(sizes: Sequence[Sequence[float]], losses: Sequence[float], columns: Sequence[str]) -> list[Fit]:
    """Fit the laws to all runs except those of the largest point, and sort by the error of its prediction; empty if
    there are too few points for any law. `sizes`: for each run, a value above 0 per column; `columns`: `N` and `D`, or
    one of them; none is constant."""
    x, y = np.log(np.asarray(sizes, dtype=float)), np.log(np.asarray(losses, dtype=float))
    largest = x.sum(1) == x.sum(1).max()
    num_points = len(np.unique(x[~largest], axis=0))
    product = f"A {' '.join(f'{name}^-{name.lower()}' for name in columns)} + E"
    laws: dict[str, Terms] = {product: (tuple(range(len(columns))),)}
    if len(columns) > 1:
        laws["A N^-n + B D^-d + E"] = tuple((i,) for i in range(len(columns)))
    fits = []
    for law, terms in laws.items():
        if num_points > len(terms) + len(columns):
            center = x[~largest].mean(0)
            best, at_largest = _fit_law(terms, x - center, y, largest)
            shown = np.hstack([best[:, len(terms) : -1], np.exp(best[:, -1:]), np.exp(at_largest)])
            intervals = [(low, high) for low, high in np.quantile(shown[1:], [0.025, 0.975], axis=0).T.tolist()]
            *numbers, predicted = shown[0].tolist()
            names, measured = [*(name.lower() for name in columns), "E"], float(np.exp(y[largest]).mean())
            predict = partial(_predict_losses, terms, center, best[:1])
            fits.append(Fit(law, names, numbers, intervals[:-1], predicted, intervals[-1], measured, predict))
    return sorted(fits, key=lambda fit: abs(fit.error))


def _fit_law(terms: Terms, x: np.ndarray, y: np.ndarray, largest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The parameters of all runs but the largest, and of resamples of them; and their log(loss) at the largest."""
    features, known = _make_features(x, terms), y[~largest]
    draws = np.random.default_rng(0).integers(len(known), size=(NUM_RESAMPLES, len(known)))
    counts = np.stack([np.ones(len(known)), *(np.bincount(draw, minlength=len(known)) for draw in draws)])
    fit = _minimise(features[:, ~largest], known, counts[:1], _choose_starts(known, len(terms), x.shape[1]))
    # A resample differs little: its fits start from the best of all runs, with that E and with each start's, instead of
    # from every start again, which takes ten times as long.
    near = np.repeat(fit, 1 + len(START_SHARES), axis=0)
    near[1:, -1] = np.log(START_SHARES) + known.min()
    best = np.concatenate([fit, _minimise(features[:, ~largest], known, counts[1:], near)])
    return best, _predict(features[:, largest][:, :1], best)[0]


def _make_features(x: np.ndarray, terms: Terms) -> np.ndarray:
    """Factors of the parameters (log A of each term, the exponents, log E) in the log of each term at each point, the
    last term being E: `[terms + 1, points, parameters]`."""
    num_terms = len(terms)
    features = np.zeros((num_terms + 1, len(x), num_terms + x.shape[1] + 1))
    for number, term in enumerate(terms):
        features[number, :, number] = 1.0
        features[number][:, [num_terms + column for column in term]] = -x[:, list(term)]
    features[-1, :, -1] = 1.0
    return features


def _choose_starts(y: np.ndarray, num_terms: int, num_exponents: int) -> np.ndarray:
    """Start parameters: [starts, parameters]."""
    grid = np.array(list(itertools.product(START_SHARES, *[START_EXPONENTS] * num_exponents)))
    shares = grid[:, :1]
    factors = np.log((np.exp(y).mean() - shares * np.exp(y).min()) / num_terms)
    return np.hstack([np.repeat(factors, num_terms, axis=1), grid[:, 1:], np.log(shares) + y.min()])


def _predict(features: np.ndarray, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log(loss) at the points and its derivative: [fits, points] and [fits, points, parameters]."""
    logs = parameters @ features.transpose(0, 2, 1)
    top = logs.max(0)
    shares = np.exp(logs - top)
    total = shares.sum(0)
    derivative = (shares / total).transpose(2, 1, 0) @ features.transpose(1, 0, 2)
    return top + np.log(total), derivative.transpose(1, 0, 2)


def _minimise(features: np.ndarray, y: np.ndarray, counts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Minimise the Huber loss with Levenberg-Marquardt, reweighting iteratively, from each start for each row of counts
    `[fits, runs]`; return the best parameters of each row."""
    weights = np.repeat(counts, len(starts), axis=0)
    parameters = np.tile(starts, (len(counts), 1))
    damping = np.full((len(parameters), 1, 1), 1e-2)
    cost = _huber(_predict(features, parameters)[0] - y, weights)
    identity = np.eye(parameters.shape[1])
    for _ in range(NUM_STEPS):
        predicted, derivative = _predict(features, parameters)
        residuals = predicted - y
        weighted = weights * np.minimum(1.0, HUBER_DELTA / np.maximum(np.abs(residuals), 1e-300))
        transposed = (derivative * weighted[..., None]).transpose(0, 2, 1)
        normal, gradient = transposed @ derivative, transposed @ residuals[..., None]
        scale = np.trace(normal, axis1=1, axis2=2)[:, None, None] / len(identity) + 1e-30
        step = np.linalg.solve(normal + damping * scale * identity, gradient)[..., 0]
        tried = parameters - np.clip(step, -1.0, 1.0)
        tried_cost = _huber(_predict(features, tried)[0] - y, weights)
        better = tried_cost < cost
        parameters = np.where(better[:, None], tried, parameters)
        cost = np.where(better, tried_cost, cost)
        damping = np.clip(damping * np.where(better, 1 / 3, 4)[:, None, None], 1e-12, 1e6)
    best = cost.reshape(len(counts), len(starts)).argmin(1)
    return parameters.reshape(len(counts), len(starts), -1)[np.arange(len(counts)), best]


def _predict_losses(terms: Terms, center: np.ndarray, parameters: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.exp(_predict(_make_features(np.log(sizes) - center, terms), parameters)[0][0])


def _huber(residuals: np.ndarray, weights: np.ndarray) -> np.ndarray:
    size = np.abs(residuals)
    each = np.where(size <= HUBER_DELTA, 0.5 * size**2, HUBER_DELTA * (size - 0.5 * HUBER_DELTA))
    return (weights * each).sum(1)
