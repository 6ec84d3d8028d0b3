"""Evaluations whose truth is known, to measure how often the intervals of `vcore-ds compare` cover it.

The log-odds of a right answer are the difficulty of the problem (normal over problems), plus the method's strength,
plus noise of the training seed that moves all problems of a checkpoint together, plus noise of single problems: of a
checkpoint, and shared by a method's checkpoints.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vcore_ds.common.statistics import Interval

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(24)


@dataclass(frozen=True)
class Setting:
    """A benchmark and two methods. All noise is a standard deviation in logits."""

    num_problems: int
    num_samples: int
    num_seeds: int = 1
    difficulty_mean: float = 0.0
    difficulty_noise: float = 2.0
    strength: float = 0.2
    """Strength of the second method; that of the first is 0."""
    seed_noise: float = 0.15
    problem_noise: float = 1.0
    """Noise of a checkpoint on a problem."""
    method_noise: float = 0.0
    """Noise of a method on a problem."""


@dataclass(frozen=True)
class World:
    """Drawn answers, and the true difference in each sense: second side minus first."""

    samples: np.ndarray
    """Whether each answer of the first side's first checkpoint is right: [problems, samples]."""
    differences: np.ndarray
    """Differences of the problems' means: [seeds, problems]."""
    accuracy: float
    """Accuracy of that checkpoint on problems like these."""
    checkpoints: float
    """Difference of the checkpoints on problems like these, mean over seeds."""
    methods: float
    """Difference of the methods, that is of checkpoints with any seed, on problems like these."""
    methods_here: float
    """The same on these very problems."""


def draw_worlds(setting: Setting, num_worlds: int, seed: int) -> Iterator[World]:
    """Evaluations of new problems by new checkpoints in each world."""
    generator = np.random.default_rng(seed)
    strengths = np.array([0.0, setting.strength])
    one_checkpoint = np.hypot(setting.seed_noise, setting.problem_noise)
    problem_noise = np.hypot(setting.difficulty_noise, np.hypot(setting.problem_noise, setting.method_noise))
    method_accuracies = mean_sigmoid(setting.difficulty_mean + strengths, np.hypot(problem_noise, setting.seed_noise))
    for _ in range(num_worlds):
        shape = (2, setting.num_seeds, setting.num_problems)
        difficulty = generator.normal(setting.difficulty_mean, setting.difficulty_noise, setting.num_problems)
        by_method = strengths[:, None] + generator.normal(0, setting.method_noise, (2, setting.num_problems))
        by_checkpoint = strengths[:, None] + generator.normal(0, setting.seed_noise, shape[:2])
        logits = difficulty + by_method[:, None] + (by_checkpoint - strengths[:, None])[..., None]
        probabilities = sigmoid(logits + generator.normal(0, setting.problem_noise, shape))
        accuracies = mean_sigmoid(setting.difficulty_mean + by_checkpoint, problem_noise)
        correct = generator.binomial(setting.num_samples, probabilities)
        yield World(
            samples=(np.arange(setting.num_samples) < correct[0, 0][:, None]).astype(np.float64),
            differences=(correct[1] - correct[0]) / setting.num_samples,
            accuracy=float(accuracies[0, 0]),
            checkpoints=float(np.diff(accuracies.mean(1))[0]),
            methods=float(np.diff(method_accuracies)[0]),
            methods_here=float(np.diff(mean_sigmoid(difficulty + by_method, one_checkpoint).mean(1))[0]),
        )


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def mean_sigmoid(logits: np.ndarray, noise: float) -> np.ndarray:
    """Mean of the sigmoid of each entry with normal noise added, by quadrature."""
    return sigmoid(logits[..., None] + noise * _NODES) @ (_WEIGHTS / _WEIGHTS.sum())


def measure_coverage(
    setting: Setting,
    pairs: Sequence[tuple[Callable[[World], Interval | None], Callable[[World], float]]],
    *,
    num_worlds: int,
    seed: int = 0,
) -> list[float]:
    """Share of worlds in which each interval contains its truth; a missing interval counts as not containing it."""
    covered = np.zeros(len(pairs))
    for world in draw_worlds(setting, num_worlds, seed):
        for i, (estimate, read_truth) in enumerate(pairs):
            interval = estimate(world)
            covered[i] += interval is not None and interval[0] <= read_truth(world) <= interval[1]
    return (covered / num_worlds).tolist()
