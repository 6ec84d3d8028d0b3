"""A run's folder: recipe.yaml, environment.json, metrics.jsonl, and the result. It is new, or resumed."""

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vcore_ds import __version__
from vcore_ds.config import Recipe, differing_keys, dump_recipe, read_resolved_recipe
from vcore_ds.errors import UserError
from vcore_ds.files.checkpoint_folder import PARTIAL, replace_flushed
from vcore_ds.files.run_lock import LOCK

PACKAGES = ("torch", "deepspeed", "transformers", "peft")


RECIPE, ENVIRONMENT, METRICS, LOST_METRICS = "recipe.yaml", "environment.json", "metrics.jsonl", "metrics_lost.jsonl"


def export_folder(recipe: Recipe) -> Path:
    """Where the result goes. It is the last thing that a run writes: a run whose result is there has finished."""
    return Path(recipe.run.output_dir) / ("adapter" if recipe.lora is not None else "model")


def can_resume(recipe: Recipe) -> bool:
    """Whether run.output_dir holds this very run, unfinished; False where it is new or empty.

    Raises:
        UserError: it holds something else, which a run never overwrites.
    """
    folder = Path(recipe.run.output_dir)
    _refuse_impossible(folder)
    is_run = (folder / RECIPE).is_file()
    if recipe.checkpoint.resume == "never" or not is_run:
        if folder.exists() and (
            not folder.is_dir() or {path.name for path in folder.iterdir()} - {RECIPE + PARTIAL, LOCK}
        ):
            what = "holds another run" if is_run else "is not an empty folder"
            raise UserError(
                f"run.output_dir: {folder}: {what}; expected a new or empty one. Set run.output_dir, or remove it"
            )
        return False
    if export_folder(recipe).exists():
        raise UserError(
            f"run.output_dir: {folder}: holds a run that has finished, with its result in "
            f"{export_folder(recipe).name}/; expected a new folder, or a run that was stopped. Set run.output_dir"
        )
    try:
        there = read_resolved_recipe(folder / RECIPE)
    except UserError as error:
        raise UserError(
            f"run.output_dir: {folder}: holds another run, with a recipe that this version does not know: {error}; "
            "expected a new folder, or a run of this recipe. Set run.output_dir"
        ) from None
    differing = differing_keys(there, recipe)
    if differing:
        lines = "\n".join(f"  {key}: {value!r} there, {wanted!r} here" for key, (value, wanted) in differing.items())
        raise UserError(
            f"run.output_dir: {folder}: holds a run of another recipe:\n{lines}\n"
            "expected the same values, to go on with it, or a new folder. Set these keys as they are there, or set "
            "run.output_dir"
        )
    return True


def _refuse_impossible(folder: Path) -> None:
    """Raises UserError for a path that no folder can have: below a file, through a circular link, or too long."""
    try:
        folder.stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        shown = str(folder) if len(str(folder)) <= 200 else f"{str(folder)[:200]}..."
        raise UserError(
            f"run.output_dir: {shown}: cannot be used: {error.strerror}; expected a new or empty folder. Set "
            "run.output_dir"
        ) from None


def begin(recipe: Recipe, world_size: int, num_done: int) -> int:
    """Writes recipe.yaml and environment.json, and leaves the lines of the first `num_done` steps in metrics.jsonl. By
    rank 0 only. Returns the number of lines that went to metrics_lost.jsonl.

    Args:
        num_done: optimizer steps done, of a run that is resumed from a checkpoint.
    """
    folder = Path(recipe.run.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    # First: a folder counts as a run by its recipe, so one that is killed here is resumed as one.
    replace_flushed(folder / RECIPE, dump_recipe(recipe))
    now = {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **environment(world_size)}
    if (folder / ENVIRONMENT).is_file():
        first = json.loads((folder / ENVIRONMENT).read_text())
        now = first | {"resumed": [*first.get("resumed", []), {"step": num_done, **now}]}
    replace_flushed(folder / ENVIRONMENT, json.dumps(now, indent=2) + "\n")
    return move_lost_metrics(folder, num_done)


def move_lost_metrics(folder: Path, step: int) -> int:
    """Leaves the lines of the first `step` steps in metrics.jsonl; the steps after them are taken again, and their
    lines go to metrics_lost.jsonl, as does one that was not written to its end. Returns how many went.
    """
    path = folder / METRICS
    if not path.exists():
        return 0
    kept, lost = [], []
    for line in path.read_text(errors="replace").splitlines():
        (kept if _step_of(line) in range(1, step + 1) else lost).append(line + "\n")
    if lost:
        with (folder / LOST_METRICS).open("a") as file:
            file.writelines(lost)
            file.flush()
            os.fsync(file.fileno())
        replace_flushed(path, "".join(kept))
    return len(lost)


def _step_of(line: str) -> int | None:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None


def environment(world_size: int) -> dict[str, Any]:
    """Versions, commit, devices: what one needs to know to repeat a run."""
    import torch  # here, because `vcore-ds check` asks for the folder alone and torch takes seconds to import

    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": {"vcore_ds": __version__, **{name: version(name) for name in PACKAGES}},
        "git_commit": _git_commit(),
        "host": platform.node(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or [platform.machine()],
        "world_size": world_size,
    }


def _git_commit() -> str | None:
    """Of the package's own checkout; None where it is installed from elsewhere."""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
