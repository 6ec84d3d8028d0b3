"""`vcore-ds keep`: the rows of the traces with the highest scores, as JSON lines for any trainer."""

import argparse
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcore_ds.commands.arguments import share
from vcore_ds.errors import UserError
from vcore_ds.files.user_paths import refuse_existing, writing

if TYPE_CHECKING:
    from vcore_ds.train.selection import Selection

HELP = "write the rows of the traces with the highest scores"
DESCRIPTION = (
    "Write the rows of the traces that `vcore-ds score` found worth most, a line of JSON each, as they stand in their "
    "source files, for other trainers; and beside them, in FILE.origin.json, which scores they were chosen by. A "
    "recipe needs no such file: its data.keep trains on the same traces of the data that were scored."
)
NEW_FILE = "a new file in a folder that can be written"
UTILITY_KEYS = {"vcore_utility_mean": 1, "vcore_utility_sum": 0, "vcore_rank": 2}
"""Keys of a row with its scores -> place among `utility_columns`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scores", metavar="SCORES", help="a folder that vcore-ds score wrote")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--top", type=share, metavar="SHARE", help="keep this share of the traces, such as 0.25")
    which.add_argument("--above", type=float, metavar="UTILITY", help="keep traces with a higher utility, such as 0")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="file to write (.jsonl)")
    parser.add_argument("--set", metavar="NAME", help="the trusted set (default: the only one)")
    parser.add_argument("--by", choices=["mean", "sum"], default="mean", help="over a trace's tokens (default mean)")
    parser.add_argument(
        "--within", choices=["all", "source"], default="all", help="of what --top is a share (default all)"
    )
    parser.add_argument(
        "--with-utility", action="store_true", help=f"add the keys {', '.join(UTILITY_KEYS)} to each row"
    )
    parser.set_defaults(overrides=[])


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError for scores that cannot be used, sources that are not what was scored, or an output that is
    there already or cannot be written."""
    from vcore_ds.config.sections import KeepConfig
    from vcore_ds.files.aside import written_aside
    from vcore_ds.train.selection import read_selection  # here alone: torch takes seconds to import

    if arguments.above is not None and arguments.within == "source":
        raise UserError("--within: found source together with --above; expected it with --top")
    refuse_existing(arguments.output, NEW_FILE)
    keys = ("scores", "set", "by", "top", "above", "within")
    selection = read_selection(
        KeepConfig(**{key: getattr(arguments, key) for key in keys}),
        lambda key: "SCORES" if key == "scores" else f"--{key}",
    )
    origin = arguments.output.with_name(f"{arguments.output.name}.origin.json")
    with writing("--output", arguments.output, NEW_FILE):
        with written_aside(arguments.output) as unfinished, unfinished.open("w", encoding="utf-8") as file:
            for row in kept_rows(selection, arguments.with_utility):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        with written_aside(origin) as unfinished:
            scores = selection.scores
            entries = {"data": scores.data.path, "model": scores.model, "scored": scores.date, **selection.origin()}
            unfinished.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{selection.describe()}\nWritten: {arguments.output}, and where they come from: {origin}")


def kept_rows(selection: "Selection", with_utility: bool) -> Iterator[dict[str, Any]]:
    """The rows of the kept traces, source by source in the order of the data.

    Raises:
        UserError: a source is not there, has changed since it was scored, or is a data set on the hub.
    """
    import numpy as np

    from vcore_ds.files.scores_folder import read_traces, utility_columns
    from vcore_ds.progress import Progress

    keep = selection.keep
    assert keep.set is not None  # `read_selection` has found its name
    columns = utility_columns(keep.set)[:3]
    found = read_traces(Path(keep.scores), ["row", *columns])
    sources = list(dict.fromkeys(selection.sources[selection.positions].tolist()))
    with Progress("Reading rows", len(selection.positions)) as progress:
        for source in sources:
            own = selection.positions[selection.sources[selection.positions] == source]
            own = own[np.argsort(found["row"][own], kind="stable")]
            rows = _rows_of(source, selection.scores.data.fingerprints.get(source), found["row"][own].tolist())
            for position, row in zip(own.tolist(), rows, strict=True):
                if with_utility:
                    row |= {key: found[columns[place]][position].item() for key, place in UTILITY_KEYS.items()}
                yield row
                progress.advance()


def _rows_of(source: str, fingerprint: str | None, numbers: list[int]) -> Iterator[dict[str, Any]]:
    """The rows of a file with these numbers, ascending; a number counts blank lines, too."""
    from vcore_ds.data.prepare.sources import describe_source, find_shards

    if not Path(source).is_file():
        raise UserError(
            f"SCORES: found traces of {source}, which is no file here (looked from {Path.cwd()}); expected the files "
            "that were scored. Start where they are; of a data set on the hub, score a downloaded copy"
        )
    shards = find_shards([source], "train")
    if fingerprint != describe_source(shards)[0]["fingerprint"]:
        raise UserError(
            f"{source}: has changed since it was scored; expected the same file, whose rows the scores belong to. "
            "Restore it, or score it again"
        )
    wanted = iter(numbers)
    next_number = next(wanted, None)
    for number, (_, row) in enumerate(chain.from_iterable(shard.rows() for shard in shards)):
        if number == next_number:
            yield row
            next_number = next(wanted, None)
