"""A run's folder: its files, and which run it holds: a new one, one to resume or to extend, or a branch of another."""

import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, TypeAdapter

from vcore_ds.common import __version__
from vcore_ds.common.errors import UserError
from vcore_ds.common.locks import LOCK
from vcore_ds.common.paths import (
    check_folder,
    discard,
    read_json,
    reading,
    unfinished_path,
    write_json,
    write_text,
    writing,
)
from vcore_ds.config.load import make_override, read_resolved_recipe
from vcore_ds.config.problems import show
from vcore_ds.config.schema import Recipe, differing_keys
from vcore_ds.training import checkpoint_folder
from vcore_ds.training.evaluation_folder import RUN_EVALUATION

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PACKAGES = ("deepspeed", "transformers", "peft", "megatron-core", "triton")
"""Packages whose versions environment.json records where they are installed."""

RECIPE, ENVIRONMENT, METRICS, LOST_METRICS = "recipe.yaml", "environment.json", "metrics.jsonl", "metrics_lost.jsonl"
HELD_OUT = "held_out.json"
"""Held-out losses before and after training, by name of the set; written at the start, and just before the result."""
HELD_OUT_ROWS = "held_out_rows.json"
"""File -> its rows, from 1, that data.validation_share holds out."""
END = "end.json"
"""How the last attempt ended, if it failed or was stopped in its steps: `step`, and the first line of its message."""
STARTED_FORMAT = "%Y-%m-%dT%H:%M:%SZ"  # of `started` in environment.json, UTC
START = "start.txt"
"""The first lines on the screen, and details on data, balance, memory and passes, of each start."""
REPORT = "report.html"
TOKENS, LOST_TOKENS = "tokens", "tokens_lost"
"""Folders with the files of each optimizer step whose tokens are recorded, see `token_records.record_path`."""
PROFILES = "profile"  # folder with the profiles of steps
TRACKERS = "trackers"  # folder with the run's id at each tracker that assigns one
_TOKEN_RECORD = re.compile(r"(?:step|followed)_(\d{8,})\.npz")


def export_folder(folder: Path, *, is_adapter: bool) -> Path:
    """The folder of the result, which a run writes last: if it exists, the run has finished."""
    return folder / ("adapter" if is_adapter else "model")


def check_output_folder(folder: Path) -> None:
    """Raise UserError if the run could not write into its folder; leaves nothing there. On rank 0."""
    with writing("run.output_dir", folder):
        check_folder(folder)


def set_aside_result(folder: Path, num_steps: int, *, is_adapter: bool) -> list[Path]:
    """Rename the results of a finished run to `NAME_step_NNNNNNNN`, before the run goes on, or to that and `_2` where
    an earlier one has this name; return the new paths. On rank 0. `num_steps`: of the newest checkpoint, for a run
    without metrics; checkpoints may have been removed."""
    moved = []
    with suppress(UserError):
        num_steps = int(read_run_metrics(folder)[-1]["step"] or 0)
    with writing("run.output_dir", folder):
        result = export_folder(folder, is_adapter=is_adapter)
        for path in (folder / HELD_OUT, folder / RUN_EVALUATION, result):
            # Without a result held_out.json has the losses at the start alone, which the run that goes on keeps.
            if path.exists() and (path.name != HELD_OUT or result.exists()):
                number, target = 1, path.with_name(f"{path.stem}_step_{num_steps:08d}{path.suffix}")
                while target.exists():
                    number += 1
                    target = path.with_name(f"{path.stem}_step_{num_steps:08d}_{number}{path.suffix}")
                path.rename(target)
                moved.append(target)
    return moved


class _Start(BaseModel, extra="allow"):
    step: int


class _Environment(BaseModel, extra="allow"):
    """The entries of environment.json that are read again."""

    world_size: int | None = None
    resumed: list[_Start] = []


def read_environment(folder: Path) -> dict[str, Any]:
    """Read environment.json; empty if there is none. Raises UserError if it cannot be read."""
    path = folder / ENVIRONMENT
    contents, expected = TypeAdapter(_Environment), "the JSON object that a run writes there"
    return read_json(path, contents, expected).model_dump(exclude_unset=True) if path.is_file() else {}


