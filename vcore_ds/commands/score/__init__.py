"""`vcore-ds score`: what every trace of the training data is worth to a few trusted ones."""

import argparse
from pathlib import Path

from vcore_ds.commands.arguments import add_again, add_overrides
from vcore_ds.common.imports import lasting_imports

HELP = "score training data by what it is worth to trusted traces"
DESCRIPTION = (
    "Compute the utility of every token and trace of data.train_path: the derivative of its loss along the gradient of "
    "the loss of a trusted set (data.probe_path). It is positive where learning the trace lowers the trusted set's "
    "loss. Exact, in one forward pass over the data for each set, without a backward over them and without a stored "
    "gradient. Writes a table of the traces, the tokens of the best and the worst, and a page. A scoring that was "
    "stopped goes on where it was when the same command is given again. Of the sum over a trace's tokens, long "
    "traces have the largest, in both directions; the mean favours short ones, whose means vary most: the rank "
    "correlation of both with the length is printed. Alone it is one process; under a launcher, one per rank."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="RECIPE | RUN",
        help="a recipe (YAML file, or the name of a shipped one): its base model; or a run's folder: its checkpoint",
    )
    add_overrides(parser)
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a trusted set by a name, instead of data.probe_path, which is called `trusted`; may be given several "
        "times, and each set has columns, and a pass over the data, of its own",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="of a RUN: one of RUN/checkpoints, such as step_00000100, or `all`: the sum of the utilities at each of "
        "them, weighted by the mean learning rate of the steps that led to it (default: the newest)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="new folder (default runs/scores/NAME of the recipe or the run)"
    )
    add_again(parser)


def main(arguments: argparse.Namespace) -> None:
    from vcore_ds.commands.score.request import make_request

    request = make_request(
        arguments.target,
        arguments.overrides,
        arguments.sets,
        arguments.checkpoint,
        arguments.output,
        arguments.again,
    )
    with lasting_imports():
        from vcore_ds.commands.score.compute import score

    score(request)
