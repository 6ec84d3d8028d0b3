"""Read evaluations of the same problems, compare each side with the first, and show it as tables and as JSON."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.commands.report.page import NOTHING, Table
from vcore_ds.common import statistics
from vcore_ds.common.errors import UserError
from vcore_ds.common.statistics import FEWEST_SEEDS, Estimate, Interval
from vcore_ds.common.text import count
from vcore_ds.training.evaluation_folder import Evaluation, read_evaluation, read_samples, samples_path

FEWEST_DIFFERING = 5
"""Differing problems of two evaluations; with fewer the t interval is too narrow
(docs/reports/comparing-coverage.md)."""
LARGE_TRUNCATED_SHARE, DIFFERING_TRUNCATED_SHARE = 0.05, 0.02
"""Truncated shares, and differences between them, that cause a warning."""
_REMEDY = "Evaluate both in the same way"


@dataclass(frozen=True, eq=False)
class Evaluated:
    """An evaluation's folder; problems in the same order in both dictionaries, by task."""

    folder: Path
    evaluation: Evaluation
    problems: dict[str, list[str]]
    correct: dict[str, np.ndarray]  # `[problems, samples]`, 0 or 1


Sides = Mapping[str, Sequence[Evaluated]]


@dataclass
class Difference:
    """A side minus the reference on a task. None: too few or equal values, or not asked of such evaluations."""

    value: float
    interval: Interval | None
    """Student's t, over problems for one evaluation per side, else over pairs of seeds."""
    p_value: float | None
    holm_p_value: float | None  # adjusted for all differences of the comparison
    num_better: int  # problems on which the side has more right answers, over all seeds
    num_worse: int
    sign_flip_p_value: float | None  # for one evaluation per side; McNemar's with one sample per problem
    by_seed: list[float]
    two_way: Estimate | None  # for several seeds: clustered by seed and problem


@dataclass(frozen=True)
class Result:
    """A side on a task; shares from 0 to 1, means over seeds."""

    task: str
    side: str
    num_seeds: int
    num_problems: int
    num_samples_per_problem: int
    accuracy: float
    interval: Interval | None  # Wilson's for one evaluation, Student's t over seeds for several
    truncated_share: float
    unanswered_share: float
    mean_tokens: float
    difference: Difference | None  # from the reference; None for the reference


def read_sides(groups: Mapping[str, Sequence[Path]], tasks: Sequence[str]) -> Sides:
    """Read the evaluations of each side, the reference first; all tasks unless `tasks` names some. Raises UserError for
    damaged evaluations, and for those that differ in tasks, problems, sampling or number of samples."""
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
    read = {folder: read_evaluation(folder) for members in groups.values() for folder in members}
    names = list(dict.fromkeys(tasks or (name for evaluation in read.values() for name in evaluation.tasks)))
    if not names:
        raise UserError(f"{next(iter(read))}: found no graded task; expected one. Evaluate it with a task")
    sides = {name: [_read(folder, read[folder], names) for folder in members] for name, members in groups.items()}
    first, *others = (evaluated for seeds in sides.values() for evaluated in seeds)
    for evaluated in others:
        _check_comparable(evaluated, first)
    return sides


def _read(folder: Path, evaluation: Evaluation, tasks: Sequence[str]) -> Evaluated:
    evaluated = Evaluated(folder, evaluation, {}, {})
    for task in tasks:
        if task not in evaluation.tasks:
            raise UserError(
                f"{folder}: found no graded task {task} (there: {', '.join(evaluation.tasks) or 'none'}); expected it "
                "in every evaluation. Evaluate it there too, or name the tasks to compare with --tasks"
            )
        samples = sorted(read_samples(folder, task), key=lambda sample: (sample.problem_id, sample.sample))
        problems = evaluated.problems[task] = list(dict.fromkeys(sample.problem_id for sample in samples))
        num_problems, num_samples = evaluation.tasks[task].num_problems, evaluation.tasks[task].num_samples_per_problem
        complete = [(problem, k) for problem in problems for k in range(num_samples)]
        if len(problems) != num_problems or [(sample.problem_id, sample.sample) for sample in samples] != complete:
            raise UserError(
                f"{samples_path(folder, task)}: is damaged: found {len(samples):,} samples of {len(problems):,} "
                f"problems; expected {num_samples} of each of {num_problems} problems, as evaluation.json says. "
                "Evaluate again"
            )
        correct = np.array([sample.correct for sample in samples], dtype=np.float64)
        evaluated.correct[task] = correct.reshape(num_problems, num_samples)
    return evaluated


