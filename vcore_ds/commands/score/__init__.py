"""`vcore-ds score`: the influence of each training trace on a target set of trusted traces."""

import argparse
from pathlib import Path

from vcore_ds.commands.arguments import add_again, add_overrides
from vcore_ds.common.imports import lasting_imports

HELP = "score training traces by their influence on a target set"
DESCRIPTION = (
    "Compute the influence of each training trace (data.train_path) on a set of trusted traces (the target or "
    "validation set of LESS; data.probe_path). A trace's utility is the derivative of its loss along the gradient of "
    "the set's loss, positive where learning the trace lowers the set's loss. Utilities are exact and cost one "
    "forward-mode (JVP) pass over the data per set, with no backward over the data and no stored gradients. Writes a "
    "table of all traces, the tokens of the best and the worst, and a page. The same command resumes a stopped "
    "scoring. The sum over a trace's tokens is largest, with either sign, for long traces; the mean varies most for "
    "short ones: the rank correlation of both with length is printed. Runs as one process, or under a launcher as one "
    "process per rank. Example: vcore-ds score RECIPE.yaml data.probe_path=trusted.jsonl"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="RECIPE | RUN", help="a recipe, to score with its base model, or a run, with its checkpoint")
    add_overrides(parser)
    sets = "a named trusted set instead of data.probe_path; repeat it for several: each adds a pass over the data"
    add("--set", dest="sets", action="append", default=[], metavar="NAME=PATH", help=sets)
    checkpoint = (
        "for a RUN: a checkpoint such as step_00000100, or `all`: the sum over all, each weighted by the mean learning "
        "rate of the steps since the one before, as TracInCP (default: the newest)"
    )
    add("--checkpoint", metavar="NAME", help=checkpoint)
    add("--output", type=Path, metavar="DIR", help="new folder (default runs/scores/NAME, of the recipe or the run)")
    tokens = (
        "write utilities of the tokens of the best and worst traces, or of all, for `keep --weights` (default shown)"
    )
    add("--tokens", choices=["shown", "all"], default="shown", help=tokens)
    add_again(parser)


def main(arguments: argparse.Namespace) -> None:
    from vcore_ds.commands.score.inputs import read_inputs

    named = (arguments.target, arguments.overrides, arguments.sets, arguments.checkpoint, arguments.output)
    inputs = read_inputs(*named, again=arguments.again, all_tokens=arguments.tokens == "all")
    with lasting_imports():
        from vcore_ds.commands.score.compute import score

    score(inputs)