def begin(
    folder: Path,
    recipe_yaml: str,
    world_size: int,
    num_done: int,
    kept: Mapping[str, Any] | None = None,
    description: str = "",
) -> int:
    """Write recipe.yaml, environment.json and the `description` of this start in start.txt; keep the lines of the first
    `num_done` steps in metrics.jsonl and their records in tokens/, and return the number of lines moved to
    metrics_lost.jsonl. On rank 0. `kept`: origin of the selected traces, for environment.json; None if all are used.
    Raises UserError if the folder cannot be written."""
    started = time.strftime(STARTED_FORMAT, time.gmtime())
    with writing("run.output_dir", folder):
        # First: a folder with a recipe counts as a run, so a run that is killed after this line can be resumed.
        write_text(folder / RECIPE, recipe_yaml)
        now = {"started": started, **describe_environment(world_size)} | ({} if kept is None else {"kept": kept})
        first = read_environment(folder)
        if first and num_done:  # a start whose steps are all repeated is recorded in start.txt only
            now = first | {"resumed": [*first.get("resumed", []), {"step": num_done, **now}]}
        write_json(folder / ENVIRONMENT, now)
        (folder / END).unlink(missing_ok=True)
        path = folder / START
        earlier = path.read_text(encoding="utf-8", errors="replace") + "\n" if path.is_file() else ""
        write_text(path, f"{earlier}==== {started}, after step {num_done} ====\n{description}\n")
        move_lost_tokens(folder, num_done)
        return move_lost_metrics(folder, num_done)


def move_lost_metrics(folder: Path, step: int) -> int:
    """Keep the lines of the first `step` steps in metrics.jsonl; move the others (later steps, which are repeated, and
    a truncated line) to metrics_lost.jsonl, and return their number."""
    path = folder / METRICS
    if not path.exists():
        return 0
    kept: list[str] = []
    lost: list[str] = []
    for line in path.read_text(errors="replace").splitlines():
        (kept if belongs_to_steps(line, step) else lost).append(line + "\n")
    if lost:
        with (folder / LOST_METRICS).open("a") as file:
            file.writelines(lost)
            file.flush()
            os.fsync(file.fileno())
        write_text(path, "".join(kept))
    return len(lost)


def move_lost_tokens(folder: Path, step: int) -> None:
    """Move the files of steps after `step` from tokens/ to tokens_lost/, which keeps the newest of each."""
    for path in (folder / TOKENS).glob("*.npz"):
        if parse_record_step(path) > step:
            (folder / LOST_TOKENS).mkdir(exist_ok=True)
            path.replace(folder / LOST_TOKENS / path.name)


def parse_record_step(path: Path) -> int:
    """Parse the optimizer step in the name of a file in tokens/; 0 for another name."""
    match = _TOKEN_RECORD.fullmatch(path.name)
    return 0 if match is None else int(match[1])


def describe_environment(world_size: int) -> dict[str, Any]:
    """Describe command, versions, commit and devices, as needed to repeat a run."""
    import torch  # takes seconds, and `vcore-ds check` only checks the folder

    from vcore_ds.models.cpu_matmul import computes_in_fp32

    # Like `distributed.device.uses_gpu`, but without its error.
    num_gpus = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else torch.cuda.device_count()
    precision = "fp32" if computes_in_fp32() else "native"
    versions = {"vcore_ds": __version__, "torch": torch.__version__}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": versions,
        "git_commit": _git_commit(),
        "host": platform.node(),
        "devices": [torch.cuda.get_device_name(i) for i in range(num_gpus)] or [platform.machine()],
        "cpu": {"instructions": torch.backends.cpu.get_cpu_capability(), "bf16_products": precision},
        "world_size": world_size,
    }


def _git_commit() -> str | None:
    """Return the commit of the package's checkout; None if it is installed otherwise."""
    try:
        described = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None


@dataclass(frozen=True)
class HeldOutLosses:
    """Contents of held_out.json: nats, by name of the set."""

    before: dict[str, float]
    after: dict[str, float]
    normalization: Literal["sequence", "token"] = "sequence"
    """Mean over sequences of their tokens' mean, or over all tokens."""


_HELD_OUT = TypeAdapter(HeldOutLosses)


def write_held_out_losses(
    folder: Path, before: dict[str, float], after: dict[str, float], normalization: Literal["sequence", "token"]
) -> None:
    """Write held_out.json; `after` is empty until the run ends. On rank 0."""
    with writing("run.output_dir", folder):
        write_json(folder / HELD_OUT, asdict(HeldOutLosses(before, after, normalization)))


def write_held_out_rows(folder: Path, rows: Sequence[tuple[str, int]]) -> None:
    """Write held_out_rows.json from (file, row from 1) of each held-out sequence. On rank 0."""
    by_file: dict[str, list[int]] = {}
    for file, row in rows:
        by_file.setdefault(file, []).append(row)
    with writing("run.output_dir", folder):
        write_json(folder / HELD_OUT_ROWS, by_file)