def _sampling(one: Evaluated, task: str) -> dict[str, Any]:
    """Return the settings of a task, without the seed: another seed draws from the same distribution."""
    sampling = one.evaluation.sampling.items()
    # Values that differ between tasks, such as the limit on new tokens, are stored by task.
    return {k: v[task] if isinstance(v, dict) and task in v else v for k, v in sampling if k != "seed"}


def _check_comparable(one: Evaluated, first: Evaluated) -> None:
    """Raise UserError unless both answered the same problems in the same way."""
    for task in first.problems:
        place, there, here = f"{one.folder}: {task}: found", _sampling(one, task), _sampling(first, task)
        if keys := [key for key in {**here, **there} if here.get(key) != there.get(key)]:
            lines = [f"  {key}: {there.get(key)!r} there, {here.get(key)!r} in {first.folder}" for key in keys]
            raise UserError("\n".join([f"{place} other sampling or prompts:", *lines, f"expected the same. {_REMEDY}"]))
        if different := set(one.problems[task]) ^ set(first.problems[task]):
            raise UserError(
                f"{place} other problems than in {first.folder}: {len(different):,} are in one only, such as "
                f"{min(different)}; expected the same, because differences are paired by problem. {_REMEDY}"
            )
        num_there, num_here = one.correct[task].shape[1], first.correct[task].shape[1]
        if num_there != num_here:
            raise UserError(
                f"{place} {num_there} samples of each problem; expected {num_here}, as in {first.folder}. {_REMEDY}"
            )


def compare(sides: Sides) -> list[Result]:
    """Compare each side with the first; return a result for each task and side."""
    reference = next(iter(sides.values()))
    results = []
    for task in reference[0].correct:
        expected = np.stack([one.correct[task] for one in reference])
        for name, seeds in sides.items():
            correct = np.stack([one.correct[task] for one in seeds])
            read = [one.evaluation.tasks[task] for one in seeds]
            lengths = [(one.truncated_share, one.unanswered_share, one.mean_tokens) for one in read]
            by_seed = statistics.t_estimate(correct.mean((1, 2)))
            interval = by_seed.interval if len(seeds) > 1 else statistics.accuracy_interval(correct[0])
            difference = None if seeds is reference else _difference(correct, expected)
            values = (float(correct.mean()), interval, *np.mean(lengths, axis=0).tolist(), difference)
            results.append(Result(task, name, *correct.shape, *values))
    tested = [one.difference for one in results if one.difference is not None and one.difference.p_value is not None]
    for difference, p_value in zip(tested, statistics.holm([one.p_value or 0.0 for one in tested]), strict=True):
        difference.holm_p_value = p_value
    return results


def _difference(correct: np.ndarray, expected: np.ndarray) -> Difference:
    """Compare right answers `[seeds, problems, samples]`."""
    table = correct.mean(2) - expected.mean(2)
    counts = (correct - expected).sum((0, 2)).round().astype(int)
    is_single = len(table) == 1
    estimate = statistics.t_estimate(table[0] if is_single else table.mean(1))
    return Difference(
        estimate.value,
        estimate.interval,
        estimate.p_value,
        holm_p_value=None,
        num_better=int((counts > 0).sum()),
        num_worse=int((counts < 0).sum()),
        sign_flip_p_value=statistics.sign_flip_p_value(counts) if is_single else None,
        by_seed=table.mean(1).tolist(),
        two_way=None if is_single else statistics.two_way_estimate(table),
    )


