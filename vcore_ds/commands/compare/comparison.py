"""Evaluations of the same problems, read side by side, and the differences of each side from the first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.commands.compare import statistics
from vcore_ds.commands.compare.statistics import Estimate, Interval
from vcore_ds.commands.statistics import FEWEST_SEEDS
from vcore_ds.common.errors import UserError
from vcore_ds.train.evaluation_folder import read_evaluation, read_samples, samples_path

NUM_SAMPLES = (1, 4, 16, 64)
"""Samples a problem for which --power gives numbers."""
FEWEST_DIFFERING = 5
"""Differing problems of two evaluations; with fewer the t interval is too narrow
(docs/reports/comparing-coverage.md)."""
LARGE_TRUNCATED_SHARE, DIFFERING_TRUNCATED_SHARE = 0.05, 0.02
"""Truncated shares, and differences of them, that cause a warning."""
_REMEDY = "Evaluate both in the same way"


@dataclass(frozen=True, eq=False)
class Answers:
    """An evaluation's answers to one task."""

    sampling: dict[str, Any]
    """Without the seed, which draws other samples from the same distribution."""
    problems: list[str]
    correct: np.ndarray
    """`[problems, samples]`, 0 or 1."""
    lengths: tuple[float, float, float]
    """Truncated share, share without an answer, mean number of tokens."""


@dataclass(frozen=True, eq=False)
class Evaluated:
    """What a comparison uses of an evaluation's folder."""

    folder: Path
    model: Mapping[str, Any]
    versions: Mapping[str, str]
    tasks: dict[str, Answers]


Sides = Mapping[str, Sequence[Evaluated]]
"""Name -> one evaluation, or one for each seed. The others are compared with the first."""


@dataclass
class Difference:
    """A side minus the reference on a task. None: the evaluations do not tell, or it was not asked for."""

    value: float
    interval: Interval | None
    """Student's t, over problems for one evaluation a side, over pairs of seeds for several."""
    p_value: float | None
    holm_p_value: float | None
    """Adjusted for all differences of the comparison."""
    num_better: int
    """Problems on which the side has more right answers, over all seeds."""
    num_worse: int
    sign_flip_p_value: float | None
    """For one evaluation a side; McNemar's with one sample a problem."""
    by_seed: list[float]
    two_way: Estimate | None
    needed: dict[int, int | None] | None
    """Problems (one evaluation a side) or seeds that it takes to detect the difference of `--power`, by samples."""
    detectable: float | None
    """The difference that evaluations like these detect."""


@dataclass(frozen=True)
class Result:
    """A side on a task; shares from 0 to 1, means over seeds."""

    task: str
    side: str
    num_seeds: int
    num_problems: int
    num_samples_per_problem: int
    accuracy: float
    interval: Interval | None
    """Wilson's for one evaluation, Student's t over seeds for several."""
    truncated_share: float
    unanswered_share: float
    mean_tokens: float
    difference: Difference | None
    """From the reference; None for the reference itself."""


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_sides(groups: Mapping[str, Sequence[Path]], tasks: Sequence[str]) -> Sides:
    """Reads the evaluations of each side, the reference first; all tasks unless some are named.

    Raises UserError for groups that support no comparison, damaged evaluations, and evaluations that differ in tasks,
    problems, sampling or number of samples.
    """
    folders = [folder.resolve() for members in groups.values() for folder in members]
    if len(groups) < 2 or len(set(folders)) < len(folders):
        raise UserError(
            f"EVAL: found {', '.join(map(str, folders)) or 'nothing'}; expected two or more different evaluations, or "
            "--group twice or more"
        )
    sizes = {len(members) for members in groups.values()}
    if len(sizes) > 1 or 1 < min(sizes) < FEWEST_SEEDS:
        listed = ", ".join(f"{len(members)} of {name}" for name, members in groups.items())
        raise UserError(
            f"--group: found {listed}; expected one evaluation of each, or the same number of seeds, {FEWEST_SEEDS} or "
            "more: differences are paired by seed, and fewer say too little about how seeds differ"
        )
    sides = {name: [read_answers(folder, tasks) for folder in members] for name, members in groups.items()}
    first, *others = (one for seeds in sides.values() for one in seeds)
    names = dict.fromkeys(name for one in (first, *others) for name in one.tasks)
    if not names:
        raise UserError(f"{first.folder}: found no graded task; expected one. Evaluate it with a task")
    for one in (first, *others):
        for name in names:
            _check_task(one.folder, name, one.tasks)
    for one in others:
        _check_alike(one, first)
    return sides