_EXPECTED_LINE = "the JSON object of an optimizer step, with `step` from 1 on and ascending"


def read_run_recipe(folder: Path) -> Recipe:
    """Read the resolved recipe of a run. Raises UserError if the folder holds no run, or one of an unknown version."""
    with reading("RUN", folder, "a run's folder (run.output_dir)"):
        is_run = (folder / RECIPE).is_file()
    if not is_run:
        raise UserError(f"RUN: {folder}: found no {RECIPE} there; expected a run's folder (run.output_dir)")
    return read_resolved_recipe(folder / RECIPE)


def read_run_metrics(folder: Path) -> list[dict[str, float | None]]:
    """Read the numbers in the lines of metrics.jsonl, at least one line; None for missing or non-finite numbers. Raises
    UserError if the file is missing, empty or damaged."""
    path = folder / METRICS
    with reading("RUN", folder, "a run's folder (run.output_dir)"):
        if not path.is_file():
            raise UserError(f"RUN: {folder}: found no {METRICS} there; expected a run that has taken a step")
        written = path.read_bytes().splitlines()
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(written, start=1):
        line = _parse_line(text)
        if line is None or (lines and line["step"] <= lines[-1]["step"]):
            raise UserError(
                f"{path}: line {number}: found {text[:80].decode(errors='replace')!r}; expected {_EXPECTED_LINE}. "
                "Remove the line: the others can be read"
            )
        lines.append(line)
    if not lines:
        raise UserError(f"{path}: is empty; expected a run that has taken a step")
    return lines


def belongs_to_steps(text: str, num_done: int) -> bool:
    """Whether a line of metrics.jsonl is complete and of one of the first `num_done` steps."""
    line = _parse_line(text)
    return line is not None and line["step"] <= num_done


