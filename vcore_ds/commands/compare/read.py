"""From folders to sides: evaluations of the same problems in the same way, or one message on how they differ."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vcore_ds.errors import UserError
from vcore_ds.files.evaluation_folder import (
    Evaluation,
    TaskResult,
    read_evaluation,
    read_samples,
    samples_path,
    summarize,
)
from vcore_ds.results.seed_statistics import FEWEST_SEEDS

IGNORED_SAMPLING = {"seed"}
"""Fields of sampling that may differ: another seed draws other samples from the same distribution."""
MOST_SHOWN = 3
"""Problem ids in a message."""


@dataclass(frozen=True, eq=False)
class Side:
    """What is compared: one evaluation, or those of one method's seeds."""

    name: str
    folders: list[Path]
    evaluations: list[Evaluation]
    correct: dict[str, np.ndarray]
    """Right answers by task: [seeds, problems, samples], the problems in the same order on all sides."""
    results: dict[str, list[TaskResult]]
    """By task, for each seed."""


@dataclass(frozen=True, eq=False)
class _Task:
    """A task of one evaluation."""

    path: Path
    correct: dict[str, dict[int, bool]]
    result: TaskResult


def read_sides(groups: Sequence[tuple[str, Sequence[Path]]], tasks: Sequence[str]) -> list[Side]:
    """Reads (name, folders) of every side, the reference first.

    Args:
        tasks: those to compare; all where none is named.

    Raises:
        UserError: fewer than two sides; numbers of seeds that support no comparison; a folder or a name given twice;
            evaluations that are damaged, or that differ in problems, sampling, numbers of samples or tasks.
    """
    _check_groups(groups)
    evaluations = {folder: read_evaluation(folder) for _, folders in groups for folder in folders}
    first, *others = evaluations
    names = _shared_tasks(evaluations, tasks)
    for folder in others:
        _check_sampling(names, first, evaluations[first], folder, evaluations[folder])
    found = {
        name: {folder: _read_task(folder, name, one.tasks[name]) for folder, one in evaluations.items()}
        for name in names
    }
    return [
        Side(
            label,
            list(folders),
            [evaluations[folder] for folder in folders],
            {name: np.stack([_table(of[folder], of[first]) for folder in folders]) for name, of in found.items()},
            {name: [of[folder].result for folder in folders] for name, of in found.items()},
        )
        for label, folders in groups
    ]


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: the part of its path in which they differ, `sft` of runs/sft/eval and runs/vcore/eval."""
    parts = [folder.resolve().parts for folder in folders]
    for _ in range(2):  # from the beginning, then from the end; something of each path stays
        shortest = min(map(len, parts), default=1)
        num_shared = next((i for i in range(shortest - 1) if len({own[i] for own in parts}) > 1), shortest - 1)
        parts = [own[num_shared:][::-1] for own in parts]
    return ["/".join(own) for own in parts]


def _check_groups(groups: Sequence[tuple[str, Sequence[Path]]]) -> None:
    folders = [folder for _, members in groups for folder in members]
    if len(groups) < 2:
        raise UserError(
            f"EVAL: found {len(groups) or 'no'} {'side' if len(folders) > 1 else 'evaluation'}; expected at least two "
            "to compare. Name another evaluation, or another --group"
        )
    seen: dict[Path, Path] = {}
    for folder in folders:
        if folder.resolve() in seen:
            raise UserError(f"EVAL: {folder}: found twice; expected different evaluations. Name each once")
        seen[folder.resolve()] = folder
    labels = [label for label, _ in groups]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"--group: {label}: found twice; expected a name of its own for each group")
    sizes = {label: len(members) for label, members in groups}
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{size} of {label}" for label, size in sizes.items())
        raise UserError(
            f"--group: found {found}; expected as many evaluations in each group, in the order of their seeds, because "
            "differences are paired by seed"
        )
    size = next(iter(sizes.values()))
    if 1 < size < FEWEST_SEEDS:
        raise UserError(
            f"--group: found {size} evaluations in each; expected one, or at least {FEWEST_SEEDS}: fewer seeds say too "
            "little about how seeds differ. Train another seed, or compare single evaluations"
        )


def _check_sampling(tasks: Sequence[str], first: Path, expected: Evaluation, folder: Path, found: Evaluation) -> None:
    """Raises UserError where the tasks were not answered in the same way."""
    lines: dict[str, None] = {}
    for task in tasks:
        here, there = _sampling_of(expected, task), _sampling_of(found, task)
        for key in dict.fromkeys([*here, *there]):
            if key not in IGNORED_SAMPLING and (key in here, here.get(key)) != (key in there, there.get(key)):
                lines[f"  {key}: {_shown(there, key)} there, {_shown(here, key)} in {first}"] = None
    if lines:
        raise UserError(
            f"{folder}: found other sampling or prompts:\n" + "\n".join(lines) + "\nexpected the same, because such "
            "differences change accuracies by themselves. Evaluate both in the same way"
        )


def _sampling_of(evaluation: Evaluation, task: str) -> dict[str, Any]:
    """A field that tasks do not share, such as the limit on new tokens, has a value for each."""
    return {
        key: value[task] if isinstance(value, dict) and task in value else value
        for key, value in evaluation.sampling.items()
    }


def _shown(sampling: dict[str, Any], key: str) -> str:
    return repr(sampling[key]) if key in sampling else "nothing"


def _shared_tasks(evaluations: dict[Path, Evaluation], tasks: Sequence[str]) -> list[str]:
    """Names of the tasks to compare, in the order of the first evaluation or of `tasks`."""
    all_names = list(dict.fromkeys(name for one in evaluations.values() for name in one.tasks))
    for name in dict.fromkeys(tasks) or all_names:
        for folder, one in evaluations.items():
            if name in one.generations:
                raise UserError(
                    f"{folder}: {name}: found outputs that other programs grade; expected a graded task. Name others "
                    "with --tasks"
                )
            if name not in one.tasks:
                others = ", ".join(one.tasks) or "none"
                raise UserError(
                    f"{folder}: found no task {name} (there: {others}); expected every task in every evaluation. "
                    "Evaluate it there too, or name the tasks to compare with --tasks"
                )
    if not all_names:
        raise UserError(f"{next(iter(evaluations))}: found no graded task; expected one. Evaluate it with a task")
    return list(dict.fromkeys(tasks)) or all_names


def _read_task(folder: Path, name: str, there: TaskResult) -> _Task:
    """Right answers of a task by problem and number of the sample."""
    path = samples_path(folder, name)
    samples = read_samples(folder, name)
    correct: dict[str, dict[int, bool]] = {}
    for sample in samples:
        correct.setdefault(sample.problem_id, {})[sample.sample] = sample.correct
    # What evaluation.json says of a file that was cut off, or put together from two, does not fit it.
    num_samples = len(samples) // max(1, len(correct))
    whole = set(range(num_samples))
    if (
        (there.num_problems, there.num_samples_per_problem) != (len(correct), num_samples)
        or not samples
        or len(samples) != len(correct) * num_samples
        or any(own.keys() != whole for own in correct.values())
    ):
        raise UserError(
            f"{path}: is damaged: found {len(samples):,} samples of {len(correct):,} problems; expected "
            f"{there.num_samples_per_problem} of each of {there.num_problems} problems, as evaluation.json says. "
            "Evaluate again"
        )
    return _Task(path, correct, summarize(samples))


def _table(task: _Task, first: _Task) -> np.ndarray:
    """Right answers [problems, samples], the problems in the order of the first evaluation's ids."""
    found, expected = task.correct.keys(), first.correct.keys()
    if found != expected:
        raise UserError(
            f"{task.path}: found other problems than in {first.path}: {_differing(found, expected)}; expected the same "
            "ones, because differences are paired by problem. Evaluate the same problems"
        )
    if task.result.num_samples_per_problem != first.result.num_samples_per_problem:
        raise UserError(
            f"{task.path}: found {task.result.num_samples_per_problem} samples of each problem, and "
            f"{first.result.num_samples_per_problem} in {first.path}; expected as many. Evaluate both in the same way"
        )
    samples = range(task.result.num_samples_per_problem)
    return np.array([[task.correct[problem][k] for k in samples] for problem in sorted(expected)], dtype=np.float64)


def _differing(found: Set[str], expected: Set[str]) -> str:
    def listed(ids: Set[str]) -> str:
        some = sorted(ids)
        return ", ".join(some[:MOST_SHOWN]) + (", .." if len(some) > MOST_SHOWN else "")

    parts = [(found - expected, "only there"), (expected - found, "missing")]
    return "; ".join(f"{len(ids):,} {words} ({listed(ids)})" for ids, words in parts if ids)
