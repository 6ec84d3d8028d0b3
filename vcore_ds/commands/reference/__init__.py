"""`vcore-ds reference`: log-probabilities that iw-SFT needs where all parameters are trained."""

import argparse
from pathlib import Path

from vcore_ds.commands.arguments import add_recipe
from vcore_ds.commands.reference.request import check_request
from vcore_ds.common.imports import lasting_imports
from vcore_ds.config.load import load_recipe

HELP = "compute the log-probabilities that iw_sft needs"
DESCRIPTION = (
    "Compute, before training, the log-probability of every training sequence under the model that training starts "
    "from: one forward over the data. Alone it is one process; under a launcher, one per rank."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="file to write (.npz)")


def main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    check_request(recipe, arguments.output)
    with lasting_imports():
        from vcore_ds.commands.reference.compute import write_reference_log_probabilities

    write_reference_log_probabilities(recipe, arguments.output)
