"""The checkpoints with the lowest held-out loss (`checkpoint.keep_best`): what a run checks, compares and says."""

import hashlib
import shlex
from collections.abc import Mapping
from pathlib import Path

from vcore_ds.common.errors import UserError
from vcore_ds.config.schema import Recipe, first_compared_step
from vcore_ds.data.dataset import Dataset
from vcore_ds.engine.checkpoint_folder import step_folder
from vcore_ds.train.checkpoints import Checkpoints
from vcore_ds.train.console import Console


def check_compared(recipe: Recipe, num_steps: int) -> None:
    """Raise UserError where `checkpoint.keep_best` would compare nothing; a rule of the recipe has the other cases."""
    first = first_compared_step(recipe)
    if recipe.checkpoint.keep_best is not None and first is not None and first >= num_steps:
        raise UserError(
            f"checkpoint.keep_best: found step {first} as the first with a checkpoint and an evaluation, and "
            f"{num_steps} as the last of the run; expected one before it. Lower checkpoint.every_steps and "
            "run.validate_every to the same number"
        )


def make_digest(validation: Mapping[str, Dataset]) -> str:
    """Digest of the held-out sets and their names."""
    text = "\n".join(f"{name} {dataset.digest}" for name, dataset in sorted(validation.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def say_best(checkpoints: Checkpoints, num_steps: int, console: Console) -> None:
    """Name the checkpoint with the lowest held-out loss, if the run compares them and it is not the last. On rank 0."""
    ranked = checkpoints.rank_by_loss()
    if ranked and ranked[0][1].name != step_folder(Path(), num_steps).name:
        loss, folder = ranked[0]
        console.say(
            f"Lowest held-out loss: {loss:.4f}, {folder.name}. As a model: vcore-ds export "
            f"{shlex.quote(str(folder.parents[1]))} --checkpoint {folder.name}"
        )
