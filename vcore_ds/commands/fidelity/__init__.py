"""`vcore-ds fidelity`: accuracy of a recipe's utilities."""

import argparse
from pathlib import Path
from typing import Any

from vcore_ds.commands.arguments import add_recipe, take_numbers
from vcore_ds.common.imports import lasting_imports
from vcore_ds.config.load import load_recipe

HELP = "measure how accurate the utilities are"
DESCRIPTION = (
    "Compare the utilities of jvp and of finite differences with a reference in higher precision, and small probes and "
    "stale directions with a large probe, on the recipe's model, data, precision and parallelism. Lists are numbers "
    "separated by spaces; 0 leaves a part out."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    numbers: dict[str, Any] = dict(nargs="+", metavar="N")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write fidelity.json there")
    parser.add_argument(
        "--sequences", type=int, default=4, metavar="N", help="training sequences to measure on (default 4)"
    )
    parser.add_argument(
        "--epsilons", **numbers, default="1 1e-1 1e-2 1e-3 1e-4 1e-5".split(), help="default 1 1e-1 ... 1e-5"
    )
    parser.add_argument(
        "--ranks", **numbers, default="16 64 128".split(), help="values of probe.rank, default 16 64 128; not with LoRA"
    )
    parser.add_argument("--probe-sizes", **numbers, default="1 4 8 32".split(), help="|B'|, default 1 4 8 32")
    parser.add_argument(
        "--large-probe",
        type=int,
        default=64,
        metavar="N",
        help="|B'| that these and stale directions are compared with (default 64; 0 measures neither)",
    )
    parser.add_argument(
        "--stale-steps",
        **numbers,
        default="1 2 4 8".split(),
        help="ages of stale directions, in optimizer steps (default 1 2 4 8)",
    )
    parser.add_argument(
        "--after-steps", type=int, default=0, metavar="N", help="train N steps before measuring (default 0)"
    )


def main(arguments: argparse.Namespace) -> None:
    lists = {
        name: take_numbers(arguments, name, kind)
        for name, kind in (("epsilons", float), ("ranks", int), ("probe_sizes", int), ("stale_steps", int))
    }
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from vcore_ds.commands.fidelity.choice import FidelityOptions, check_options, prepare_output

    options = FidelityOptions(
        num_sequences=arguments.sequences,
        large_probe_size=arguments.large_probe,
        after_steps=arguments.after_steps,
        output=arguments.output,
        **lists,
    )
    check_options(options)
    if options.output is not None:
        prepare_output(options.output)
    with lasting_imports():
        from vcore_ds.commands.fidelity.measure import measure_fidelity

    measure_fidelity(recipe, options)
