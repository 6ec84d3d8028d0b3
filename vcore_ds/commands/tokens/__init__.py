"""`vcore-ds tokens`: which tokens gained and lost weight in a run."""

import argparse
from pathlib import Path

from vcore_ds.commands.arguments import positive

HELP = "which tokens gained and lost weight in a run"
DESCRIPTION = (
    "Read the records that a run writes to RUN/tokens (run.num_token_records) and print which tokens, phrases, kinds "
    "of token and parts of a trace gained and lost weight. The relative weight of a group is the share of the loss "
    "that training gave it over the share that uniform weights give it: 1 is uniform. Means of utility and loss count "
    "a token as uniform training does, a sequence by its share in the batch; every record counts the same. First and "
    "last third are relative weights in these parts of the records. Several runs are compared by kind and position. "
    "Needs no GPU. docs/tokens.md has the definitions."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder (run.output_dir)")
    parser.add_argument("--step", type=positive, metavar="N", help="only the record of optimizer step N (default: all)")
    parser.add_argument(
        "--top",
        type=positive,
        default=15,
        metavar="N",
        help="tokens and phrases in a list; a third as many in those of what rose and fell (default 15)",
    )
    parser.add_argument(
        "--min-count",
        type=positive,
        metavar="N",
        help="leave out tokens and phrases that occur less often (default: one in 5,000 tokens, at least 5)",
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="folder or hub id (default: the run's result, then its model.path)"
    )
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")
    parser.set_defaults(overrides=[])


def main(arguments: argparse.Namespace) -> None:
    # argparse ends the list of runs where an option begins; cli.parse collects what follows.
    runs = [Path(run) for run in [*arguments.runs, *arguments.overrides]]
    from vcore_ds.commands.tokens.read import read_run
    from vcore_ds.commands.tokens.text import as_json, describe

    found = [
        read_run(
            run,
            step=arguments.step,
            top=arguments.top,
            min_count=arguments.min_count,
            tokenizer_path=arguments.tokenizer,
        )
        for run in runs
    ]
    print(as_json(found) if arguments.json else describe(found))
