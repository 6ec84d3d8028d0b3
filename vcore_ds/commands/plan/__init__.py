"""`vcore-ds plan`: estimate the cost of a recipe on a cluster before booking it."""

import argparse
import json

from vcore_ds.commands.arguments import add_recipe, positive, positive_number
from vcore_ds.commands.plan.lengths import SIMULATED_MEAN
from vcore_ds.common.errors import UserError
from vcore_ds.common.text import GIB, gib
from vcore_ds.planning.fit import find_shortage
from vcore_ds.planning.hardware import GPUS

HELP = "estimate memory, time and GPU hours of a recipe on a cluster"
DESCRIPTION = (
    "Estimate the cost of a recipe on a cluster, for plain fine-tuning and VCORE side by side: whether it fits, "
    "seconds of a step, GPU hours and the fewest GPUs. Exits with 2 if it does not fit. Needs no GPU, weights or data: "
    "only the model's folder, its config.json or a known name; lengths are read from data on this machine, else "
    "simulated. Seconds assume a share of the data sheet's speeds, which --calibrate takes from a run instead. "
    "docs/planning.md has the formulas. Example: vcore-ds plan qwen3_32b_math_full.yaml --gpus 64 --gpu H200"
)


GPU_OPTIONS = {
    "gpu_memory": ("memory_bytes", GIB, "GIB", "usable memory of a GPU, GiB"),
    "tflops": ("flops", 1e12, "N", "dense bf16 TFLOP/s of the data sheet"),
    "bandwidth": ("memory_bandwidth", 1e12, "TB/S", "memory bandwidth, TB/s"),
    "nvlink": ("node_bandwidth", 1e9, "GB/S", "bandwidth between GPUs of a node, GB/s per direction"),
    "nic": ("network_bandwidth", 1e9 / 8, "GBIT/S", "network bandwidth per GPU, Gbit/s"),
}
"""Option -> field of `Gpu` and its unit, metavar, help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_recipe(parser)
    add("--gpus", type=positive, required=True, metavar="N", help="GPUs of the run, over all nodes")
    add("--gpu", default="H100", metavar="NAME", help=f"kind of GPU: {', '.join(GPUS)} (default H100)")
    add("--gpus-per-node", type=positive, default=8, metavar="N", help="GPUs of a node (default 8)")
    changed = parser.add_argument_group("other GPUs", "each option replaces a value of --gpu")
    for option, (_, _, metavar, meaning) in GPU_OPTIONS.items():
        changed.add_argument(f"--{option.replace('_', '-')}", type=positive_number, metavar=metavar, help=meaning)
    host = "memory of a node, GiB (default 2048)"
    add("--host-memory", type=positive_number, default=2048.0, metavar="GIB", help=host)
    mean = f"mean tokens of sequences before truncation (default: those of local data, else {SIMULATED_MEAN:,})"
    add("--mean-tokens", type=positive_number, metavar="N", help=mean)
    compare = "instead, a column per setting: overrides or fragments, several in quotes ('lora.rank=64 lora.alpha=128')"
    add("--compare", nargs="+", action="extend", default=[], metavar="SETTING", help=compare)
    add("--calibrate", metavar="RUN", help="use the speed achieved by this run, from its metrics.jsonl")
    add("--json", action="store_true", help="print the plan as JSON")


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError for a recipe, GPU, model or run that cannot be used; and, after printing the plan, if
    the recipe does not fit, not with `engine.memory_check: false`."""
    from vcore_ds.commands.plan.columns import build_table
    from vcore_ds.commands.plan.table import as_dict, describe

    table = build_table(arguments)
    print(json.dumps(as_dict(table), indent=2) if arguments.json else describe(table))
    plan = table.recipe_column.plan
    if table.must_fit and not plan.fits:
        where, room, needed = find_shortage(plan.memory.estimate, plan.available)
        raise UserError(
            f"memory: {table.recipe_name} does not fit on {table.cluster.describe()}: found {gib(room)} GiB of "
            f"{where} for each rank, expected {gib(needed)}"
        )
