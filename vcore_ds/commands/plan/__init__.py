"""`vcore-ds plan`: what a recipe costs on a cluster, before the cluster is booked."""

import argparse
import json
from pathlib import Path

from vcore_ds.commands.arguments import add_recipe, positive, positive_number
from vcore_ds.planning.hardware import GPUS
from vcore_ds.planning.spread import SIMULATED_MEAN

HELP = "memory, traffic, time and GPU hours of a recipe on a cluster"
DESCRIPTION = (
    "Predict what a recipe costs on a cluster: memory of a GPU by kind, Ulysses degrees, bytes inside and "
    "between nodes, seconds of a step by phase, tokens a day, GPU hours, and the smallest cluster on which it fits; "
    "for supervised fine-tuning and VCORE side by side. Needs no GPU, weights or data: the model's folder, its "
    "config.json, or a known name, and simulated lengths. Seconds rest on assumed shares of the data sheets' speeds, "
    "which --calibrate replaces by those of a run. docs/planning.md has the formulas."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--gpus", type=positive, required=True, metavar="N", help="GPUs of the run, over all nodes")
    parser.add_argument("--gpu", default="H100", metavar="NAME", help=f"{', '.join(GPUS)} (default H100)")
    parser.add_argument("--gpus-per-node", type=positive, default=8, metavar="N", help="default 8")
    changed = parser.add_argument_group("other GPUs", "each option replaces a value of --gpu")
    changed.add_argument("--gpu-memory", type=positive_number, metavar="GIB", help="GiB that processes can use")
    changed.add_argument("--tflops", type=positive_number, metavar="N", help="dense bf16 TFLOP/s of the data sheet")
    changed.add_argument("--bandwidth", type=positive_number, metavar="TB/S", help="memory, TB/s")
    changed.add_argument(
        "--nvlink", type=positive_number, metavar="GB/S", help="between the GPUs of a node, GB/s in one direction"
    )
    changed.add_argument("--nic", type=positive_number, metavar="GBIT/S", help="network of each GPU, Gbit/s")
    parser.add_argument(
        "--host-memory", type=positive_number, default=2048.0, metavar="GIB", help="of a node, GiB (default 2048)"
    )
    parser.add_argument(
        "--mean-tokens",
        type=positive_number,
        default=float(SIMULATED_MEAN),
        metavar="N",
        help=f"of the simulated sequences, before long ones are cut (default {SIMULATED_MEAN})",
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        action="extend",
        default=[],
        metavar="SETTING",
        help="a column for each setting: overrides and fragments, several in quotes ('lora.rank=64 lora.alpha=128')",
    )
    parser.add_argument("--calibrate", metavar="RUN", help="take the achieved speed from this run's metrics.jsonl")
    parser.add_argument(
        "--picture", metavar="FILE", help="also draw memory and seconds against the number of GPUs (.png, .pdf, .svg)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError for what the user gave: recipe, GPU, model, run or picture."""
    from vcore_ds.commands.plan.columns import build_columns, draw
    from vcore_ds.commands.plan.table import as_dict, describe
    from vcore_ds.common.text import check_picture

    picture = None if arguments.picture is None else Path(arguments.picture)
    if picture is not None:
        check_picture("--picture", picture)
    found = build_columns(arguments)
    if picture is not None:
        draw(found, picture)
    print(json.dumps(as_dict(found), indent=2) if arguments.json else describe(found))