def find_warnings(sides: Sides, results: Sequence[Result]) -> Iterator[str]:
    reference, first = next(iter(sides.items()))
    for task in first[0].problems:
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
                    f"{one.task}: {one.side} and {reference} differ on {count(num_differing, 'problem')}; below "
                    f"{FEWEST_DIFFERING} the t interval may be too narrow. Use the exact test, or more problems"
                )
    for name, seeds in sides.items():
        models = [evaluated.evaluation.model for evaluated in seeds]
        if repeated := [str(one.folder) for one in seeds if models.count(one.evaluation.model) > 1]:
            yield f"{name}: {', '.join(repeated)} are of the same model. Give an evaluation of each training seed"
        for evaluated in seeds:
            there, here = evaluated.evaluation.versions, first[0].evaluation.versions
            if keys := [key for key in {**here, **there} if here.get(key) != there.get(key)]:
                listed = ", ".join(f"{key} {there.get(key)} ({here.get(key)})" for key in keys)
                yield f"{evaluated.folder}: was made with other versions than {first[0].folder}: {listed}"


FORMAT = 3
WIDTH = 120


def as_dict(sides: Sides, results: Sequence[Result]) -> dict[str, Any]:
    has_seeds = results[0].num_seeds > 1
    return {
        "format": FORMAT,
        "intervals_are_about": "methods on these problems" if has_seeds else "these checkpoints",
        "sides": [{"name": name, "evaluations": [str(one.folder) for one in seeds]} for name, seeds in sides.items()],
        "results": [asdict(result) for result in results],
        "warnings": list(find_warnings(sides, results)),
    }


def describe(sides: Sides, results: Sequence[Result]) -> str:
    """A table for each task, what its intervals are about, the pairs of seeds, and warnings."""
    tasks = dict.fromkeys(result.task for result in results)
    parts = [_make_table([result for result in results if result.task == task]).text() for task in tasks]
    has_seeds, num_differences = results[0].num_seeds > 1, sum(result.difference is not None for result in results)
    about = (
        "Differences and p are about these checkpoints on problems like these (Student's t), not about the methods "
        f"that trained them: for methods train {FEWEST_SEEDS} seeds or more of each, and use --group."
    )
    if has_seeds:
        about = (
            "Differences and p are about the methods, trained with other seeds: Student's t over seeds on these very "
            "problems, two-way on problems like these."
        )
    if num_differences > 1:
        about += f" Holm: p adjusted for all {num_differences} differences."
    parts.append(textwrap.fill(about, WIDTH))
    if has_seeds:
        pairs = zip(*([str(one.folder) for one in seeds] for seeds in sides.values()), strict=True)
        parts.append("\n".join(["Paired by seed:", *("  " + "   ".join(pair) for pair in pairs)]))
    return "\n\n".join([*parts, *(f"warning: {warning}" for warning in find_warnings(sides, results))])


def _make_table(results: Sequence[Result]) -> Table:
    """The sides on a task, with their paired differences from the first."""
    first, *_ = results
    has_seeds = first.num_seeds > 1
    counts = [count(first.num_problems, "problem"), f"{count(first.num_samples_per_problem, 'sample')} of each"]
    caption = f"{first.task}: {', '.join([*counts, *([f'{first.num_seeds} seeds'] if has_seeds else [])])}"
    head = ["", "accuracy", "95% interval", "difference", "95% interval", "p", "Holm"]
    head += ["two-way interval", "p"] if has_seeds else ["exact p", "better/worse"]
    rows = []
    for one in results:
        cells = [f"{one.accuracy:.1%}", _interval(one.interval, sign="")]
        if (difference := one.difference) is None:
            cells += [""] * (len(head) - 3)
        else:
            cells += [f"{100 * difference.value:+.1f}", _interval(difference.interval)]
            cells += [_p_value(difference.p_value), _p_value(difference.holm_p_value)]
            if difference.two_way is not None:
                cells += [_interval(difference.two_way.interval), _p_value(difference.two_way.p_value)]
            else:
                cells += [_p_value(difference.sign_flip_p_value), f"{difference.num_better}/{difference.num_worse}"]
        rows.append([one.side, *cells, f"{one.truncated_share:.1%}", f"{one.mean_tokens:,.0f}"])
    return Table(caption, [*head, "truncated", "tokens"], rows)


def _interval(interval: Interval | None, sign: str = "+") -> str:
    return NOTHING if interval is None else f"[{100 * interval[0]:{sign}.1f}, {100 * interval[1]:{sign}.1f}]"


def _p_value(value: float | None) -> str:
    return NOTHING if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"
