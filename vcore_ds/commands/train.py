"""`vcore-ds train`: a run from a recipe."""

import argparse

from vcore_ds.commands.arguments import add_recipe
from vcore_ds.common.imports import lasting_imports
from vcore_ds.config.load import load_recipe

HELP = "run a recipe"
DESCRIPTION = (
    "Run a recipe: alone it is one process; under deepspeed, torchrun or srun, one per rank. Several ranks: "
    "deepspeed --module vcore_ds.commands.cli train RECIPE, or a script of launch_scripts/."
)

add_arguments = add_recipe


def main(arguments: argparse.Namespace, *, advice_if_long: str = "", says_next: bool = True) -> None:
    """The keywords are those of `vcore_ds.train.run.train`."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    with lasting_imports():  # after the recipe: torch and deepspeed take seconds to import, a typo should not
        from vcore_ds.train.run import train

    train(recipe, advice_if_long=advice_if_long, says_next=says_next)
