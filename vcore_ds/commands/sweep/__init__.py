"""`vcore-ds sweep`: all runs of a sweep file, here one after another or as a SLURM job array."""

import argparse
from pathlib import Path

from vcore_ds.commands.arguments import positive
from vcore_ds.common.errors import UserError

HELP = "run a grid or list of recipes over seeds, here or as a SLURM job array"
DESCRIPTION = (
    "Run every cell of a sweep file (YAML) with every seed: here, one after another, or as a SLURM job array whose "
    "tasks requeue and resume by themselves. All recipes are validated before the first run starts. The same command "
    "again skips what is done, resumes what is not, and tries again what has failed. docs/sweeps.md has the format; "
    "vcore-ds report FOLDER makes the tables."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sweep", type=Path, metavar="SWEEP.yaml", help="sweep file, such as those in launch_scripts/sweeps"
    )
    parser.add_argument("--status", action="store_true", help="only show what is done, running, failed; starts nothing")
    parser.add_argument(
        "--ranks", type=positive, default=1, metavar="N", help="processes of a run on this machine (default 1)"
    )
    parser.add_argument(
        "--slurm", action="store_true", help="submit what is not done as a job array, from the repository"
    )
    parser.add_argument(
        "--sbatch", default="", metavar="'OPTION ...'", help="options for sbatch, such as '--nodes=2 --time=8:00:00'"
    )
    parser.set_defaults(overrides=[])


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError for whatever the user can fix, RunFailed where runs have failed, RunStopped where some are left
    after a stop request."""
    from vcore_ds.commands.sweep.folder import begin_sweep, read_sweep_folder
    from vcore_ds.commands.sweep.run import describe, run_here, submit
    from vcore_ds.planning.sweep import load_sweep

    if arguments.overrides:
        raise UserError(
            f"sweep: found {' '.join(arguments.overrides)} after the sweep file; expected nothing. What all cells "
            "share goes under common: in the file"
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
