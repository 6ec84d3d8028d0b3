"""Which run a folder holds: a new one, one to resume or to extend, or a branch of another run's checkpoint."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vcore_ds.common.errors import UserError
from vcore_ds.common.locks import LOCK
from vcore_ds.common.paths import discard, reading, unfinished_path, write_text, writing
from vcore_ds.config.resume import differing_keys, read_resolved_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import ScheduleConfig
from vcore_ds.training import run_folder
from vcore_ds.training.run_folder import ENVIRONMENT, METRICS, RECIPE, TOKENS

_LAYERS_ADVICE = (
    ". A checkpoint is resumed with the model.provider and parallel.tensor that it was saved with: to change them, "
    "export it (vcore-ds export) and give the result to a new run as its model.path"
)


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
    if differing := differing_keys(earlier, recipe):
        raise UserError(
            f"run.output_dir: {folder}: holds a run of another recipe:\n{_list_differences(differing)}\n"
            "expected the same values, to resume it, or a new folder. Set these keys as they are there, or set "
            "run.output_dir" + (_LAYERS_ADVICE if differing.keys() & {"model.provider", "parallel.tensor"} else "")
        )
    result = run_folder.export_folder(folder, is_adapter=recipe.lora is not None)
    if result.exists() and not _is_longer(recipe.schedule, earlier.schedule):
        raise FinishedRun(
            f"run.output_dir: {folder}: holds a run that has finished, with its result in "
            f"{result.name}/; expected a new folder, or a run that was stopped. Set run.output_dir, or raise "
            "schedule.num_steps to make the run longer"
        )
    return True


def _is_longer(now: ScheduleConfig, before: ScheduleConfig) -> bool:
    """Whether a schedule has more steps or epochs than that of the earlier run."""
    if before.num_steps is not None and now.num_steps is not None:
        return now.num_steps > before.num_steps
    if before.num_epochs is not None and now.num_epochs is not None:
        return now.num_epochs > before.num_epochs
    return True  # known once the data are read; a shorter schedule finds no checkpoint to continue from


def _check_branch(recipe: Recipe, checkpoint: Path) -> None:
    """Raise UserError if a run cannot branch from this checkpoint."""
    from vcore_ds.engine import checkpoint_folder  # imports deepspeed: seconds

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
    return "\n".join(f"  {key}: {value!r} there, {wanted!r} here" for key, (value, wanted) in differing.items())


def begin_branch(checkpoint: Path, folder: Path) -> None:
    """Fill a new run's folder with `checkpoint`, and its source's metrics and recorded tokens up to that step, as hard
    links if possible. On rank 0, which holds the folder's lock."""
    from vcore_ds.engine import checkpoint_folder  # imports deepspeed: seconds

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
            if run_folder.parse_record_step(path) <= step:
                (tokens / path.name).unlink(missing_ok=True)
                _link_or_copy(path, tokens / path.name)
        names = [name for name in (METRICS, ENVIRONMENT) if (run / name).is_file()]
        texts = {name: (run / name).read_text(encoding="utf-8") for name in names}
        if METRICS in texts:
            lines = texts[METRICS].splitlines(keepends=True)
            texts[METRICS] = "".join(line for line in lines if run_folder.belongs_to_steps(line, step))
        # Last: a folder with a recipe is a run, which the same command resumes.
        for name, text in (texts | {RECIPE: (checkpoint / RECIPE).read_text(encoding="utf-8")}).items():
            write_text(folder / name, text)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
