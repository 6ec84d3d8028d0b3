"""`vcore-ds preflight`: check that all nodes are ready for a run, before it starts."""

import argparse

from vcore_ds.commands.arguments import add_recipe
from vcore_ds.common.imports import lasting_imports
from vcore_ds.config.load import load_recipe

HELP = "check that all nodes are ready for a run"
DESCRIPTION = (
    "Compare packages, commit, GPUs, drivers, clocks, networks, files and free disk of all nodes, and time an "
    "all-reduce. Start it as train, one process per rank. Exit code 2 if a node is not ready, with what to do about "
    "it. Example: deepspeed --hostfile hosts --module vcore_ds.commands.cli preflight RECIPE.yaml"
)

add_arguments = add_recipe


def main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    with lasting_imports():
        from vcore_ds.commands.preflight.inspection import preflight

    preflight(recipe)
