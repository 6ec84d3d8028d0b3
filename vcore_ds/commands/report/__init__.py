"""`vcore-ds report`: a run, several side by side, or a sweep, as one HTML file or as text."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vcore_ds.commands.arguments import positive
from vcore_ds.commands.sweep.folder import is_sweep, read_sweep_folder
from vcore_ds.common.errors import UserError
from vcore_ds.training.run_folder import REPORT

HELP = "show what runs learnt, token weights, curves and costs, as HTML or text"
DESCRIPTION = (
    "Write one self-contained HTML file: losses, recorded tokens coloured by weight, what gained and lost most weight, "
    "curves, times, recipe and environment. Several runs are shown side by side, those that differ only in the seed as "
    "one curve. For a sweep's folder it adds tables over seeds, prints them, and, unless --output is given, writes "
    "report.md there. Needs no GPU, training data or model weights (docs/reading-a-report.md, docs/sweeps.md). "
    "Example: vcore-ds report runs/a runs/b --output a.html"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run's folder (run.output_dir), or a sweep's")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--text", action="store_true", dest="as_text", help="print the tables, and write no HTML file")
    page = f"the HTML file to write, the only one besides --png (default: {REPORT} in the folder of the first RUN)"
    form.add_argument("--output", type=Path, metavar="FILE", help=page)
    add("--png", type=Path, metavar="FOLDER", help="also write each curve there as PNG and PDF (needs matplotlib)")
    add("--top", type=positive, default=15, metavar="N", help="length of the lists of tokens and phrases (default 15)")
    rare = "omit tokens and phrases with fewer occurrences (default: 1 in 5,000 recorded tokens, at least 5)"
    add("--min-count", type=positive, metavar="N", help=rare)
    tokenizer = "folder or hub id (default: the run's result, else its model.path)"
    add("--tokenizer", dest="tokenizer_path", metavar="PATH", help=tokenizer)
    parser.set_defaults(overrides=[])


def main(arguments: argparse.Namespace) -> None:
    # argparse ends the list of runs at the first option; cli.parse collects the rest.
    runs = [Path(run) for run in [*arguments.runs, *arguments.overrides]]
    names = ("as_text", "output", "png", "top", "min_count", "tokenizer_path")
    for path in write_report(runs, **{name: getattr(arguments, name) for name in names}):
        print(path)


def write_report(
    folders: Sequence[Path],
    *,
    as_text: bool = False,
    output: Path | None = None,
    png: Path | None = None,
    **options: Any,
) -> list[Path]:
    """Write the page, or print the text, of runs or of a sweep; return the written paths, the page's first. A sweep's
    tables are printed, and without `output` also written beside the page as Markdown; with it no other file is written,
    because that could be the user's. `png`: folder for the curves as pictures; `options`: `top`, `min_count`, and the
    folder or hub id `tokenizer_path`. Raises UserError where a folder holds no run or a damaged one, or a file
    cannot be written."""
    from vcore_ds.commands.report.runs import read_runs, write_pictures
    from vcore_ds.commands.report.sweep import sweep_markdown, sweep_section, sweep_text
    from vcore_ds.commands.report.tables import make_page
    from vcore_ds.common.paths import write_text, writing

    sections, title, markdown = [], None, None
    sweeps = [folder for folder in folders if is_sweep(folder)]
    if not sweeps:
        runs = read_runs(folders, **options)
    elif len(folders) > 1:
        raise UserError(
            f"RUN: {sweeps[0]}: found a sweep among {len(folders)} folders; expected it alone, or runs only"
        )
    else:
        sweep = read_sweep_folder(sweeps[0])
        if not (names := [run for run in sweep.runs if sweep.is_done(run)]):
            raise UserError(f"RUN: {sweeps[0]}: found no finished run of this sweep; expected one")
        runs = read_runs([sweep.run_folder(run) for run in names], names, **options)
        sections, title = [sweep_section(sweep, runs)], f"sweep {sweep.folder.resolve().name}"
        markdown = sweep_markdown(sweep, sections[0])
        print(f"{sweep_text(sections[0])}\n")
    written = write_pictures(runs, png) if png is not None else []
    page = make_page(runs, *sections, title=title, has_traces=not as_text)
    if as_text:
        print(page.text())
        return written
    path = folders[0] / REPORT if output is None else output
    texts = {path: page.html()}
    if markdown is not None and output is None:
        texts[path.with_suffix(".md")] = markdown
    for file, text in texts.items():
        with writing("--output", file, "a file that can be written"):
            write_text(file, text, several_writers=True)
    return [*texts, *written]
