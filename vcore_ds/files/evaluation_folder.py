"""An evaluation's folder: evaluation.json with what was measured, NAME.jsonl with every sample of a task.

evaluation.json is written last: an evaluation whose evaluation.json is there has finished.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vcore_ds.errors import UserError
from vcore_ds.files.aside import written_aside
from vcore_ds.files.user_paths import reading

EVALUATION = "evaluation.json"
OF_A_RUN = "evaluation"
"""Folder, in a run's, of the evaluation of its result that training with --eval ends with."""
FORMAT = 1
"""Number of the format described here."""
_EXPECTED = "the folder of a finished evaluation (vcore-ds eval --output)"


@dataclass(frozen=True)
class SampleResult:
    """A line of NAME.jsonl: one answer of the model to one problem."""

    problem_id: str
    sample: int
    """Number among the answers to this problem, from 0."""
    correct: bool
    answered: bool
    """Whether the output has an answer that could be graded."""
    truncated: bool
    """Whether the output ended at the limit on new tokens or at the model's longest sequence."""
    num_tokens: int
    """Tokens generated, the end-of-turn token included."""
    answer: str | None
    """What was graded; None where there is none."""
    output: str


@dataclass(frozen=True)
class TaskResult:
    """An entry of `tasks` in evaluation.json. Shares are of all samples, from 0 to 1."""

    num_problems: int
    num_samples_per_problem: int
    accuracy: float
    truncated_share: float
    unanswered_share: float
    mean_tokens: float


@dataclass(frozen=True)
class Evaluation:
    """What evaluation.json holds."""

    model: dict[str, Any]
    """`path` as it was given; `base` and `adapter` or None; `served_name` and `url` where a server was asked."""
    preset: str | None
    sampling: dict[str, Any]
    """Every field that was in effect; `max_new_tokens` is by task where the tasks differ, and `prompts` has a digest of
    each task's questions."""
    versions: dict[str, str]
    tasks: dict[str, TaskResult]
    generations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tasks that other programs grade (code): their file and the same numbers as `tasks`, without `accuracy`. They have
    no NAME.jsonl."""


def samples_path(folder: Path, task: str) -> Path:
    """Of the samples of a task, a line of JSON each."""
    return folder / f"{task}.jsonl"


def summarize(samples: Sequence[SampleResult]) -> TaskResult:
    """Counts and shares of a task's samples, of which there is at least one; every problem has as many."""
    num_problems = len({sample.problem_id for sample in samples})
    total = len(samples)
    return TaskResult(
        num_problems=num_problems,
        num_samples_per_problem=total // num_problems,
        accuracy=sum(sample.correct for sample in samples) / total,
        truncated_share=sum(sample.truncated for sample in samples) / total,
        unanswered_share=sum(not sample.answered for sample in samples) / total,
        mean_tokens=sum(sample.num_tokens for sample in samples) / total,
    )


# ---- writing -------------------------------------------------------------------------------------------------------


def write_samples(folder: Path, task: str, samples: Iterable[SampleResult]) -> None:
    """Writes NAME.jsonl, sorted by problem, then sample. Raises OSError."""
    ordered = sorted(samples, key=lambda sample: (sample.problem_id, sample.sample))
    lines = "".join(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in ordered)
    with written_aside(samples_path(folder, task)) as unfinished:
        unfinished.write_text(lines, encoding="utf-8")


def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Writes evaluation.json, when all NAME.jsonl are there. Raises OSError."""
    text = json.dumps({"format": FORMAT, **asdict(evaluation)}, indent=2, ensure_ascii=False) + "\n"
    with written_aside(folder / EVALUATION) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


# ---- reading -------------------------------------------------------------------------------------------------------


def read_evaluation(folder: Path) -> Evaluation:
    """What evaluation.json says.

    Raises:
        UserError: it is missing, damaged or of another format.
    """
    path = folder / EVALUATION
    with reading("", folder, _EXPECTED):
        if not path.is_file():
            raise UserError(f"{folder}: found no {EVALUATION}; expected {_EXPECTED}. Finish it, or name another folder")
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise UserError(
                f"{path}: format: found {values['format']!r}, expected {FORMAT}. Evaluate again with this version"
            )
        tasks = {name: TaskResult(**task) for name, task in values["tasks"].items()}
        found = {name: values[name] for name in ("model", "sampling", "versions")}
        found["generations"] = values.get("generations", {})
        if not all(isinstance(value, dict) for value in found.values()):
            raise TypeError
        return Evaluation(preset=values["preset"], tasks=tasks, **found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path}: is damaged; expected what vcore-ds eval writes there. Evaluate again") from None


def read_samples(folder: Path, task: str) -> list[SampleResult]:
    """The samples of a task, in the order of the file.

    Raises:
        UserError: the file is missing or damaged; with its line.
    """
    path = samples_path(folder, task)
    with reading("", path, _EXPECTED):
        text = path.read_text(encoding="utf-8", errors="replace")
    return [_sample(line, f"{path}:{number}") for number, line in enumerate(text.split("\n"), start=1) if line]


def _sample(line: str, where: str) -> SampleResult:
    try:
        sample = SampleResult(**json.loads(line))
        if not _has_its_types(sample):
            raise TypeError
        return sample
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"{where}: is damaged; expected a line of vcore-ds eval. Evaluate again") from None


def _has_its_types(sample: SampleResult) -> bool:
    expected: Mapping[str, Any] = {
        "problem_id": str,
        "sample": int,
        "correct": bool,
        "answered": bool,
        "truncated": bool,
        "num_tokens": int,
        "answer": (str, type(None)),
        "output": str,
    }
    return all(isinstance(getattr(sample, name), kind) for name, kind in expected.items())
