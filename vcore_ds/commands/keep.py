"""`vcore-ds keep`: write the rows of the traces with the highest scores, as JSON lines for any trainer."""

import argparse
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from datetime import date, time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vcore_ds.commands.arguments import share
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import reading, refuse_existing, write_atomically, writing
from vcore_ds.config.data_section import KeepConfig
from vcore_ds.config.problems import RecipeError, list_problems

if TYPE_CHECKING:
    from vcore_ds.data.score_selection import Selection

HELP = "write the rows of the traces with the highest scores"
DESCRIPTION = (
    "Write the rows of the traces with the highest scores of `vcore-ds score` to a JSON Lines file for other trainers, "
    "unchanged from their source files; FILE.origin.json says which scores selected them. A recipe needs no such file: "
    "with data.keep it trains on the same selection. Example: vcore-ds keep runs/scores/my_recipe --top 0.25 "
    "--output kept.jsonl"
)
NEW_FILE = "a new file in a folder that can be written"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("scores", metavar="SCORES", help="a folder that vcore-ds score wrote")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--top", type=share, metavar="SHARE", help="keep this share of the traces, such as 0.25")
    which.add_argument("--above", type=float, metavar="UTILITY", help="keep traces with a higher utility, such as 0")
    weights = (
        "write tokens with Gibbs weights instead of rows, to a Parquet file: kl_budget=NUMBER or temperature=NUMBER as "
        "in a recipe's section `method`; of all traces without --top or --above. Needs scores made with --tokens all"
    )
    add("--weights", metavar="KEY=NUMBER", help=weights)
    add("--output", required=True, type=Path, metavar="FILE", help="file to write (.jsonl; .parquet with --weights)")
    add("--set", metavar="NAME", help="rank by the influence on this trusted (target) set (default: the only one)")
    add("--by", choices=["mean", "sum"], default="mean", help="rank by mean or sum over tokens (default mean)")
    within = "take --top of all traces, or of each source (default all)"
    add("--within", choices=["all", "source"], default="all", help=within)


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError for scores that cannot be used, sources that have changed since, or an output that exists or
    cannot be written."""
    if arguments.top is None and arguments.above is None:
        if arguments.weights is None:
            raise UserError("--top: found none of --top, --above and --weights; expected one, such as --top 0.25")
        arguments.top = 1.0
    if arguments.above is not None and arguments.within == "source":
        raise UserError("--within: found source together with --above; expected it with --top")
    output, weights = arguments.output, arguments.weights
    if weights is not None:
        if output.suffix != ".parquet":
            raise UserError(f"--output: found {output} with --weights; expected a .parquet file of tokens")
        with reading("SCORES", Path(arguments.scores), "a folder that vcore-ds score wrote"):
            Path(arguments.scores).stat()
        from vcore_ds.commands.token_weights import parse_sharpness, write_weights  # imports torch: seconds

        sharpness = parse_sharpness(weights)
    refuse_existing(output, NEW_FILE)
    origin = output.with_name(f"{output.name}.origin.json")  # not of `.`, which is refused
    refuse_existing(origin, NEW_FILE)
    from vcore_ds.data.score_selection import read_selection  # imports numpy

    selection = read_selection(read_keep(arguments), name_argument)
    scores = selection.scores
    with writing("--output", output, NEW_FILE):
        if weights is not None:
            write_weights(selection, sharpness, output)
            rest = f"train on it with: method.name=stored data.token_weights={output}"
        else:
            entries: dict[str, Any] = {"data": scores.data.path, "scored": scores.date, **selection.origin()}
            entries |= {name: getattr(scores, name) for name in ("model", "model_digest", "adapter", "adapter_digest")}
            entries["checkpoints"] = [asdict(checkpoint) for checkpoint in scores.checkpoints]
            with write_atomically(origin) as unfinished_origin, write_atomically(output) as unfinished:
                # UTF-8 cannot encode half of a surrogate pair; the backslash escape of it is JSON's, too.
                with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
                    file.writelines(f"{line}\n" for line in kept_lines(selection))
                unfinished_origin.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            rest = f"how the rows were selected: {origin}"
    print(f"{selection.describe()}\nWritten: {output}; {rest}")


def name_argument(key: str) -> str:
    """Name the command's argument for a key of `data.keep`."""
    return "SCORES" if key == "scores" else f"--{key}"


def read_keep(arguments: argparse.Namespace) -> KeepConfig:
    """Make `data.keep` from the command's arguments. Raises UserError for values that it cannot have."""
    values = {key: getattr(arguments, key) for key in KeepConfig.model_fields}
    try:
        return KeepConfig(**values)
    except ValidationError as error:
        problems = list_problems(error, values, "data", "keep")
        raise RecipeError(f"{name_argument(key.rpartition('.')[2])}: {text}" for (key,), text in problems) from None


def kept_lines(selection: "Selection") -> Iterator[str]:
    """Yield the rows of the selected traces as JSON, by source, in the order of its rows. Raises UserError where a
    source is missing, has changed since it was scored, or is a data set on the hub; or JSON cannot represent a row."""
    from vcore_ds.common.text import Progress
    from vcore_ds.data.scores_folder import read_traces

    positions, row_of = selection.positions.tolist(), read_traces(Path(selection.keep.scores), ["row"])["row"]
    counts: dict[str, Counter[int]] = {}  # by source, how often each row is kept: a source may be named twice
    for position in positions:
        counts.setdefault(str(selection.sources[position]), Counter())[int(row_of[position])] += 1
    with Progress("Reading rows", len(positions)) as progress:
        for source, times in counts.items():
            for number, row in read_rows(source, selection.scores.data.fingerprints.get(source), times):
                yield from [write_row(row, f"{source}:{number + 1}")] * times[number]
                progress.advance(times[number])


def read_rows(source: str, fingerprint: str | None, wanted: Collection[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the rows of a file with these numbers, each with its number; blank lines count."""
    from vcore_ds.data.prepare.sources import UnreadableRow, describe_source, find_files

    if not Path(source).is_file():
        raise UserError(
            f"SCORES: found traces of {source}, which is not a file here (working directory {Path.cwd()}); expected "
            "the files that were scored. Run the command where they are; for a data set on the hub, score a downloaded "
            "copy"
        )
    files, num_read = find_files([source], "train"), 0
    is_same = fingerprint == describe_source(files)[0]["fingerprint"]
    for number, row in enumerate(files[0].rows() if is_same else ()):
        if number in wanted and not isinstance(row, UnreadableRow):
            num_read += 1
            yield number, row
    if num_read < len(wanted):
        raise UserError(
            f"{source}: has changed since it was scored, or was scored by vcore_ds 0.7 or before; expected the same "
            "file, whose rows the scores belong to. Restore it, or prepare and score it again"
        )


def write_row(row: Mapping[str, Any], where: str) -> str:
    """Write a row as a line of JSON, with dates and times in ISO 8601. Raises UserError, which begins with `where`, for
    a value that JSON cannot represent: bytes, decimals, durations, NaN and infinity."""

    def write_time(value: Any) -> str:
        if isinstance(value, date | time):
            return value.isoformat()
        raise TypeError(f"found {value!r:.80}")

    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=write_time)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{where}: {error}, which JSON cannot represent; expected text, finite numbers, dates, lists and objects. "
            "Select the rows by number instead: scores.parquet in SCORES has source, row and rank of each"
        ) from None
