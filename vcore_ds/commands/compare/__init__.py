"""`vcore-ds compare`: whether one evaluation is better than another, beyond chance."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from vcore_ds.commands.arguments import positive_number
from vcore_ds.errors import UserError

HELP = "whether one evaluation is better than another, beyond chance"
DESCRIPTION = (
    "Compare evaluations of the same problems: accuracies with 95% intervals, differences paired by problem or by seed "
    "and adjusted for the number of benchmarks, shares of truncated and unanswered outputs. Two evaluations say "
    "something about two checkpoints; three or more seeds of each method, given with --group, about the methods. Needs "
    "no GPU. docs/comparing.md says which interval answers which question."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "evaluations",
        nargs="*",
        metavar="EVAL",
        help="folder of an evaluation (vcore-ds eval --output); the others are compared with the first",
    )
    parser.add_argument(
        "--group",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "EVAL"),
        help="instead of EVAL: a method's evaluations, one for each seed, in the same order in every group, three or "
        "more (--group sft runs/sft/seed_*/eval --group vcore runs/vcore/seed_*/eval); the others are compared with "
        "the first",
    )
    parser.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="compare these only (default: all)")
    parser.add_argument(
        "--two-way",
        action="store_true",
        help="with --group: also intervals for problems like these, clustered by seed and by problem",
    )
    parser.add_argument(
        "--power",
        type=positive_number,
        metavar="POINTS",
        help="also say how many problems, samples or seeds it would take to detect a difference of POINTS in accuracy",
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="also draw the differences (.png, .pdf, .svg; needs matplotlib)"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.set_defaults(overrides=[])


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError for what the user gave: evaluations that cannot be compared, options, or the picture."""
    from vcore_ds.commands.compare.differences import compare
    from vcore_ds.commands.compare.picture import draw
    from vcore_ds.commands.compare.read import read_sides
    from vcore_ds.commands.compare.text import as_dict, describe
    from vcore_ds.results.presentation import check_picture

    # argparse ends the list of evaluations where an option begins; cli.parse collects what follows.
    groups = _groups([*arguments.evaluations, *arguments.overrides], arguments.group)
    if arguments.two_way and all(len(folders) == 1 for _, folders in groups):
        raise UserError("--two-way: found one evaluation a side; expected --group with three or more seeds of each")
    if arguments.power is not None and arguments.power >= 100:
        raise UserError(f"--power: found {arguments.power:g} points; expected less than 100")
    if arguments.png is not None:
        check_picture("--png", arguments.png)
    found = compare(
        read_sides(groups, arguments.tasks),
        two_way=arguments.two_way,
        power_difference=None if arguments.power is None else arguments.power / 100,
    )
    if arguments.png is not None:
        draw(found, arguments.png)
    print(json.dumps(as_dict(found), indent=2, allow_nan=False) if arguments.json else describe(found))


def _groups(evaluations: Sequence[str], groups: Sequence[Sequence[str]]) -> list[tuple[str, list[Path]]]:
    """(name, folders) of each side."""
    from vcore_ds.commands.compare.read import names_of

    if evaluations and groups:
        raise UserError(
            f"EVAL: found {evaluations[0]} beside --group; expected one or the other. Give single evaluations a "
            "--group of their own"
        )
    for name, *members in groups:
        if not members:
            raise UserError(f"--group: {name}: found no evaluation; expected --group NAME EVAL [EVAL ...]")
    if groups:
        return [(name, [Path(member) for member in members]) for name, *members in groups]
    folders = [Path(evaluation) for evaluation in evaluations]
    return [(name, [folder]) for name, folder in zip(names_of(folders), folders, strict=True)]
