"""A plan as text and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from vcore_ds.commands.plan.columns import Column, PlanTable
from vcore_ds.commands.plan.prediction import RunPlan, describe_range, describe_verdict, warn_of_positions
from vcore_ds.common.text import align_columns, count, gib
from vcore_ds.planning.fit import format_memory_changes
from vcore_ds.planning.hardware import FAST, SLOW
from vcore_ds.planning.passes import active_parameters


def describe(table: PlanTable) -> str:
    plan = table.columns[0].plan
    warning = warn_of_positions(table.recipe_column.plan.settings, plan.shape)
    routed = f" ({active_parameters(plan.shape):,} active for each token)" if plan.shape.experts is not None else ""
    lines = [
        f"Plan: {table.recipe_name} on {table.cluster.describe()}",
        *_verdict(table.columns),
        *(line for column in table.columns for line in _list_remedies(column)),
        "",
        f"Model: {table.model}: {plan.counts.all:,} parameters{routed}, {plan.counts.trained:,} trained",
        f"Batch: {table.columns[-1].plan.batch.describe()}",
        *([] if warning is None else [warning]),
        "",
        *_assumptions(table),
    ]
    return "\n".join(lines)


def as_dict(table: PlanTable) -> dict[str, Any]:
    return {
        "recipe": table.recipe_name,
        "model": table.model,
        "cluster": {
            "gpus": table.cluster.num_gpus,
            "gpus_per_node": table.cluster.gpus_per_node,
            "gpu": asdict(table.cluster.gpu),
            "achieved": asdict(table.cluster.achieved),
        },
        "mean_tokens": table.columns[0].plan.lengths.mean,
        "columns": [_column(column) for column in table.columns],
    }


def _verdict(columns: list[Column]) -> list[str]:
    """A row for each column: whether it fits, time and cost."""
    steps = {column.plan.costed_steps for column in columns}
    name = "GPU hours of the run"
    if any(column.plan.settings.num_steps is None for column in columns):
        name = "GPU hours of 100 steps"
    elif len(steps) == 1:
        name += f" ({count(min(steps), 'step')})"
    rows = [["", "verdict", "GiB of a GPU", "seconds of a step", name, "fewest GPUs"]]
    for column in columns:
        plan = column.plan
        memory = f"{gib(plan.memory.estimate.peak_bytes, 1)} of {gib(plan.available.device, 0)}"
        seconds = _seconds(plan.cost.seconds_step) + describe_range(plan)
        hours = f"{plan.gpu_hours(plan.costed_steps):,.1f}"
        smallest = "none" if column.smallest is None else f"{column.smallest.cluster.num_gpus:,}"
        rows.append([column.title, describe_verdict(plan), memory, seconds, hours, smallest])
    return [f"  {line}" for line in align_columns(rows, left=("verdict",))]


def _list_remedies(column: Column) -> Iterator[str]:
    if not column.plan.fits:
        yield from ("", f"{column.title} does not fit. These need less memory:")
        yield from format_memory_changes(column.plan.memory, column.plan.available)


def _assumptions(table: PlanTable) -> Iterator[str]:
    cluster, achieved = table.cluster, table.cluster.achieved
    gpu = cluster.gpu
    plans = [column.plan for column in table.columns]
    first = plans[0]
    yield f"{first.lengths.describe(first.settings.cutoff_length)}; {first.tokens_per_step:,.0f} tokens per step"
    yield (
        f"Assumed: matrix multiplications reach {achieved.compute:.0%} of {gpu.name}'s {gpu.flops / 1e12:,.0f} TFLOP/s "
        f"({SLOW.compute:.0%} to {FAST.compute:.0%} in the range), fused attention "
        f"{cluster.attention_flops / 1e12:,.0f} TFLOP/s, memory and links what docs/planning.md says"
    )
    unmeasured = "No speed was measured: --calibrate RUN takes a run's"
    yield unmeasured if table.calibration is None else table.calibration.describe()
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


def _column(column: Column) -> dict[str, Any]:
    smallest = column.smallest
    return {
        "title": column.title,
        **_numbers(column.plan),
        "smallest_cluster": None if smallest is None else {"gpus": smallest.cluster.num_gpus, **_numbers(smallest)},
        "remedies": [] if column.plan.fits else _dump_remedies(column.plan),
    }


def _dump_remedies(plan: RunPlan) -> list[dict[str, Any]]:
    return [
        {
            "change": remedy.change,
            "peak": remedy.estimate.peak_bytes,
            "host": remedy.estimate.host_bytes,
            "fits": plan.available.holds(remedy.estimate),
        }
        for remedy in plan.memory.find_memory_changes(plan.available)
    ]


def _numbers(plan: RunPlan) -> dict[str, Any]:
    estimate, cost = plan.memory.estimate, plan.cost
    return {
        "parameters": plan.counts.all,
        "trained_parameters": plan.counts.trained,
        "active_parameters": active_parameters(plan.shape),
        "memory_bytes": {
            "persistent": dict(estimate.persistent),
            "phases": {phase: dict(kinds) for phase, kinds in estimate.phases.items()},
            "host": dict(estimate.host),
            "peak": estimate.peak_bytes,
            "peak_phase": estimate.peak_phase,
            "margin": estimate.margin_bytes,
            "available": plan.available.device,
        },
        "verdict": describe_verdict(plan),
        "tensor": plan.batch.tensor,
        "expert": plan.settings.parallel.expert,
        "sequence_parallel": {part: utilization.typical_parallel_size for part, utilization in plan.passes.items()},
        "received_bytes": {
            kind: {"inside_node": traffic.inside, "between_nodes": traffic.between}
            for kind, traffic in cost.traffic.items()
        },
        "seconds": cost.seconds,
        "seconds_step": cost.seconds_step,
        "seconds_step_range": plan.seconds_range,
        "tokens_per_step": plan.tokens_per_step,
        "gpu_hours_per_100_steps": plan.gpu_hours(100),
        "num_steps": plan.settings.num_steps,
    }


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f}" if seconds >= 0.1 else f"{seconds:,.3f}"