def read_answers(folder: Path, tasks: Sequence[str]) -> Evaluated:
    """Reads an evaluation's folder: `tasks`, or all that are graded. Only this function knows the format."""
    evaluation = read_evaluation(folder)
    answers = {}
    for name in dict.fromkeys(tasks or evaluation.tasks):
        _check_task(folder, name, evaluation.tasks)
        result = evaluation.tasks[name]
        samples = sorted(read_samples(folder, name), key=lambda sample: (sample.problem_id, sample.sample))
        problems = list(dict.fromkeys(sample.problem_id for sample in samples))
        whole = [(problem, k) for problem in problems for k in range(result.num_samples_per_problem)]
        if len(problems) != result.num_problems or [(one.problem_id, one.sample) for one in samples] != whole:
            raise UserError(
                f"{samples_path(folder, name)}: is damaged: found {len(samples):,} samples of {len(problems):,} "
                f"problems; expected {result.num_samples_per_problem} of each of {result.num_problems} problems, as "
                "evaluation.json says. Evaluate again"
            )
        correct = np.array([sample.correct for sample in samples], dtype=np.float64).reshape(len(problems), -1)
        sampling = {  # what tasks do not share, such as the limit on new tokens, has a value for each
            key: value[name] if isinstance(value, dict) and name in value else value
            for key, value in evaluation.sampling.items()
            if key != "seed"
        }
        lengths = (result.truncated_share, result.unanswered_share, result.mean_tokens)
        answers[name] = Answers(sampling, problems, correct, lengths)
    return Evaluated(folder, evaluation.model, evaluation.versions, answers)


def _check_task(folder: Path, name: str, tasks: Mapping[str, object]) -> None:
    if name not in tasks:
        raise UserError(
            f"{folder}: found no graded task {name} (there: {', '.join(tasks) or 'none'}); expected it in every "
            "evaluation. Evaluate it there too, or name the tasks to compare with --tasks"
        )


def _check_alike(one: Evaluated, first: Evaluated) -> None:
    """Raises UserError unless both answered the same problems in the same way."""
    for task, expected in first.tasks.items():
        answers, place = one.tasks[task], f"{one.folder}: {task}: found"
        there, here = answers.sampling, expected.sampling
        if keys := [key for key in {**here, **there} if here.get(key) != there.get(key)]:
            lines = [f"  {key}: {there.get(key)!r} there, {here.get(key)!r} in {first.folder}" for key in keys]
            raise UserError("\n".join([f"{place} other sampling or prompts:", *lines, f"expected the same. {_REMEDY}"]))
        if different := set(answers.problems) ^ set(expected.problems):
            raise UserError(
                f"{place} other problems than in {first.folder}: {len(different):,} are in one only, such as "
                f"{min(different)}; expected the same, because differences are paired by problem. {_REMEDY}"
            )
        counts = answers.correct.shape[1], expected.correct.shape[1]
        if counts[0] != counts[1]:
            raise UserError(
                f"{place} {counts[0]} samples of each problem; expected {counts[1]}, as in {first.folder}. {_REMEDY}"
            )


# ---- comparing -------------------------------------------------------------------------------------------------------


def compare(sides: Sides, *, two_way: bool = False, power_difference: float | None = None) -> list[Result]:
    """Compares each side with the first: a result for each task and side.

    Args:
        two_way: add the interval over seeds and problems; for sides with several seeds.
        power_difference: add sample sizes for this difference of accuracies, from 0 to 1.
    """
    reference = next(iter(sides.values()))
    results = []
    for task in reference[0].tasks:
        expected = np.stack([one.tasks[task].correct for one in reference])
        for name, seeds in sides.items():
            correct = np.stack([one.tasks[task].correct for one in seeds])
            truncated, unanswered, tokens = np.mean([one.tasks[task].lengths for one in seeds], axis=0).tolist()
            over_seeds = statistics.t_estimate(correct.mean((1, 2))).interval
            interval = statistics.accuracy_interval(correct[0]) if len(seeds) == 1 else over_seeds
            difference = None if seeds is reference else _difference(correct, expected, two_way, power_difference)
            counts, accuracy = correct.shape, float(correct.mean())
            values = (accuracy, interval, truncated, unanswered, tokens, difference)
            results.append(Result(task, name, counts[0], counts[1], counts[2], *values))
    tested = [one.difference for one in results if one.difference is not None and one.difference.p_value is not None]
    for difference, p_value in zip(tested, statistics.holm([one.p_value or 0.0 for one in tested]), strict=True):
        difference.holm_p_value = p_value
    return results


