"""An evaluation's folder: evaluation.json with the results, written last, and NAME.jsonl with a task's samples."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from glob import glob
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import compute_file_digest, parse_json, read_json, reading, write_text

EVALUATION = "evaluation.json"
RUN_EVALUATION = "evaluation"
"""Folder, in a run's, of the evaluation of its result that training with --eval ends with."""
_EXPECTED = "the folder of a finished evaluation (vcore-ds eval --output)"
_REMEDY = "Evaluate again, with this version"
_EXACT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, config=_EXACT)
class SampleResult:
    """A line of NAME.jsonl: one answer of the model to one problem."""

    problem_id: str
    sample: int  # number among the answers to this problem, from 0
    correct: bool
    answered: bool  # whether the output has an answer that could be graded
    truncated: bool  # whether the output ended at the limit on new tokens or at the model's longest sequence
    num_tokens: int  # tokens generated, the end-of-turn token included
    answer: str | None
    output: str


@dataclass(frozen=True, config=_EXACT)
class TaskResult:
    """An entry of `tasks` in evaluation.json. Shares are of all samples, from 0 to 1."""

    num_problems: int
    num_samples_per_problem: int
    accuracy: float
    truncated_share: float
    unanswered_share: float
    mean_tokens: float


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="ignore"))
class Evaluation:
    """Contents of evaluation.json."""

    model: dict[str, Any]
    """`path` as it was given; `base` and `adapter` or None; `digest` of the weights of adapter or model, if they are on
    this machine; `served_name` and `url` where a server was asked."""
    preset: str | None
    sampling: dict[str, Any]
    """Every field that was in effect; `max_new_tokens` is by task where the tasks differ, and `prompts` has a digest of
    each task's questions."""
    versions: dict[str, str]
    tasks: dict[str, TaskResult]
    format: Literal[1] = 1


_EVALUATION, _SAMPLE = TypeAdapter(Evaluation), TypeAdapter(SampleResult)


def samples_path(folder: Path, task: str) -> Path:
    """The file of a task's samples, a line of JSON each."""
    return folder / f"{task}.jsonl"


def compute_weights_digest(folder: Path) -> str | None:
    """Compute a digest of the weight files of an adapter or a model; None without any. Raises OSError."""
    files = sorted([*folder.glob("adapter_model*"), *folder.glob("model*.safetensors")])
    digests = [f"{file.name} {compute_file_digest(file)}" for file in files]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest() if digests else None


def find_evaluations(run: Path, result: Path) -> dict[Path, Evaluation]:
    """Find the finished evaluations of a run's result, by the digest of its weights, by folder: RUN/evaluation first,
    then those in and beside the run's folder and in the working directory, up to two folders deep. Raises UserError
    where that in RUN/evaluation is damaged."""
    default = run / RUN_EVALUATION
    evaluations = {default: read_evaluation(default)} if (default / EVALUATION).is_file() else {}
    places = dict.fromkeys([run.resolve().parent, Path.cwd()])
    # `glob` passes over folders that vanish or cannot be read, unlike `Path.glob`.
    patterns = [f"{depth}/{EVALUATION}" for depth in ("*", "*/*")]
    paths = [place / name for place in places for one in patterns for name in sorted(glob(one, root_dir=place))]
    digest: str | None = None
    for path in dict.fromkeys(paths):
        with suppress(UserError, OSError):  # damaged, or of another version: the run is none the worse
            evaluation = read_evaluation(path.parent)
            if (recorded := evaluation.model.get("digest")) is not None and path.parent != default.resolve():
                digest = digest or compute_weights_digest(result)
                if recorded == digest:
                    evaluations[path.parent] = evaluation
    return evaluations


def summarize(samples: Sequence[SampleResult]) -> TaskResult:
    """Summarize a task's samples: at least one, and the same number for every problem."""
    num_problems, total = len({sample.problem_id for sample in samples}), len(samples)
    return TaskResult(
        num_problems=num_problems,
        num_samples_per_problem=total // num_problems,
        accuracy=sum(sample.correct for sample in samples) / total,
        truncated_share=sum(sample.truncated for sample in samples) / total,
        unanswered_share=sum(not sample.answered for sample in samples) / total,
        mean_tokens=sum(sample.num_tokens for sample in samples) / total,
    )


def write_samples(folder: Path, task: str, samples: Iterable[SampleResult]) -> None:
    """Write NAME.jsonl. Raises OSError."""
    lines = "".join(json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples)
    write_text(samples_path(folder, task), lines)


def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Write evaluation.json, once every NAME.jsonl is complete. Raises OSError."""
    contents = {"format": evaluation.format, **asdict(evaluation)}  # first in the file
    write_text(folder / EVALUATION, json.dumps(contents, indent=2, ensure_ascii=False) + "\n")


def read_evaluation(folder: Path, option: str = "") -> Evaluation:
    """Read evaluation.json. `option`: the command-line option that names the folder, for messages; may be empty. Raises
    UserError if it is missing, damaged or of another format."""
    path = folder / EVALUATION
    with reading(option, folder, _EXPECTED):
        if not path.is_file():
            place = f"{option}: {folder}" if option else str(folder)
            raise UserError(f"{place}: found no {EVALUATION}; expected {_EXPECTED}. Finish it, or name another folder")
    return read_json(path, _EVALUATION, "what vcore-ds eval writes there", _REMEDY)


def read_samples(folder: Path, task: str) -> list[SampleResult]:
    """Read the samples of a task, in the order of the file. Raises UserError if the file is missing, or a line
    damaged."""
    path = samples_path(folder, task)
    with reading("", path, _EXPECTED):
        lines = path.read_bytes().split(b"\n")
    return [
        parse_json(line, _SAMPLE, f"{path}:{number}", "a line of vcore-ds eval", _REMEDY)
        for number, line in enumerate(lines, start=1)
        if line
    ]
