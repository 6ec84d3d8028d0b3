"""What a comparison says: accuracies, differences from the reference with their intervals, and warnings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vcore_ds.commands.compare.power import (
    POWER,
    Spread,
    detectable_difference,
    number_needed,
    spread_of_problems,
    spread_of_seeds,
)
from vcore_ds.commands.compare.read import Side
from vcore_ds.commands.compare.statistics import (
    NO_SPREAD,
    Estimate,
    Interval,
    accuracy_interval,
    bootstrap_interval,
    holm,
    sign_flip_p_value,
    t_estimate,
    two_way_estimate,
)

NUM_SAMPLES = (1, 4, 16, 64)
"""Samples a problem for which --power gives numbers."""
FEWEST_DIFFERING = 5
"""Problems on which two evaluations differ, below which the t interval of one run each covers less often than it says
(simulated: docs/comparing.md)."""
LARGE_TRUNCATED_SHARE = 0.05
DIFFERING_TRUNCATED_SHARE = 0.02
"""Truncated shares, and differences of them, from which on there is a warning."""


@dataclass(frozen=True)
class Accuracy:
    """A side on a task; shares from 0 to 1, means over the seeds."""

    task: str
    side: str
    num_seeds: int
    num_problems: int
    num_samples_per_problem: int
    accuracy: float
    interval: Interval | None
    """Wilson's of one evaluation, Student's t over seeds of several."""
    by_seed: list[float]
    truncated_share: float
    unanswered_share: float
    mean_tokens: float


@dataclass(frozen=True)
class SampleSizes:
    """What it would take to detect a difference, as far as these evaluations tell."""

    difference: float
    power: float
    unit: str
    """`problems` for one run each, `seeds` for several."""
    needed: dict[int, int | None]
    """Number of units by samples a problem; None where one sample a problem does not tell."""
    detectable: float | None
    """The difference that evaluations like these detect; None where they show no spread."""


@dataclass(frozen=True)
class Difference:
    """A side minus the reference on a task."""

    task: str
    side: str
    reference: str
    difference: float
    interval: Interval | None
    p_value: float | None
    holm_p_value: float | None
    """Over all differences of the table."""
    num_better: int
    """Problems on which the side has more right answers, over all seeds."""
    num_worse: int
    bootstrap_interval: Interval | None
    """Over problems; of one run each."""
    sign_flip_p_value: float | None
    """McNemar's where there is one sample a problem; of one run each."""
    by_seed: list[float]
    two_way: Estimate | None
    """Over seeds and problems; where it was asked for."""
    sample_sizes: SampleSizes | None


@dataclass(frozen=True)
class Comparison:
    """All that `compare` prints: accuracies of each side, and differences from the first."""

    sides: list[Side]
    accuracies: list[Accuracy]
    differences: list[Difference]
    warnings: list[str]

    @property
    def has_seeds(self) -> bool:
        return len(self.sides[0].folders) > 1


def compare(sides: Sequence[Side], *, two_way: bool = False, power_difference: float | None = None) -> Comparison:
    """Compares each side with the first.

    Args:
        two_way: also the interval over seeds and problems; for sides with several seeds.
        power_difference: of accuracies, from 0 to 1; None for no sample sizes.
    """
    tasks = list(sides[0].correct)
    reference, *others = sides
    differences = [_difference(task, side, reference, two_way, power_difference) for task in tasks for side in others]
    tested = [i for i, one in enumerate(differences) if one.p_value is not None]
    adjusted = holm([differences[i].p_value or 0.0 for i in tested])
    for i, p_value in zip(tested, adjusted, strict=True):
        differences[i] = replace(differences[i], holm_p_value=p_value)
    accuracies = [_accuracy(task, side) for task in tasks for side in sides]
    warnings = [
        *_warnings_on_lengths(accuracies, len(sides)),
        *_warnings_on_intervals(sides, differences),
        *_warnings_on_models(sides),
        *_warnings_on_versions(sides),
    ]
    return Comparison(list(sides), accuracies, differences, warnings)


def _accuracy(task: str, side: Side) -> Accuracy:
    correct, results = side.correct[task], side.results[task]
    by_seed = correct.mean((1, 2)).tolist()
    num_seeds, num_problems, num_samples = correct.shape
    return Accuracy(
        task,
        side.name,
        num_seeds,
        num_problems,
        num_samples,
        accuracy=float(correct.mean()),
        interval=accuracy_interval(correct[0]) if len(correct) == 1 else t_estimate(by_seed).interval,
        by_seed=by_seed,
        truncated_share=float(np.mean([result.truncated_share for result in results])),
        unanswered_share=float(np.mean([result.unanswered_share for result in results])),
        mean_tokens=float(np.mean([result.mean_tokens for result in results])),
    )