def _difference(correct: np.ndarray, expected: np.ndarray, two_way: bool, power_difference: float | None) -> Difference:
    """Of right answers `[seeds, problems, samples]`."""
    table = correct.mean(2) - expected.mean(2)
    counts = (correct - expected).sum((0, 2)).round().astype(int)
    is_single = len(table) == 1
    estimate = statistics.t_estimate(table[0] if is_single else table.mean(1))
    needed, detectable = None, None
    if power_difference is not None:
        units = (correct[0], expected[0]) if is_single else (correct, expected)
        needed, detectable = _sample_sizes(power_difference, *units)
    return Difference(
        estimate.value,
        estimate.interval,
        estimate.p_value,
        holm_p_value=None,
        num_better=int((counts > 0).sum()),
        num_worse=int((counts < 0).sum()),
        sign_flip_p_value=statistics.sign_flip_p_value(counts) if is_single else None,
        by_seed=table.mean(1).tolist(),
        two_way=statistics.two_way_estimate(table) if two_way else None,
        needed=needed,
        detectable=detectable,
    )


def _sample_sizes(
    difference: float, correct: np.ndarray, expected: np.ndarray
) -> tuple[dict[int, int | None], float | None]:
    """`needed` and `detectable`, over the first axis; without numbers where there is no spread to go by."""
    (between, within), num_samples = statistics.measure_spread(correct, expected), correct.shape[-1]
    variances = {k: between + (within or 0.0) / k for k in sorted({*NUM_SAMPLES, num_samples})}
    if variances[num_samples] < statistics.NO_SPREAD**2:
        return dict.fromkeys(variances), None
    needed = {
        k: None if within is None and k != num_samples else statistics.number_needed(difference, variance)
        for k, variance in variances.items()
    }
    return needed, statistics.detectable_difference(variances[num_samples], len(correct))


def find_warnings(sides: Sides, results: Sequence[Result]) -> Iterator[str]:
    """What makes the comparison's numbers doubtful."""
    reference, first = next(iter(sides.items()))
    for task in first[0].tasks:
        shares = {one.side: one.truncated_share for one in results if one.task == task}
        listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        if max(shares.values()) - min(shares.values()) >= DIFFERING_TRUNCATED_SHARE:
            yield f"{task}: truncated shares differ ({listed}), so part of a difference may be length"
        elif max(shares.values()) >= LARGE_TRUNCATED_SHARE:
            yield f"{task}: many outputs were truncated ({listed}). Evaluate with more new tokens"
    for one in results:
        if one.difference is not None and len(first) == 1:
            num_differing = one.difference.num_better + one.difference.num_worse
            if num_differing < FEWEST_DIFFERING:
                yield (
                    f"{one.task}: {one.side} and {reference} differ on {num_differing} problem(s); below "
                    f"{FEWEST_DIFFERING} the t interval may be too narrow. Use the exact test, or more problems"
                )
    for name, seeds in sides.items():
        models = [evaluated.model for evaluated in seeds]
        if repeated := [str(one.folder) for one in seeds if models.count(one.model) > 1]:
            yield f"{name}: {', '.join(repeated)} are of the same model. Give an evaluation of each training seed"
        for evaluated in seeds:
            there, here = evaluated.versions, first[0].versions
            if keys := [key for key in {**here, **there} if here.get(key) != there.get(key)]:
                listed = ", ".join(f"{key} {there.get(key)} ({here.get(key)})" for key in keys)
                yield f"{evaluated.folder}: was made with other versions than {first[0].folder}: {listed}"
