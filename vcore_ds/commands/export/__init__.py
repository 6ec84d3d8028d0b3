"""`vcore-ds export`: a Hugging Face folder from a run's checkpoint."""

import argparse
from pathlib import Path

from vcore_ds.errors import UserError

HELP = "write a Hugging Face folder from a run's checkpoint"
DESCRIPTION = (
    "Write the full weights, the adapter, or the model with its adapter merged in, from a run's checkpoint of any "
    "world size: in one process, without a GPU, with one file's worth of weights in memory."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder (run.output_dir)")
    parser.add_argument(
        "--checkpoint", metavar="NAME", help="one of RUN/checkpoints, such as step_00000100 (default: the newest)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="new folder (default RUN/export/CHECKPOINT/model, adapter or merged)"
    )
    parser.add_argument("--merge", action="store_true", help="LoRA: merge the adapter into the model")
    parser.add_argument(
        "--dtype",
        choices=["bf16", "fp32"],
        help="data type of the weights (default: the run's precision; an adapter: fp32)",
    )
    parser.set_defaults(overrides=[])


def main(arguments: argparse.Namespace) -> None:
    if arguments.overrides:
        raise UserError(f"export: found {' '.join(arguments.overrides)} after RUN; expected one run and options")
    from vcore_ds.commands.export.write import export_run

    export_run(
        arguments.run,
        checkpoint=arguments.checkpoint,
        output=arguments.output,
        merge=arguments.merge,
        dtype=arguments.dtype,
    )