def _difference(task: str, side: Side, reference: Side, two_way: bool, power_difference: float | None) -> Difference:
    own, other = side.correct[task], reference.correct[task]
    table = own.mean(2) - other.mean(2)
    counts = (own - other).sum((0, 2)).round().astype(int)
    is_single = len(table) == 1
    estimate = t_estimate(table[0] if is_single else table.mean(1))
    spread = spread_of_problems(own[0], other[0]) if is_single else spread_of_seeds(own, other)
    return Difference(
        task,
        side.name,
        reference.name,
        estimate.value,
        estimate.interval,
        estimate.p_value,
        holm_p_value=None,
        num_better=int((counts > 0).sum()),
        num_worse=int((counts < 0).sum()),
        bootstrap_interval=bootstrap_interval(table[0]) if is_single and estimate.interval is not None else None,
        sign_flip_p_value=sign_flip_p_value(counts) if is_single else None,
        by_seed=table.mean(1).tolist(),
        two_way=two_way_estimate(table) if two_way else None,
        sample_sizes=None
        if power_difference is None
        else _sample_sizes(power_difference, spread, own.shape, "problems" if is_single else "seeds"),
    )


def _sample_sizes(difference: float, spread: Spread, shape: tuple[int, ...], unit: str) -> SampleSizes:
    num_seeds, num_problems, num_samples = shape
    now = spread.variance(num_samples)
    needed = {
        k: None if spread.within is None and k != num_samples else number_needed(difference, spread.variance(k))
        for k in sorted({*NUM_SAMPLES, num_samples})
    }
    has_spread = now >= NO_SPREAD**2
    num_now = num_problems if unit == "problems" else num_seeds
    return SampleSizes(
        difference,
        POWER,
        unit,
        needed if has_spread else dict.fromkeys(needed),
        detectable_difference(now, num_now) if has_spread else None,
    )


# ---- warnings --------------------------------------------------------------------------------------------------------


def _warnings_on_lengths(accuracies: Sequence[Accuracy], num_sides: int) -> Iterator[str]:
    for i in range(0, len(accuracies), num_sides):
        of_task = accuracies[i : i + num_sides]
        shares = {one.side: one.truncated_share for one in of_task}
        listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        if max(shares.values()) - min(shares.values()) >= DIFFERING_TRUNCATED_SHARE:
            yield (
                f"{of_task[0].task}: truncated shares differ ({listed}): part of a difference may be length, not "
                "reasoning. Evaluate with more new tokens"
            )
        elif max(shares.values()) >= LARGE_TRUNCATED_SHARE:
            yield (
                f"{of_task[0].task}: many outputs were truncated ({listed}): accuracies are those within the limit. "
                "Evaluate with more new tokens"
            )


def _warnings_on_intervals(sides: Sequence[Side], differences: Sequence[Difference]) -> Iterator[str]:
    for one in differences:
        num_differing = one.num_better + one.num_worse
        if len(sides[0].folders) == 1 and num_differing < FEWEST_DIFFERING:
            problems = "1 problem" if num_differing == 1 else f"{num_differing} problems"
            yield (
                f"{one.task}: {one.side} and {one.reference} differ on {problems}; below {FEWEST_DIFFERING} the t "
                "interval may be too narrow. Go by the exact test, or evaluate more problems"
            )


def _warnings_on_models(sides: Sequence[Side]) -> Iterator[str]:
    for side in sides:
        models = [evaluation.model for evaluation in side.evaluations]
        repeated = [folder for folder, model in zip(side.folders, models, strict=True) if models.count(model) > 1]
        if repeated:
            yield (
                f"{side.name}: {' and '.join(map(str, repeated))} are of the same model: intervals over seeds are too "
                "narrow where the seeds of training are the same. Give an evaluation of each seed"
            )


def _warnings_on_versions(sides: Sequence[Side]) -> Iterator[str]:
    first = sides[0].evaluations[0].versions
    for side in sides:
        for folder, evaluation in zip(side.folders, side.evaluations, strict=True):
            keys = dict.fromkeys([*first, *evaluation.versions])
            different = [
                f"{key} {evaluation.versions.get(key, 'missing')} ({first.get(key, 'missing')})"
                for key in keys
                if evaluation.versions.get(key) != first.get(key)
            ]
            if different:
                yield f"{folder}: was made with other versions than {sides[0].folders[0]}: {', '.join(different)}"
