"""`vcore-ds plan`: estimate the cost of a recipe on a cluster before booking it."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from vcore_ds.commands.arguments import add_recipe, positive, positive_number
from vcore_ds.commands.plan.columns import GPU_OPTIONS, Column, PlanTable, build_table
from vcore_ds.commands.plan.prediction import SIMULATED_MEAN, find_faster_config, warn_of_positions
from vcore_ds.common.errors import UserError
from vcore_ds.common.text import align_columns, count, gib
from vcore_ds.planning.fit import describe_recomputation, find_shortage, format_memory_changes
from vcore_ds.planning.hardware import FAST, GPUS, SLOW
from vcore_ds.planning.passes import active_parameters

HELP = "estimate memory, time and GPU hours of a recipe on a cluster"
DESCRIPTION = (
    "Estimate the cost of a recipe on a cluster, for plain fine-tuning and VCORE side by side: whether it fits, "
    "seconds of a step, GPU hours and the fewest GPUs. Exits with 2 if it does not fit. Needs no GPU, weights or data: "
    "only the model's folder, its config.json or a known name; lengths are read from data on this machine, else "
    "simulated. Seconds assume a share of the data sheet's speeds, which --calibrate takes from a run instead. "
    "docs/planning.md has the formulas. Example: vcore-ds plan qwen3_32b_math_full.yaml --gpus 64 --gpu H200"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_recipe(parser)
    add("--gpus", type=positive, required=True, metavar="N", help="GPUs of the run, over all nodes")
    add("--gpu", default="H100", metavar="NAME", help=f"kind of GPU: {', '.join(GPUS)} (default H100)")
    add("--gpus-per-node", type=positive, default=8, metavar="N", help="GPUs of a node (default 8)")
    changed = parser.add_argument_group("other GPUs", "each option replaces a value of --gpu")
    for option, (_, _, metavar, meaning) in GPU_OPTIONS.items():
        changed.add_argument(f"--{option.replace('_', '-')}", type=positive_number, metavar=metavar, help=meaning)
    mean = f"mean tokens of sequences before truncation (default: those of local data, else {SIMULATED_MEAN:,})"
    add("--mean-tokens", type=positive_number, metavar="N", help=mean)
    compare = "instead, a column per setting: overrides or fragments, several in quotes ('lora.rank=64 lora.alpha=128')"
    add("--compare", nargs="+", action="extend", default=[], metavar="SETTING", help=compare)
    add("--calibrate", metavar="RUN", help="use the speed achieved by this run, from its metrics.jsonl")
    add("--json", action="store_true", help="print the plan as JSON")


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError for a recipe, GPU, model or run that cannot be used; and, after printing the plan, if
    the recipe does not fit, not with `engine.memory_check: false`."""
    table = build_table(arguments)
    print(
        json.dumps([dump_column(column) for column in table.columns], indent=2) if arguments.json else describe(table)
    )
    plan = table.recipe_plan
    if table.must_fit and not plan.fits:
        where, room, needed = find_shortage(plan.memory.estimate, plan.available)
        raise UserError(
            f"memory: {table.recipe_name} does not fit on {plan.cluster.describe()}: found {gib(room)} GiB of "
            f"{where} for each rank, expected {gib(needed)}"
        )


def describe(table: PlanTable) -> str:
    first = table.columns[0].plan
    warning = warn_of_positions(table.recipe_plan.settings, first.shape)
    routed = f" ({active_parameters(first.shape):,} active for each token)" if first.shape.experts is not None else ""
    changes: list[str] = []
    for title, plan in ((column.title, column.plan) for column in table.columns if not column.plan.fits):
        changes += ["", f"{title} does not fit. These need less memory:"]
        changes += format_memory_changes(plan.memory, plan.available)
    if (faster := find_faster_config(plan := table.recipe_plan)) is not None:
        seconds = f"{faster[1].cost.seconds_step:,.2f} instead of {plan.cost.seconds_step:,.2f} s per step"
        changes += ["", f"Faster: {faster[0]}, {seconds} ({plan.settings.method.name})"]
    lines = [
        f"Plan: {table.recipe_name} on {first.cluster.describe()}",
        *(f"  {line}" for line in align_columns(list(_list_rows(table.columns)), left=("verdict",))),
        *changes,
        "",
        f"Model: {table.model}: {first.counts.all:,} parameters{routed}, {first.counts.trained:,} trained",
        f"Batch: {table.columns[-1].plan.batch.describe()}",
        *([] if table.validation is None else [table.validation]),
        *([recomputation] if (recomputation := describe_recomputation(table.recipe_plan.memory.settings)) else []),
        *([] if warning is None else [warning]),
        "",
        *_list_assumptions(table),
    ]
    return "\n".join(lines)


