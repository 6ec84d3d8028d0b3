"""`vcore-ds compare`: whether one evaluation is better than another, beyond chance."""

import argparse
import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcore_ds.common.errors import UserError
from vcore_ds.common.text import count
from vcore_ds.config.problems import show
from vcore_ds.training.evaluation_folder import Evaluation, read_evaluation, read_samples, samples_path

if TYPE_CHECKING:
    from vcore_ds.commands.page import Table
    from vcore_ds.common.statistics import Difference, Interval

HELP = "whether one evaluation is better than another, beyond chance"
DESCRIPTION = (
    "Compare evaluations of the same problems: accuracies and paired differences with 95% intervals. Two evaluations "
    "compare two checkpoints; three or more seeds of each method, given with --group, compare the methods. Needs no "
    "GPU. docs/evaluation.md says which interval answers which question."
)
FEWEST_DIFFERING = 5
"""Differing problems of two evaluations; with fewer the t interval is too narrow
(docs/reports/comparing-coverage.md)."""
LARGE_TRUNCATED_SHARE, DIFFERING_TRUNCATED_SHARE = 0.05, 0.02
"""Truncated shares, and differences between them, that cause a warning."""
WIDTH = 120
NOTHING = "–"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("evaluations", nargs="*", metavar="EVAL", help="folders of evaluations; the others are compared with the first")
    group = (
        "instead of EVAL: a method's evaluations, one per seed, three or more, in the same order in every group "
        "(--group sft runs/sft/seed_*/eval --group vcore runs/vcore/seed_*/eval)"
    )
    add("--group", nargs="+", action="append", default=[], metavar=("NAME", "EVAL"), help=group)
    add("--tasks", nargs="+", default=[], metavar="TASK", help="tasks to compare (default: all)")
    add("--json", action="store_true", help="print the comparison as JSON")
    parser.set_defaults(overrides=[])


def main(arguments: argparse.Namespace) -> None:
    # argparse ends a list where an option begins; cli.parse collects the evaluations that follow as overrides.
    folders, groups = [*arguments.evaluations, *arguments.overrides], arguments.group
    if folders and not groups:
        root = os.path.commonpath(list(map(os.path.realpath, folders)))
        groups = [(os.path.relpath(os.path.realpath(folder), root), folder) for folder in folders]
    elif folders:
        raise UserError(f"EVAL: found {folders[0]} beside --group; expected one or the other")
    names, members = [words[0] for words in groups], [folder for words in groups for folder in words[1:]]
    sizes = {len(words) - 1 for words in groups}
    are_different = len({*names}) == len(names) and len({*map(os.path.realpath, members)}) == len(members)
    if len(groups) < 2 or not are_different or len(sizes) > 1 or sizes & {0, 2}:
        listed = "; ".join(" ".join(words) for words in groups) or "nothing"
        raise UserError(
            f"EVAL: found {listed}; expected two or more different evaluations, or --group twice or more with other "
            "names, each with one evaluation or with the same number of seeds, three or more: differences are paired "
            "by seed, and fewer say too little about how seeds differ"
        )
    sides = read_sides({name: list(map(Path, folders)) for name, *folders in groups}, arguments.tasks)
    results = compare(sides)
    if arguments.json:
        print(json.dumps(as_dict(sides, results), indent=2, allow_nan=False))
    else:
        print(describe(sides, results))


@dataclass(frozen=True)
class Evaluated:
    """An evaluation's folder, with whether each sample of each problem is right."""

    folder: Path
    evaluation: Evaluation
    correct: dict[str, dict[str, list[bool]]]  # by task and problem; problems in the order of their ids


Sides = Mapping[str, Sequence[Evaluated]]


@dataclass(frozen=True)
class TaskComparison:
    """A side on a task; shares from 0 to 1, means over seeds."""

    task: str
    side: str
    num_seeds: int
    num_problems: int
    num_samples_per_problem: int
    accuracy: float
    interval: "Interval | None"  # Wilson's for one evaluation, Student's t over seeds for several
    truncated_share: float
    unanswered_share: float
    mean_tokens: float
    difference: "Difference | None"  # from the reference; None for the reference


def read_sides(groups: Mapping[str, Sequence[Path]], tasks: Sequence[str]) -> Sides:
    """Read the evaluations of each side, the reference first; all tasks unless `tasks` names some. Raises UserError for
    damaged evaluations, and for those that differ in tasks, problems, sampling or number of samples."""
    read = {folder: read_evaluation(folder) for members in groups.values() for folder in members}
    names = list(dict.fromkeys(tasks or (name for evaluation in read.values() for name in evaluation.tasks)))
    if not names:
        raise UserError(f"{next(iter(read))}: found no graded task; expected one. Evaluate it with a task")
    evaluated = {folder: _read(folder, evaluation, names) for folder, evaluation in read.items()}
    first, *others = evaluated.values()
    for one, task in product(others, names):
        _check_comparable(one, first, task)
    return {name: [evaluated[folder] for folder in members] for name, members in groups.items()}


def _read(folder: Path, evaluation: Evaluation, tasks: Sequence[str]) -> Evaluated:
    evaluated = Evaluated(folder, evaluation, {})
    for task in tasks:
        if task not in evaluation.tasks:
            raise UserError(
                f"{folder}: found no graded task {task} (there: {', '.join(evaluation.tasks) or 'none'}); expected it "
                "in every evaluation. Evaluate it there too, or name the tasks to compare with --tasks"
            )
        samples = sorted(read_samples(folder, task), key=lambda sample: (sample.problem_id, sample.sample))
        problems = evaluated.correct[task] = {}
        for sample in samples:
            problems.setdefault(sample.problem_id, []).append(sample.correct)
        num_problems, num_samples = evaluation.tasks[task].num_problems, evaluation.tasks[task].num_samples_per_problem
        complete = [*product(problems, range(num_samples))]
        if len(problems) != num_problems or [(sample.problem_id, sample.sample) for sample in samples] != complete:
            raise UserError(
                f"{samples_path(folder, task)}: is damaged: found {len(samples):,} samples of {len(problems):,} "
                f"problems; expected {num_samples} of each of {num_problems} problems, as evaluation.json says. "
                "Evaluate again"
            )
    return evaluated


