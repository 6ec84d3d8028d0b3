"""`vcore-ds report`: a run, several side by side, or a sweep, as one HTML file or as text."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vcore_ds.commands.arguments import positive
from vcore_ds.commands.sweep.folder import is_sweep
from vcore_ds.common.errors import UserError
from vcore_ds.train.run_folder import REPORT

if TYPE_CHECKING:
    from vcore_ds.commands.report.read import ReportedRun
    from vcore_ds.commands.report.scaling import SweepTables

HELP = "what was learnt, tokens by their weight, curves, costs: one HTML file, or text"
DESCRIPTION = (
    "Write one self-contained HTML file that needs no network: losses before and after training, the recorded tokens "
    "coloured by their weight, which tokens and phrases gained and lost most, utility against loss, learning curves, "
    "time by phase, recipe and environment. With --text print its tables instead. Several runs are laid side by side; "
    "those whose recipes differ in the seed only become one curve, their mean with their range. A sweep's folder also "
    "gives tables over seeds, with 95% intervals. Needs no GPU, and neither the training data nor the model. "
    "docs/reading-a-report.md explains the pictures and the tables of tokens, docs/sweeps.md those of sweeps."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder (run.output_dir), or a sweep's")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", help="print the tables, and write no HTML file")
    form.add_argument("--output", type=Path, metavar="FILE", help=f"default: {REPORT} in the folder of the first RUN")
    parser.add_argument(
        "--png", type=Path, metavar="FOLDER", help="also write every curve there, as PNG and PDF (needs matplotlib)"
    )
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
        "--step", type=positive, metavar="N", help="only the recorded tokens of optimizer step N (default: of all)"
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="folder or hub id (default: the run's result, then its model.path)"
    )
    parser.set_defaults(overrides=[])


def main(arguments: argparse.Namespace) -> None:
    # argparse ends the list of runs where an option begins; cli.parse collects what follows.
    runs = [Path(run) for run in [*arguments.runs, *arguments.overrides]]
    paths = write_report(
        runs,
        as_text=arguments.text,
        output=arguments.output,
        png=arguments.png,
        top=arguments.top,
        min_count=arguments.min_count,
        step=arguments.step,
        tokenizer_path=arguments.tokenizer,
    )
    for path in paths:
        print(path)


def write_report(
    folders: Sequence[Path],
    *,
    as_text: bool = False,
    output: Path | None = None,
    png: Path | None = None,
    top: int = 15,
    min_count: int | None = None,
    step: int | None = None,
    tokenizer_path: str | None = None,
) -> list[Path]:
    """Writes the page, or prints the text, of runs or of a sweep, and the pictures where `png` names a folder. The
    tables of a sweep are printed, and written beside the page as Markdown. Returns the paths of what is written, the
    page's first.

    Raises:
        UserError: a folder holds no run or a damaged one, or something cannot be written.
    """
    from vcore_ds.commands.report.curves import write_pictures
    from vcore_ds.commands.report.page import write_page
    from vcore_ds.commands.report.text import describe
    from vcore_ds.common.paths import write_atomically, writing

    runs, tables = _read(folders, top=top, min_count=min_count, step=step, tokenizer_path=tokenizer_path)
    if tables is not None:
        print(tables.markdown())
    pictures = write_pictures(runs, png) if png is not None else []
    if as_text:
        print(describe(runs))
        return pictures
    page = write_page(runs, folders[0] / REPORT if output is None else output, tables)
    if tables is None:
        return [page, *pictures]
    beside = page.with_suffix(".md")
    with writing("--output", beside, "a file that can be written"), write_atomically(beside) as unfinished:
        unfinished.write_text(tables.markdown(), encoding="utf-8")
    return [page, beside, *pictures]


def _read(
    folders: Sequence[Path], *, top: int, min_count: int | None, step: int | None, tokenizer_path: str | None
) -> "tuple[list[ReportedRun], SweepTables | None]":
    """The runs, and the tables of the sweep that they are of."""
    from vcore_ds.commands.report.read import read_runs
    from vcore_ds.commands.report.scaling import finished_runs, sweep_tables

    sweeps = [folder for folder in folders if is_sweep(folder)]
    read = partial(read_runs, top=top, min_count=min_count, step=step, tokenizer_path=tokenizer_path)
    if not sweeps:
        return read(folders), None
    if len(folders) > 1:
        raise UserError(
            f"RUN: {sweeps[0]}: found a sweep among {len(folders)} folders; expected it alone, or runs only"
        )
    sweep, done = finished_runs(sweeps[0])
    runs = read([sweep.run_folder(run) for run in done], names=done)
    return runs, sweep_tables(sweep, runs)


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