def _list_rows(columns: list[Column]) -> Iterator[list[str]]:
    """A heading, and a row for each column: whether it fits, time and cost."""
    steps = {column.plan.costed_steps for column in columns}
    hours = "GPU hours of the run"
    if any(column.plan.settings.num_steps is None for column in columns):
        hours = "GPU hours of 100 steps"
    elif len(steps) == 1:
        hours += f" ({count(min(steps), 'step')})"
    yield ["", "verdict", "GiB of a GPU", "seconds of a step", hours, "fewest GPUs"]
    for column in columns:
        plan = column.plan
        seconds = plan.cost.seconds_step
        yield [
            column.title,
            plan.verdict,
            f"{gib(plan.memory.estimate.peak_bytes, 1)} of {gib(plan.available.device, 0)}",
            f"{seconds:,.{2 if seconds >= 0.1 else 3}f}{plan.describe_range()}",
            f"{plan.gpu_hours(plan.costed_steps):,.1f}",
            "none" if column.smallest is None else f"{column.smallest.cluster.num_gpus:,}",
        ]


def _list_assumptions(table: PlanTable) -> Iterator[str]:
    plans = [column.plan for column in table.columns]
    first, cluster = plans[0], plans[0].cluster
    gpu, achieved = cluster.gpu, cluster.achieved
    yield f"{first.lengths.describe(first.settings.cutoff_length)}; {first.tokens_per_step:,.0f} tokens per step"
    yield (
        f"Assumed: matrix multiplications reach {achieved.compute:.0%} of {gpu.name}'s {gpu.flops / 1e12:,.0f} TFLOP/s "
        f"({SLOW.compute:.0%} to {FAST.compute:.0%} in the range), fused attention "
        f"{cluster.attention_flops / 1e12:,.0f} TFLOP/s, memory and links what docs/planning.md says"
    )
    yield table.speeds
    targets = {plan.settings.lora.target_modules for plan in plans if plan.settings.lora is not None}
    if targets - {"all-linear"}:
        yield "Assumed: adapters on all linear layers but no experts, although lora.target_modules lists some"
    loads = sorted({plan.memory.settings.expert_load for plan in plans} - {1.0})
    if loads:
        busiest = " or ".join(f"{load:.2f}" for load in loads)
        yield (
            f"Assumed: the busiest GPU of an expert-parallel group is sent {busiest} times the mean GPU's tokens, and "
            "the others wait for it; a run measures that (docs/parallelism.md)"
        )


def dump_column(column: Column) -> dict[str, Any]:
    """The numbers of a column, in bytes and seconds."""
    plan, estimate = column.plan, column.plan.memory.estimate
    changes = {} if plan.fits else plan.memory.find_memory_changes(plan.available)
    return {
        "title": column.title,
        "gpu": asdict(plan.cluster.gpu),
        "mean_tokens": plan.lengths.mean,
        "parameters": plan.counts.all,
        "trained_parameters": plan.counts.trained,
        "verdict": plan.verdict,
        "memory_bytes": asdict(estimate) | {"peak": estimate.peak_bytes, "available": plan.available.device},
        "received_bytes": {kind: asdict(traffic) for kind, traffic in plan.cost.traffic.items()},
        "seconds": plan.cost.seconds,
        "seconds_step": plan.cost.seconds_step,
        "seconds_step_range": plan.seconds_range,
        "gpu_hours_per_100_steps": plan.gpu_hours(100),
        "num_steps": plan.settings.num_steps,
        "fewest_gpus": None if column.smallest is None else column.smallest.cluster.num_gpus,
        "memory_changes": {
            words: {"peak": changed.peak_bytes, "fits": plan.available.holds(changed)}
            for words, changed in changes.items()
        },
    }
