"""Extensions of a run by another schedule, and branches from another run's checkpoint."""

import os
import shutil
from pathlib import Path

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import discard, unfinished_path, write_text, writing
from vcore_ds.config.resume import read_resolved_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import run_on_first_rank
from vcore_ds.engine import checkpoint_folder
from vcore_ds.training import run_folder
from vcore_ds.training.checkpoint_write import RunState
from vcore_ds.training.checkpoints import Checkpoints
from vcore_ds.training.console import Console
from vcore_ds.training.feed import Feed
from vcore_ds.training.run_folder import ENVIRONMENT, METRICS, RECIPE
from vcore_ds.training.schedule import Schedule, derive_schedule


def find_common_checkpoint(
    checkpoints: Checkpoints, newest: tuple[Path, RunState], schedule: Schedule, feed: Feed, console: Console
) -> tuple[Path, RunState]:
    """Find the newest checkpoint up to which the schedule has the learning rates of the run of `newest`. A collective.
    Raises UserError if there is none."""
    folder, state = newest
    recipe = layout.gather_objects("job", run_on_first_rank(lambda: read_resolved_recipe(folder / RECIPE)))[0]
    assert recipe is not None  # rank 0's
    before = derive_schedule(
        recipe.schedule, recipe.optimizer.learning_rate, len(feed.dataset), feed.main_order.batch_size
    )
    num_common = before.count_common_steps(schedule)
    if state.step <= num_common:
        return newest
    common = checkpoints.find_newest(num_common)
    if common is None:
        raise UserError(_describe_difference(folder, before, schedule, num_common))
    console.say(f"The learning rate differs from step {num_common + 1} on: the run goes back to step {common[1].step}")
    return common


def _describe_difference(folder: Path, before: Schedule, now: Schedule, num_common: int) -> str:
    if num_common == now.num_steps:
        difference = f"{now.num_steps:,} steps, and the checkpoint {folder} of a later one"
    else:
        rates = [f"{schedule.learning_rate(num_common):.6g}" for schedule in (now, before)]
        difference = (
            f"learning rate {rates[0]} for step {num_common + 1}, which {folder} has taken with {rates[1]}, and no "
            "checkpoint before it"
        )
    advice = ""
    if now.kind in ("cosine", "linear"):
        advice = (
            f" With {now.kind} each learning rate depends on the number of steps; runs with schedule.kind constant or "
            "wsd can be made longer."
        )
    elif before.num_warmup_steps != now.num_warmup_steps:
        advice = f" Set schedule.warmup_steps to {before.num_warmup_steps}."
    return (
        f"schedule: found {difference}; expected the learning rates that the run has taken.{advice} Set the keys of "
        "schedule as they were, or run.output_dir to a new folder"
    )


def begin_branch(recipe: Recipe) -> None:
    """Fill a new run's folder with the checkpoint of `checkpoint.branch_from`, and its source's metrics and recorded
    tokens up to that step, as hard links if possible. On rank 0, which holds the folder's lock."""
    assert recipe.checkpoint.branch_from is not None
    checkpoint, folder = Path(recipe.checkpoint.branch_from), Path(recipe.run.output_dir)
    run, step = checkpoint.parents[1], checkpoint_folder.parse_step(checkpoint)
    assert step is not None  # checked by `run_folder.can_resume`
    with writing("run.output_dir", folder):
        target = folder / "checkpoints" / checkpoint.name
        discard(target)
        discard(unfinished_path(target))
        shutil.copytree(checkpoint, unfinished_path(target), copy_function=_link_or_copy)
        unfinished_path(target).rename(target)
        tokens = folder / run_folder.TOKENS
        tokens.mkdir(exist_ok=True)
        for path in (run / run_folder.TOKENS).glob("*.npz"):
            if run_folder.parse_record_step(path) <= step:
                (tokens / path.name).unlink(missing_ok=True)
                _link_or_copy(path, tokens / path.name)
        names = [name for name in (METRICS, ENVIRONMENT) if (run / name).is_file()]
        texts = {name: (run / name).read_text(encoding="utf-8") for name in names}
        if METRICS in texts:
            lines = texts[METRICS].splitlines(keepends=True)
            texts[METRICS] = "".join(line for line in lines if run_folder.parse_line_step(line) in range(1, step + 1))
        # Last: a folder with a recipe is a run, which the same command resumes.
        for name, text in (texts | {RECIPE: (checkpoint / RECIPE).read_text(encoding="utf-8")}).items():
            write_text(folder / name, text)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