def _check_comparable(one: Evaluated, first: Evaluated, task: str) -> None:
    """Raise UserError unless both answered the same problems in the same way."""
    (there, problems), (here, expected) = (
        (_describe_sampling(each, task), each.correct[task]) for each in (one, first)
    )
    differing = [key for key in here | there if here.get(key) != there.get(key)]
    wrong = [f"{key} {show(there.get(key))} ({show(here.get(key))})" for key in differing]
    if different := problems.keys() ^ expected.keys():
        wrong.append(f"{count(len(different), 'problem')} that only one of them has, such as {min(different)}")
    if wrong:
        raise UserError(
            f"{one.folder}: {task}: found {', '.join(wrong)}; expected problems, prompts and sampling of {first.folder}"
        )


def _describe_sampling(one: Evaluated, task: str) -> dict[str, Any]:
    """Return the settings of a task, without the seed: another seed draws from the same distribution."""
    samples = {"samples of a problem": one.evaluation.tasks[task].num_samples_per_problem}
    # Values that differ between tasks, such as the limit on new tokens, are stored by task.
    items = ((k, v[task] if isinstance(v, dict) and task in v else v) for k, v in one.evaluation.sampling.items())
    return samples | {key: value for key, value in items if key != "seed"}


def compare(sides: Sides) -> list[TaskComparison]:
    """Compare each side with the first; return a result for each task and side."""
    import numpy as np

    from vcore_ds.common import statistics

    reference = next(iter(sides.values()))
    results = []
    for task in reference[0].correct:
        tables = {name: np.array([[*one.correct[task].values()] for one in seeds]) for name, seeds in sides.items()}
        expected, *_ = tables.values()
        for name, seeds in sides.items():
            correct, read = tables[name].astype(np.float64), [one.evaluation.tasks[task] for one in seeds]
            shares = [(one.truncated_share, one.unanswered_share, one.mean_tokens) for one in read]
            by_seed = statistics.t_estimate(correct.mean((1, 2)))
            interval = by_seed.interval if len(seeds) > 1 else statistics.accuracy_interval(correct[0])
            difference = None if seeds is reference else statistics.paired_difference(correct, expected)
            values = (float(correct.mean()), interval, *np.mean(shares, axis=0).tolist(), difference)
            results.append(TaskComparison(task, name, *correct.shape, *values))
    tested = [one.difference for one in results if one.difference is not None and one.difference.p_value is not None]
    for difference, p_value in zip(tested, statistics.holm([one.p_value or 0.0 for one in tested]), strict=True):
        difference.holm_p_value = p_value
    return results


def find_warnings(sides: Sides, results: Sequence[TaskComparison]) -> Iterator[str]:
    reference, first = next(iter(sides.items()))
    for task in first[0].correct:
        shares = {one.side: one.truncated_share for one in results if one.task == task}
        listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        most, least = max(shares.values()), min(shares.values())
        if most >= LARGE_TRUNCATED_SHARE or most - least >= DIFFERING_TRUNCATED_SHARE:
            yield f"{task}: outputs were truncated ({listed}): part of a difference may be length"
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


def as_dict(sides: Sides, results: Sequence[TaskComparison]) -> dict[str, Any]:
    has_seeds = results[0].num_seeds > 1
    return {
        "format": 3,
        "intervals_are_about": "methods on these problems" if has_seeds else "these checkpoints",
        "sides": [{"name": name, "evaluations": [str(one.folder) for one in seeds]} for name, seeds in sides.items()],
        "results": [asdict(result) for result in results],
        "warnings": list(find_warnings(sides, results)),
    }


def describe(sides: Sides, results: Sequence[TaskComparison]) -> str:
    """A table for each task, what its intervals are about, the pairs of seeds, and warnings."""
    tasks = dict.fromkeys(result.task for result in results)
    parts = [_make_table([result for result in results if result.task == task]).text() for task in tasks]
    has_seeds, num_differences = results[0].num_seeds > 1, sum(result.difference is not None for result in results)
    about = (
        "Differences and p are about these checkpoints on problems like these (Student's t), not about the methods "
        "that trained them: for methods train three seeds or more of each, and use --group."
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


def _make_table(results: Sequence[TaskComparison]) -> "Table":
    """The sides on a task, with their paired differences from the first."""
    from vcore_ds.commands.page import Table

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
            cells += [format_p_value(difference.p_value), format_p_value(difference.holm_p_value)]
            if difference.two_way is not None:
                cells += [_interval(difference.two_way.interval), format_p_value(difference.two_way.p_value)]
            else:
                better_worse = f"{difference.num_better}/{difference.num_worse}"
                cells += [format_p_value(difference.sign_flip_p_value), better_worse]
        rows.append([one.side, *cells, f"{one.truncated_share:.1%}", f"{one.mean_tokens:,.0f}"])
    return Table(caption, [*head, "truncated", "tokens"], rows)


def _interval(interval: "Interval | None", sign: str = "+") -> str:
    return NOTHING if interval is None else f"[{100 * interval[0]:{sign}.1f}, {100 * interval[1]:{sign}.1f}]"


def format_p_value(value: float | None) -> str:
    """Three digits; a dash for None."""
    return NOTHING if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"
