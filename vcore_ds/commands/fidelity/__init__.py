"""`vcore-ds fidelity`: accuracy of a recipe's utilities."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcore_ds.commands.arguments import add_recipe, take_numbers
from vcore_ds.common.errors import UserError
from vcore_ds.common.imports import lasting_imports
from vcore_ds.common.paths import check_folder, writing
from vcore_ds.config.load import load_recipe

HELP = "measure how accurate the utilities are"
DESCRIPTION = (
    "Compare the utilities of jvp and of finite differences with a reference in higher precision, and those along "
    "low-rank directions with those along the direction itself, on the recipe's model, data, precision and "
    "parallelism. Lists are numbers separated by spaces; 0 leaves a part out. Example: vcore-ds fidelity RECIPE.yaml "
    "--ranks 0"
)
JSON_NAME = "fidelity.json"


@dataclass(frozen=True)
class FidelityOptions:
    """Requested measurements."""

    num_sequences: int = 4  # over all ranks
    epsilons: tuple[float, ...] = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    ranks: tuple[int, ...] = (16, 64, 128)  # values of probe.rank; not measured with LoRA
    after_steps: int = 0  # optimizer steps before the measurement
    output: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_recipe(parser)
    numbers: dict[str, Any] = dict(nargs="+", metavar="N")
    add("--output", type=Path, metavar="DIR", help="write fidelity.json there")
    add("--sequences", type=int, default=4, metavar="N", help="training sequences to measure on (default 4)")
    add("--epsilons", **numbers, default="1 1e-1 1e-2 1e-3 1e-4 1e-5".split(), help="step sizes (default 1 ... 1e-5)")
    ranks = "values of probe.rank (default 16 64 128; not with LoRA, whose matrices have low rank already)"
    add("--ranks", **numbers, default=["16", "64", "128"], help=ranks)
    add("--after-steps", type=int, default=0, metavar="N", help="train N steps before measuring (default 0)")


def main(arguments: argparse.Namespace) -> None:
    epsilons, ranks = take_numbers(arguments, "epsilons", float), take_numbers(arguments, "ranks", int)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    options = FidelityOptions(arguments.sequences, epsilons, ranks, arguments.after_steps, arguments.output)
    check_options(options)
    if options.output is not None:
        prepare_output(options.output)
    with lasting_imports():
        from vcore_ds.commands.fidelity.measure import measure_fidelity

    measure_fidelity(recipe, options)


def check_options(options: FidelityOptions) -> None:
    """Raise UserError for numbers out of range."""
    wrong = [f"--epsilons {epsilon:g}" for epsilon in options.epsilons if not 0 < epsilon < math.inf]
    wrong += [f"--ranks {rank}" for rank in options.ranks if rank < 0]
    wrong += [f"--after-steps {options.after_steps}"] * (options.after_steps < 0)
    if wrong:
        raise UserError(f"{', '.join(wrong)}: expected positive numbers, or 0 to leave a part out")
    if options.num_sequences < 1:
        raise UserError(f"--sequences {options.num_sequences}: expected at least 1")


def prepare_output(folder: Path) -> None:
    """Create `folder`. Raises UserError where it cannot be written or holds a result."""
    with writing("--output", folder):
        folder.mkdir(parents=True, exist_ok=True)  # check_folder would remove one that it made, under other ranks
        check_folder(folder)
        if (folder / JSON_NAME).exists():
            raise UserError(
                f"--output: {folder}: holds a {JSON_NAME} already; expected a folder without a result. Name another "
                "one, or remove it"
            )
