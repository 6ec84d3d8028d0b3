"""`vcore-ds reference`: the log-probabilities that iw-SFT needs if all parameters are trained."""

import argparse
from pathlib import Path

from vcore_ds.commands.arguments import add_recipe
from vcore_ds.common.errors import UserError
from vcore_ds.common.imports import lasting_imports
from vcore_ds.common.paths import refuse_existing
from vcore_ds.config.load import load_recipe

HELP = "compute the reference log-probabilities for iw_sft"
DESCRIPTION = (
    "Compute the log-probability of every training sequence under the initial model, with one forward over the data. "
    "Full fine-tuning with methods/iw_sft.yaml needs it before training; LoRA does not. Runs as one process, or under "
    "a launcher as one process per rank. Example: vcore-ds reference RECIPE.yaml --output reference.npz"
)
NEW_FILE = "a new file in a folder that can be written"
"""What `--output` must be, for messages."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="file to write (.npz)")


def main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if recipe.lora is not None:
        raise UserError(
            "lora: found adapters; expected null: with lora the reference of iw_sft is the model without its adapters, "
            "and training needs no file"
        )
    refuse_existing(arguments.output, NEW_FILE)
    with lasting_imports():
        from vcore_ds.commands.reference.compute import write_reference_log_probabilities

    write_reference_log_probabilities(recipe, arguments.output)
