"""How often the intervals of `vcore-ds compare` cover: the tables of docs/reports/comparing-coverage.md.

    python -m tests.experiments.coverage tables
    python -m tests.experiments.coverage evaluations DIR    folders of simulated evaluations, to try the command on

Simulates evaluations whose truth is known. The log-odds of a right answer are the difficulty of the problem (normal
over problems), plus the method's strength, plus noise of the training seed that moves all problems of a checkpoint
together, plus noise of single problems: of a checkpoint, and shared by a method's checkpoints.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.helpers.evaluations import write_answers
from vcore_ds.common.statistics import (
    Interval,
    accuracy_interval,
    t_estimate,
    two_way_estimate,
)

NUM_WORLDS = 4000

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

    correct: np.ndarray
    """Number of right answers: [2, seeds, problems]."""
    accuracies: np.ndarray
    """Accuracy of each checkpoint on problems like these: [2, seeds]."""
    checkpoints: float
    """Difference of the checkpoints on problems like these, mean over seeds."""
    checkpoints_here: float
    """The same on these very problems."""
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
        yield World(
            correct=generator.binomial(setting.num_samples, probabilities),
            accuracies=accuracies,
            checkpoints=float(np.diff(accuracies.mean(1))[0]),
            checkpoints_here=float(np.diff(probabilities.mean((1, 2)))[0]),
            methods=float(np.diff(method_accuracies)[0]),
            methods_here=float(np.diff(mean_sigmoid(difficulty + by_method, one_checkpoint).mean(1))[0]),
        )


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def mean_sigmoid(logits: np.ndarray, noise: float) -> np.ndarray:
    """Mean of the sigmoid of each entry with normal noise added, by quadrature."""
    return sigmoid(logits[..., None] + noise * _NODES) @ (_WEIGHTS / _WEIGHTS.sum())


# ---- intervals -------------------------------------------------------------------------------------------------------


def estimate_over_problems(world: World, setting: Setting) -> Interval | None:
    return t_estimate(_differences(world, setting)[0]).interval


def estimate_with_averaged_seeds(world: World, setting: Setting) -> Interval | None:
    """Interval over problems after averaging seeds. `vcore-ds compare` does not offer it: its coverage is too low."""
    return t_estimate(_differences(world, setting).mean(0)).interval


def estimate_over_seeds(world: World, setting: Setting) -> Interval | None:
    return t_estimate(_differences(world, setting).mean(1)).interval


def estimate_two_way(world: World, setting: Setting) -> Interval | None:
    return two_way_estimate(_differences(world, setting)).interval


def estimate_accuracy(world: World, setting: Setting) -> Interval:
    """Interval of the accuracy of the first side's first checkpoint."""
    samples = np.arange(setting.num_samples) < world.correct[0, 0][:, None]
    return accuracy_interval(samples.astype(np.float64))


def _differences(world: World, setting: Setting) -> np.ndarray:
    """Differences of the problems' means: [seeds, problems]."""
    return (world.correct[1] - world.correct[0]) / setting.num_samples


EstimateInterval = Callable[[World, Setting], Interval | None]
ReadTruth = Callable[[World], float]


def measure_coverage(
    setting: Setting,
    pairs: Sequence[tuple[EstimateInterval, ReadTruth]],
    *,
    num_worlds: int = NUM_WORLDS,
    seed: int = 0,
) -> list[float]:
    """Share of worlds in which each interval contains its truth; a missing interval counts as not containing it."""
    covered = np.zeros(len(pairs))
    for world in draw_worlds(setting, num_worlds, seed):
        for i, (estimate, read_truth) in enumerate(pairs):
            interval = estimate(world, setting)
            covered[i] += interval is not None and interval[0] <= read_truth(world) <= interval[1]
    return (covered / num_worlds).tolist()


def checkpoints(world: World) -> float:
    return world.checkpoints


def checkpoints_here(world: World) -> float:
    return world.checkpoints_here


def methods(world: World) -> float:
    return world.methods


def methods_here(world: World) -> float:
    return world.methods_here


def accuracy(world: World) -> float:
    return float(world.accuracies[0, 0])


# ---- tables ----------------------------------------------------------------------------------------------------------


