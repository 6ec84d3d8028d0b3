"""`vcore-ds sweep`: run all cells and seeds of a sweep file, here one after another or as a SLURM job array."""

import argparse
from pathlib import Path

from vcore_ds.commands.arguments import positive
from vcore_ds.common.errors import UserError

HELP = "run a grid or list of recipes over seeds, here or as a SLURM job array"
DESCRIPTION = (
    "Run every cell of a sweep file (YAML) with every seed: here, one after another, or as a SLURM job array whose "
    "tasks requeue and resume by themselves. All recipes are validated before the first run starts. The same command "
    "again skips finished runs, resumes unfinished ones and retries failed ones. docs/sweeps.md describes the file; "
    "vcore-ds report FOLDER makes the tables. Example: vcore-ds sweep launch_scripts/sweeps/smollm2.yaml --ranks 2"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sweep", type=Path, metavar="SWEEP.yaml", help="sweep file, such as those in launch_scripts/sweeps"
    )
    parser.add_argument("--status", action="store_true", help="show the state of each run and exit")
    parser.add_argument(
        "--ranks", type=positive, default=1, metavar="N", help="ranks of each run on this machine (default 1)"
    )
    parser.add_argument(
        "--slurm", action="store_true", help="submit unfinished runs as a job array; start it in the repository"
    )
    parser.add_argument(
        "--sbatch", default="", metavar="'OPTION ...'", help="options for sbatch, such as '--nodes=2 --time=8:00:00'"
    )
    parser.set_defaults(overrides=[])


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError for a user's mistake, RunFailed if runs have failed, RunStopped if some are unfinished after a
    stop request."""
    from vcore_ds.commands.sweep.folder import begin_sweep, read_sweep_folder
    from vcore_ds.commands.sweep.run import describe, run_here, submit
    from vcore_ds.planning.sweep import load_sweep

    if arguments.overrides:
        raise UserError(
            f"sweep: found {' '.join(arguments.overrides)} after the sweep file; expected nothing. Put settings of all "
            "cells under common: in the file"
        )
    if arguments.sbatch and not arguments.slurm:
        raise UserError("--sbatch: found without --slurm; expected both, to submit a job array")
    sweep = load_sweep(arguments.sweep, None if arguments.slurm or arguments.status else arguments.ranks)
    if arguments.status:
        print(describe(read_sweep_folder(sweep.folder)))
    elif arguments.slurm:
        print(submit(begin_sweep(sweep), arguments.sbatch))
    else:
        run_here(begin_sweep(sweep), arguments.ranks)
