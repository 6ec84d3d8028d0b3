"""`vcore-ds train`: train a recipe."""

import argparse

from vcore_ds.commands.arguments import add_recipe
from vcore_ds.common.imports import lasting_imports
from vcore_ds.config.load import load_recipe
from vcore_ds.data.prepare.sources import check_inputs
from vcore_ds.training.run_folder import can_resume

HELP = "train a recipe"
DESCRIPTION = (
    "Train a recipe. By itself the command is a single process; for several GPUs start it with a launcher (deepspeed, "
    "torchrun, srun), one process per rank. Run the same command again to resume. Example: "
    "deepspeed --module vcore_ds train RECIPE.yaml."
)

add_arguments = add_recipe


def main(arguments: argparse.Namespace, *, says_next: bool = True) -> None:
    """Train; `says_next` as in `vcore_ds.training.run.train`."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    can_resume(recipe)  # as `train` does, which takes seconds to import
    check_inputs(recipe.model.path, recipe.data)
    with lasting_imports():
        from vcore_ds.training.run import train

    train(recipe, says_next=says_next)