def _parse_line(text: str | bytes) -> dict[str, Any] | None:
    """Parse the numbers in a line of metrics.jsonl, `step` among them; None if it is damaged."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or type(values.get("step")) is not int or values["step"] < 1:
        return None
    numbers = {key: value for key, value in values.items() if value is None or type(value) in (int, float)}
    return {key: None if value is None or not math.isfinite(value) else value for key, value in numbers.items()}


def read_held_out_losses(folder: Path) -> HeldOutLosses:
    """Read the held-out losses; empty if the run measured none. Raises UserError if held_out.json cannot be read."""
    path = folder / HELD_OUT
    if not path.is_file():
        return HeldOutLosses({}, {})
    return read_json(path, _HELD_OUT, "the held-out losses that a run writes there")


def load_run_tokenizer(folder: Path, model: str, path: str | None) -> "Tokenizer":
    """Load the tokenizer at `path`; without a path, that of the run's result or else of its `model`. Raises UserError
    if there is none."""
    results = [result for name in ("adapter", "model") if (result := folder / name).is_dir()]
    # The result's first: it needs no network, and a relative model.path depends on the working directory.
    place = path or (str(results[0]) if results else model)
    with suppress(Exception):  # the Rust library raises this class
        from tokenizers import Tokenizer

        # transformers imports torch for its AutoTokenizer, which takes 4 s.
        tokenizer: Tokenizer = Tokenizer.from_file(str(Path(place) / "tokenizer.json"))
        tokenizer.no_padding()  # which the file may ask for
        return tokenizer
    from vcore_ds.data.tokenization import load_tokenizer

    try:
        return load_tokenizer(place, "model.path" if path is None else "--tokenizer").backend_tokenizer
    except UserError as error:
        if path is not None:
            raise
        raise UserError(f"{folder}: {error}; expected the tokenizer of the run. Name it with --tokenizer") from None


class FinishedRun(UserError):
    """run.output_dir holds a run that has finished."""


def can_resume(recipe: Recipe) -> bool:
    """Whether run.output_dir holds an unfinished run of this recipe; False if it is new or empty. Raises FinishedRun if
    the run has finished, UserError for anything else, which a run never overwrites."""
    with writing("run.output_dir", Path(recipe.run.output_dir)):
        return _holds_this_run(recipe)


def _holds_this_run(recipe: Recipe) -> bool:
    folder = Path(recipe.run.output_dir)
    with suppress(FileNotFoundError):
        folder.stat()  # raises for impossible paths (below a file, circular links), which `is_file` does not
    is_run = (folder / RECIPE).is_file()
    if recipe.checkpoint.resume == "never" or not is_run:
        # A branch that was killed before its recipe was written starts over.
        copied = {"checkpoints", TOKENS, METRICS, ENVIRONMENT} if recipe.checkpoint.branch_from is not None else set()
        allowed = {LOCK, *copied, *(unfinished_path(Path(name)).name for name in (RECIPE, METRICS, ENVIRONMENT))}
        if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - allowed):
            what = "holds another run" if is_run else "is not an empty folder"
            raise UserError(
                f"run.output_dir: {folder}: {what}; expected a new or empty one. Set run.output_dir, or remove it"
            )
        if recipe.checkpoint.branch_from is not None:
            _check_branch(recipe, Path(recipe.checkpoint.branch_from))
        return False
    try:
        earlier = read_resolved_recipe(folder / RECIPE)
    except UserError as error:
        raise UserError(
            f"run.output_dir: {folder}: holds another run, with a recipe that this version does not know: {error}; "
            "expected a new folder, or a run of this recipe. Set run.output_dir"
        ) from None
    go_on = make_override("lora.adapter" if earlier.lora and recipe.lora else "model.path", folder)
    if differing := differing_keys(earlier, recipe):
        raise UserError(
            f"run.output_dir: {folder}: holds a run of another recipe:\n{_list_differences(differing)}\n"
            "expected the same values, to resume it, or a new folder. Set these keys as they are there, or set "
            f"run.output_dir: with {go_on}, the new run begins from the result of this one"
        )
    result = export_folder(folder, is_adapter=recipe.lora is not None)
    now, before = recipe.schedule, earlier.schedule
    lengths = (now.num_steps, before.num_steps), (now.num_epochs, before.num_epochs)
    # Steps and epochs are compared once the data are read: a shorter schedule finds no checkpoint to continue from.
    is_longer = all(new is None or old is None or new > old for new, old in lengths)
    if result.exists() and not is_longer:
        raise FinishedRun(
            f"run.output_dir: {folder}: holds a run that has finished, with its result in "
            f"{result.name}/; expected a new folder, or a run that was stopped. Set run.output_dir (with "
            f"{go_on} to go on from the result), or raise schedule.num_steps to make the run longer"
        )
    return True


def _check_branch(recipe: Recipe, checkpoint: Path) -> None:
    """Raise UserError if a run cannot branch from this checkpoint."""
    where = f"checkpoint.branch_from: {checkpoint}"
    with reading("checkpoint.branch_from", checkpoint, "a checkpoint that can be read"):
        if checkpoint_folder.parse_step(checkpoint) is None or not (checkpoint / checkpoint_folder.COMPLETE).is_file():
            raise UserError(f"{where}: found no finished checkpoint; expected RUN/checkpoints/step_NNNNNNNN")
    if differing := differing_keys(read_resolved_recipe(checkpoint / RECIPE), recipe):
        raise UserError(
            f"{where}: is of a run of another recipe:\n{_list_differences(differing)}\n"
            "expected the same values; keys of schedule may differ. Set these keys as they are there"
        )


def _list_differences(differing: Mapping[str, tuple[Any, Any]]) -> str:
    return "\n".join(f"  {key}: {show(value)} there, {show(wanted)} here" for key, (value, wanted) in differing.items())


def begin_branch(checkpoint: Path, folder: Path) -> None:
    """Fill a new run's folder with `checkpoint`, and its source's metrics and recorded tokens up to that step, as hard
    links if possible. On rank 0, which holds the folder's lock."""
    run, step = checkpoint.parents[1], checkpoint_folder.parse_step(checkpoint)
    assert step is not None  # checked by `can_resume`
    with writing("run.output_dir", folder):
        target = folder / "checkpoints" / checkpoint.name
        discard(target)
        discard(unfinished_path(target))
        shutil.copytree(checkpoint, unfinished_path(target), copy_function=_link_or_copy)
        unfinished_path(target).rename(target)
        tokens = folder / TOKENS
        tokens.mkdir(exist_ok=True)
        for path in (run / TOKENS).glob("*.npz"):
            if parse_record_step(path) <= step:
                (tokens / path.name).unlink(missing_ok=True)
                _link_or_copy(path, tokens / path.name)
        names = [name for name in (METRICS, ENVIRONMENT) if (run / name).is_file()]
        texts = {name: (run / name).read_text(encoding="utf-8") for name in names}
        if METRICS in texts:
            lines = texts[METRICS].splitlines(keepends=True)
            texts[METRICS] = "".join(line for line in lines if belongs_to_steps(line, step))
        # Last: a folder with a recipe is a run, which the same command resumes.
        for name, text in (texts | {RECIPE: (checkpoint / RECIPE).read_text(encoding="utf-8")}).items():
            write_text(folder / name, text)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
