"""`vcore-ds report`: a run, several side by side, or a sweep, as one HTML file."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vcore_ds.commands.arguments import positive
from vcore_ds.errors import UserError
from vcore_ds.files.run_folder import REPORT
from vcore_ds.results.sweep_folder import is_sweep

HELP = "one HTML file: what was learnt, tokens coloured by their weight, curves, costs"
DESCRIPTION = (
    "Write one self-contained HTML file that needs no network: losses before and after training, the recorded tokens "
    "coloured by their weight, which tokens and phrases gained and lost most, utility against loss, learning curves, "
    "time by phase, recipe and environment. Several runs are laid side by side; those whose recipes differ in the seed "
    "only become one curve, their mean with their range. A sweep's folder also gives tables over seeds, with 95% "
    "intervals. Needs no GPU, and neither the training data nor the model. docs/reading-a-report.md explains the "
    "pictures, docs/sweeps.md the tables."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder (run.output_dir), or a sweep's")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"default: {REPORT} in the folder of the first RUN")
    parser.add_argument(
        "--png", type=Path, metavar="FOLDER", help="also write every curve there, as PNG and PDF (needs matplotlib)"
    )
    parser.add_argument(
        "--top", type=positive, default=15, metavar="N", help="tokens and phrases in a list (default 15)"
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="folder or hub id (default: the run's result, then its model.path)"
    )
    parser.set_defaults(overrides=[])


def main(arguments: argparse.Namespace) -> None:
    # argparse ends the list of runs where an option begins; cli.parse collects what follows.
    runs = [Path(run) for run in [*arguments.runs, *arguments.overrides]]
    options = {
        "output": arguments.output,
        "png": arguments.png,
        "top": arguments.top,
        "tokenizer_path": arguments.tokenizer,
    }
    sweeps = [folder for folder in runs if is_sweep(folder)]
    if sweeps and len(runs) > 1:
        raise UserError(f"RUN: {sweeps[0]}: found a sweep among {len(runs)} folders; expected it alone, or runs only")
    written = write_sweep_report(sweeps[0], **options) if sweeps else write_report(runs, **options)
    for path in written:
        print(path)


def write_sweep_report(
    folder: Path, *, output: Path | None, png: Path | None, top: int, tokenizer_path: str | None
) -> list[Path]:
    """Writes the page of a sweep's runs that are done, with its tables, which are also printed and written beside it as
    Markdown. Returns the paths, the page's first.

    Raises:
        UserError: no run is done, or as `write_report`.
    """
    from vcore_ds.commands.report.page import write_page
    from vcore_ds.commands.report.pictures import write_pictures
    from vcore_ds.commands.report.read import read_runs
    from vcore_ds.commands.report.sweep import finished_runs, sweep_tables
    from vcore_ds.files.aside import written_aside
    from vcore_ds.files.user_paths import writing

    sweep, done = finished_runs(folder)
    found = read_runs([sweep.run_folder(run) for run in done], top=top, tokenizer_path=tokenizer_path, names=done)
    tables = sweep_tables(sweep, found)
    print(tables.markdown())
    page = folder / REPORT if output is None else output
    beside = page.with_suffix(".md")
    with writing("--output", beside, "a file that can be written"), written_aside(beside) as unfinished:
        unfinished.write_text(tables.markdown(), encoding="utf-8")
    pictures = write_pictures(found, png) if png is not None else []
    return [write_page(found, page, tables), beside, *pictures]


def write_report(
    runs: Sequence[Path],
    *,
    output: Path | None = None,
    png: Path | None = None,
    top: int = 15,
    tokenizer_path: str | None = None,
) -> list[Path]:
    """Writes the page, and the pictures where `png` names a folder. Returns their paths, the page's first.

    Raises:
        UserError: a folder holds no run or a damaged one, or something cannot be written.
    """
    from vcore_ds.commands.report.page import write_page
    from vcore_ds.commands.report.pictures import write_pictures
    from vcore_ds.commands.report.read import read_runs

    found = read_runs(runs, top=top, tokenizer_path=tokenizer_path)
    pictures = write_pictures(found, png) if png is not None else []
    return [write_page(found, runs[0] / REPORT if output is None else output), *pictures]


def after_training(recipe: str, overrides: Sequence[str]) -> None:
    """Writes the report of the run that this process has just trained, on rank 0, and says where it is. A report that
    cannot be written costs a warning and not the run."""
    from vcore_ds.config.load import load_recipe
    from vcore_ds.distributed import layout

    if not layout.is_first():
        return
    folder = Path(load_recipe(recipe, overrides).run.output_dir)
    try:
        (page,) = write_report([folder])
        print(f"Report: {page} (open it in a browser)", flush=True)
    except UserError as error:
        print(f"warning: no report: {error}", flush=True)
