"""`vcore-ds prepare`: raw data to a store of tokens."""

import argparse
import os
from pathlib import Path

from vcore_ds.commands.arguments import add_again, fraction, positive
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import writing
from vcore_ds.config.data_section import COLUMNS

HELP = "filter, sample and tokenize raw data into a token store"
DESCRIPTION = (
    "Filter, sample and tokenize raw data into a token store, the folder of tokenized sequences that recipes train on: "
    "rows of messages, prompt and completion, ShareGPT or Alpaca. After an interruption, the same command resumes. "
    "Example: vcore-ds prepare data.jsonl --tokenizer Qwen/Qwen3-0.6B --output data/chat"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    sources = "files (.jsonl, .json, .csv, .parquet, .arrow), folders, patterns or hub ids, also NAME::CONFIGURATION"
    add("sources", nargs="*", metavar="SOURCE", help=sources)
    add("--tokenizer", required=True, metavar="MODEL", help="folder or hub id of the model to train")
    add("--output", type=Path, metavar="DIR", help="folder of the new token store (required without --show)")
    show = "only print the first N rows, or sequences of a token store, with the text that is learned marked"
    add("--show", type=positive, metavar="N", help=show)
    add("--sample", type=positive, metavar="N", help="keep N random sequences (the paper: 3200 or 32000; default: all)")
    add("--seed", type=int, default=42, metavar="N", help="random seed of --sample (default 42)")
    add("--cutoff-length", type=positive, default=16384, metavar="N", help="most tokens of a sequence (default 16384)")
    add("--overlong", choices=["drop", "truncate"], default="drop", help="drop or truncate longer ones (default drop)")
    supervise = "learn all turns of the assistant, or the last one alone (default all)"
    add("--supervise", choices=["all", "last"], default="all", help=supervise)
    columns = "names of the rows' columns, such as prompt=question thinking=trajectory completion=attempt"
    add("--columns", nargs="+", type=parse_column, default=[], metavar="OURS=THEIRS", help=columns)
    add("--split", default="train", metavar="NAME", help="split of hub data (default train)")
    add("--processes", type=positive, metavar="N", help="worker processes (default: one per CPU core)")
    malformed = "fail if a larger share of the rows is malformed (default 0.01)"
    add("--max-malformed", type=fraction, default=0.01, metavar="SHARE", help=malformed)
    add_again(parser)
    parser.set_defaults(overrides=[])


def parse_column(text: str) -> tuple[str, str]:
    """Parse OURS=THEIRS."""
    ours, _, theirs = text.partition("=")
    if ours not in COLUMNS or not theirs:
        expected = ", ".join(COLUMNS)
        raise argparse.ArgumentTypeError(f"found {text:.60}, expected OURS=THEIRS with one of {expected}")
    return ours, theirs


def main(arguments: argparse.Namespace) -> None:
    sources = arguments.sources + arguments.overrides  # overrides: sources after an option
    if not sources:
        raise UserError("prepare: found no SOURCE; expected files, folders or hub ids with conversations")
    from vcore_ds.data.prepare.convert import PrepareRequest
    from vcore_ds.data.prepare.pipeline import prepare

    names = "tokenizer split sample seed cutoff_length overlong supervise".split()
    request = PrepareRequest(
        sources=tuple(sources),
        columns=dict(arguments.columns),
        **{name: getattr(arguments, name) for name in names},
    )
    if arguments.show is not None:
        from vcore_ds.data.prepare.report import show_rows

        for text in show_rows(request, arguments.show, arguments.max_malformed):
            print(text)
        return
    if arguments.output is None:
        raise UserError("prepare: found no --output; expected the folder of the new token store, or --show N")
    settings = {"max_malformed": arguments.max_malformed, "again": arguments.again}
    with writing("--output", arguments.output, "a folder that can be written, with room for the store"):
        prepare(request, arguments.output, processes=arguments.processes or os.cpu_count() or 1, **settings)