def one_run_table() -> Iterator[str]:
    yield "| problems | samples | accuracy | t | Wilson | t, of these very problems | t, of the methods |"
    yield "|---|---|---|---|---|---|---|"
    for mean in (0.0, -2.0):
        for num_problems in (674, 60):
            for num_samples in (1, 4, 16):
                setting = Setting(num_problems, num_samples, difficulty_mean=mean)
                t, wilson, here, over_methods = measure_coverage(
                    setting,
                    [
                        (estimate_over_problems, checkpoints),
                        (estimate_accuracy, accuracy),
                        (estimate_over_problems, checkpoints_here),
                        (estimate_over_problems, methods),
                    ],
                )
                names = f"{num_problems} | {num_samples} | {mean_accuracy(setting):.0%}"
                yield _row(names, [t, wilson, here, over_methods])


def seeds_table(method_noise: float) -> Iterator[str]:
    yield (
        "| problems | samples | seeds | t over pairs, of these problems | of problems like these "
        "| two-way, of problems like these | problems only |"
    )
    yield "|---|---|---|---|---|---|---|"
    for num_problems in (674, 60):
        for num_samples in (1, 4):
            for num_seeds in (3, 5):
                setting = Setting(num_problems, num_samples, num_seeds, method_noise=method_noise)
                pairs = [
                    (estimate_over_seeds, methods_here),
                    (estimate_over_seeds, methods),
                    (estimate_two_way, methods),
                    (estimate_with_averaged_seeds, methods),
                ]
                yield _row(f"{num_problems} | {num_samples} | {num_seeds}", measure_coverage(setting, pairs))


def few_differing_table() -> Iterator[str]:
    """One run each, one sample of 60 problems, with increasing difficulty."""
    yield "| accuracy | problems that differ, mean | t | Wilson |"
    yield "|---|---|---|---|"
    for mean in (0.0, -3.0, -5.0, -6.0, -7.0):
        setting = Setting(60, 1, difficulty_mean=mean)
        differing = np.mean([np.sum(world.correct[0] != world.correct[1]) for world in draw_worlds(setting, 400, 0)])
        cells = measure_coverage(setting, [(estimate_over_problems, checkpoints), (estimate_accuracy, accuracy)])
        yield _row(f"{mean_accuracy(setting):.1%} | {differing:.1f}", cells)


def mean_accuracy(setting: Setting) -> float:
    """Accuracy of the first method."""
    noises = (setting.difficulty_noise, setting.problem_noise, setting.method_noise, setting.seed_noise)
    return float(mean_sigmoid(np.array(setting.difficulty_mean), float(np.linalg.norm(noises))))


def _row(names: str, shares: list[float]) -> str:
    return f"| {names} | " + " | ".join(f"{share:.3f}" for share in shares) + " |"


def print_tables() -> None:
    for title, lines in (
        ("One run each", one_run_table()),
        ("One run each, one sample of 60 problems", few_differing_table()),
        ("Seeds", seeds_table(0.0)),
        ("Seeds, methods that suit different problems (0.5 logits)", seeds_table(0.5)),
    ):
        print(f"{title}\n")
        for line in lines:
            print(line, flush=True)
        print()


# ---- evaluations to try the command on -------------------------------------------------------------------------------

BENCHMARKS = {"aime": Setting(60, 4, 3, -0.5), "olympiad": Setting(674, 4, 3, 0.3), "math500": Setting(500, 4, 3, 2.5)}
NUM_TRUNCATED = {"sft": 20, "vcore": 3}
"""Truncated samples of each task. The numbers differ, so that the smallest task has a warning."""


def write_evaluations(folder: Path) -> None:
    """Write FOLDER/METHOD/seed_N/eval for two methods and three seeds, and print the truth."""
    worlds = {name: next(draw_worlds(setting, 1, seed=7)) for name, setting in BENCHMARKS.items()}
    for side, method in enumerate(NUM_TRUNCATED):
        for seed in range(3):
            tasks = {
                name: np.arange(BENCHMARKS[name].num_samples) < world.correct[side, seed][:, None]
                for name, world in worlds.items()
            }
            write_answers(folder / method / f"seed_{seed}" / "eval", tasks, truncated=NUM_TRUNCATED[method])
    for name, world in worlds.items():
        print(
            f"{name}: vcore minus sft, points: checkpoints of seed 0 {100 * np.diff(world.accuracies[:, 0])[0]:+.1f}, "
            f"methods {100 * world.methods:+.1f}, methods on these problems {100 * world.methods_here:+.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("tables")
    commands.add_parser("evaluations").add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "tables":
        print_tables()
    else:
        write_evaluations(arguments.folder)


if __name__ == "__main__":
    main()
