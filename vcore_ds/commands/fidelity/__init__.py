"""`vcore-ds fidelity`: accuracy of a recipe's utilities."""

import argparse
import math
from pathlib import Path
from typing import Any

from vcore_ds.commands.arguments import add_recipe, not_negative, positive, take_numbers
from vcore_ds.common.errors import UserError
from vcore_ds.common.imports import lasting_imports
from vcore_ds.common.paths import check_folder, refuse_existing, writing
from vcore_ds.config.load import load_recipe
from vcore_ds.data.prepare.sources import check_inputs

HELP = "measure how accurate the utilities are"
DESCRIPTION = (
    "Compare the utilities of jvp and of finite differences with a reference in higher precision, and those along "
    "low-rank directions with those along the direction itself, on the recipe's model, data, precision and "
    "parallelism. Lists are numbers separated by spaces; 0 leaves a part out. Example: vcore-ds fidelity RECIPE.yaml "
    "--ranks 0"
)
JSON_NAME = "fidelity.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_recipe(parser)
    numbers: dict[str, Any] = dict(nargs="+", metavar="N")
    add("--output", type=Path, metavar="DIR", help="write fidelity.json there")
    add("--sequences", type=positive, default=4, metavar="N", help="training sequences to measure on (default 4)")
    add("--epsilons", **numbers, default="1 1e-1 1e-2 1e-3 1e-4 1e-5".split(), help="step sizes (default 1 ... 1e-5)")
    ranks = "values of probe.rank (default 16 64 128; not with LoRA, whose matrices have low rank already)"
    add("--ranks", **numbers, default=["16", "64", "128"], help=ranks)
    add("--after-steps", type=not_negative, default=0, metavar="N", help="train N steps before measuring (default 0)")


def main(arguments: argparse.Namespace) -> None:
    epsilons, ranks = take_numbers(arguments, "epsilons", float), take_numbers(arguments, "ranks", int)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    wrong = [f"--epsilons {epsilon:g}" for epsilon in epsilons if not 0 < epsilon < math.inf]
    wrong += [f"--ranks {rank}" for rank in ranks if rank < 0]
    if wrong:
        raise UserError(f"{', '.join(wrong)}: expected positive numbers, or 0 to leave a part out")
    if (output := arguments.output) is not None:
        refuse_existing(output / JSON_NAME, "a folder without a result")
        with writing("--output", output):
            output.mkdir(parents=True, exist_ok=True)  # check_folder would remove one that another rank uses
            check_folder(output)
    check_inputs(recipe.model.path, recipe.data)
    with lasting_imports():
        from vcore_ds.commands.fidelity.measure import measure_fidelity

    options = dict(num_sequences=arguments.sequences, after_steps=arguments.after_steps, output=output)
    measure_fidelity(recipe, epsilons=epsilons, ranks=ranks, **options)
