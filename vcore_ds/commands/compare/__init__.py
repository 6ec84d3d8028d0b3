"""`vcore-ds compare`: whether one evaluation is better than another, beyond chance."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from vcore_ds.common.errors import UserError

HELP = "whether one evaluation is better than another, beyond chance"
DESCRIPTION = (
    "Compare evaluations of the same problems: accuracies and paired differences with 95% intervals. Two evaluations "
    "compare two checkpoints; three or more seeds of each method, given with --group, compare the methods. Needs no "
    "GPU. docs/evaluation.md says which interval answers which question."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("evaluations", nargs="*", metavar="EVAL", help="folders of evaluations; the others are compared with the first")
    group = (
        "instead of EVAL: a method's evaluations, one per seed, three or more, in the same order in every group "
        "(--group sft runs/sft/seed_*/eval --group vcore runs/vcore/seed_*/eval)"
    )
    add("--group", nargs="+", action="append", default=[], metavar=("NAME", "EVAL"), help=group)
    add("--tasks", nargs="+", default=[], metavar="TASK", help="tasks to compare (default: all)")
    add("--json", action="store_true", help="print the comparison as JSON")
    parser.set_defaults(overrides=[])


def main(arguments: argparse.Namespace) -> None:
    from vcore_ds.commands.compare.comparison import as_dict, compare, describe, read_sides

    # argparse ends a list where an option begins; cli.parse collects the evaluations that follow as overrides.
    evaluations, groups = [Path(word) for word in [*arguments.evaluations, *arguments.overrides]], arguments.group
    if evaluations and groups:
        raise UserError(f"EVAL: found {evaluations[0]} beside --group; expected one or the other")
    if any(len(words) < 2 for words in groups) or len({words[0] for words in groups}) < len(groups):
        listed = ", ".join(" ".join(words) for words in groups)
        raise UserError(f"--group: found {listed}; expected NAME EVAL [EVAL ...], with another name for each group")
    folders = {name: list(map(Path, members)) for name, *members in groups}
    folders = folders or dict(zip(name_folders(evaluations), ([folder] for folder in evaluations), strict=True))
    sides = read_sides(folders, arguments.tasks)
    results = compare(sides)
    if arguments.json:
        print(json.dumps(as_dict(sides, results), indent=2, allow_nan=False))
    else:
        print(describe(sides, results))


def name_folders(folders: Sequence[Path]) -> list[str]:
    """Return the part of each path that differs: `sft` and `vcore` for runs/sft/eval and runs/vcore/eval."""
    parts = [folder.resolve().parts for folder in folders]
    for _ in range(2):  # from the beginning, then from the end; at least one part of each path stays
        shortest = min(map(len, parts), default=1)
        num_shared = next((i for i in range(shortest - 1) if len({path[i] for path in parts}) > 1), shortest - 1)
        parts = [path[num_shared:][::-1] for path in parts]
    return ["/".join(path) for path in parts]
