"""`vcore-ds preflight`: whether all nodes are fit for a run, before its ranks start."""

import argparse

from vcore_ds.commands.arguments import add_recipe
from vcore_ds.common.imports import lasting_imports
from vcore_ds.config.load import load_recipe

HELP = "compare the nodes of a run before it starts"
DESCRIPTION = (
    "Started like train, one process per rank: compares packages, commit, GPUs, files and free disk of all nodes, and "
    "times an all-reduce. Exit code 2 where a node is not fit, with what to do about it."
)

add_arguments = add_recipe


def main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    with lasting_imports():
        from vcore_ds.commands.preflight.inspection import preflight

    preflight(recipe)
