"""`vcore-ds check`: a recipe, resolved and validated, without a GPU."""

import argparse

from vcore_ds.commands.arguments import add_recipe, positive
from vcore_ds.config import deepspeed_config, dump_recipe, load_recipe, plan_batch
from vcore_ds.files.run_folder import can_resume, check_output_folder

HELP = "validate a recipe without a GPU"
DESCRIPTION = (
    "Resolve and validate a recipe; print it with all its defaults, and how its batch is spread over the ranks. Needs "
    "no GPU, model or data, and writes nothing."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--ranks",
        type=positive,
        default=1,
        metavar="N",
        help="spread the batch over N data-parallel ranks: the GPUs of the run, over all nodes (default 1)",
    )


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError for impossible arithmetic, a contradiction with the DeepSpeed JSON, or an output folder that is
    used or cannot be written."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    plan = plan_batch(recipe, arguments.ranks)
    deepspeed_config(recipe, plan)
    can_resume(recipe)
    check_output_folder(recipe)
    print(f"{dump_recipe(recipe).rstrip()}\n\nBatch: {plan.describe()}")
