"""A plan as a table and as JSON."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from vcore_ds.commands.plan.columns import RARER_PROBE, Column, Columns
from vcore_ds.common.text import align_columns, count, gib
from vcore_ds.planning import run_plan
from vcore_ds.planning.batch_plan import Part
from vcore_ds.planning.hardware import FAST, SLOW
from vcore_ds.planning.memory import Phase, active_parameters
from vcore_ds.planning.run_plan import RunPlan, Way, describe_range, describe_verdict

_PHASES: dict[Phase, str] = {"probe": "probe", "utility": "utilities", "main": "main", "step": "update"}


def describe(columns: Columns) -> str:
    plan = columns.columns[0].plan
    warning = run_plan.warn_of_positions(columns.recipe_column.plan.settings, plan.shape)
    routed = f" ({active_parameters(plan.shape):,} active for each token)" if plan.shape.experts is not None else ""
    lines = [
        f"Plan: {columns.recipe_name} on {columns.cluster.describe()}",
        *_verdict(columns.columns),
        *(line for column in columns.columns for line in _describe_ways(column)),
        "",
        f"Model: {columns.model}: {plan.counts.all:,} parameters{routed}, {plan.counts.trained:,} trained",
        f"Batch: {columns.columns[-1].plan.batch.describe()}",
        *([] if warning is None else [warning]),
        "",
        *_table(columns.columns),
        *(line for column in columns.columns for line in _describe_expert_sizes(column)),
        "",
        *_assumptions(columns),
    ]
    return "\n".join(lines)


def as_dict(columns: Columns) -> dict[str, Any]:
    return {
        "recipe": columns.recipe_name,
        "model": columns.model,
        "cluster": {
            "gpus": columns.cluster.num_gpus,
            "gpus_per_node": columns.cluster.gpus_per_node,
            "gpu": asdict(columns.cluster.gpu),
            "achieved": asdict(columns.cluster.achieved),
        },
        "mean_tokens": columns.columns[0].plan.lengths.mean,
        "columns": [_column(column) for column in columns.columns],
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
        memory = f"{gib(column.plan.memory.estimate.peak_bytes, 1)} of {gib(column.plan.available.device, 0)}"
        smallest = "none" if column.smallest is None else f"{column.smallest.cluster.num_gpus:,}"
        shown = [(column.title, column.plan, smallest)]
        if column.rarer_probe is not None:
            shown.append((f"{column.title} probe.every={RARER_PROBE}", column.rarer_probe, ""))
        for title, plan, fewest in shown:
            seconds = _seconds(plan.cost.seconds_step) + describe_range(plan)
            hours = f"{plan.gpu_hours(plan.costed_steps):,.1f}"
            rows.append([title, describe_verdict(plan), memory, seconds, hours, fewest])
    return [f"  {line}" for line in align_columns(rows, left=("verdict",))]


Row = tuple[str, list[str]]


def _table(columns: list[Column]) -> list[str]:
    titles = [column.title for column in columns]
    on_fewest = [_seconds(c.smallest.cost.seconds_step) if c.smallest is not None else "-" for c in columns]
    rows: list[Row] = [("", titles), *_plan_rows([column.plan for column in columns])]
    rows.append(("Seconds of a step on the fewest GPUs", on_fewest))
    return align_columns([[name, *(cells or [""] * len(titles))] for name, cells in rows])


def _plan_rows(plans: list[RunPlan]) -> Iterator[Row]:
    estimates = [plan.memory.estimate for plan in plans]

    def row(name: str, value: Callable[[RunPlan], str]) -> Row:
        return name, [value(plan) for plan in plans]

    yield "Memory of a GPU, GiB", []
    yield from _kinds([dict(estimate.persistent) for estimate in estimates])
    yield "  for the whole run", [gib(estimate.persistent_bytes) for estimate in estimates]
    for phase, name in _PHASES.items():
        yield from _kinds([dict(estimate.phases.get(phase, {})) for estimate in estimates], f"{name}: ")
    yield from _kinds([dict(estimate.with_tangents) for estimate in estimates], "main, forward-mode (JVP) pass: ")
    yield row("  at the peak", lambda plan: gib(plan.memory.estimate.peak_bytes))
    yield row("  in phase", lambda plan: _PHASES[plan.memory.estimate.peak_phase])
    yield row("  margin", lambda plan: gib(plan.memory.estimate.margin_bytes))
    yield row("  available", lambda plan: gib(plan.available.device))
    if any(estimate.host for estimate in estimates):
        yield row("  host memory", lambda plan: gib(plan.memory.estimate.host_bytes))
        yield row("  host memory available", lambda plan: gib(plan.available.host))
    if any(plan.batch.tensor > 1 for plan in plans):
        yield row("tensor parallelism", lambda plan: str(plan.batch.tensor))
    if any(plan.settings.parallel.expert > 1 for plan in plans):
        yield row("expert parallelism", lambda plan: str(plan.settings.parallel.expert))
    yield "Sequence-parallel size (Ulysses)", []
    yield row("  main batch", lambda plan: _sharing(plan, "main"))
    yield row("  probe batch", lambda plan: _sharing(plan, "probe"))
    yield row("  maximum tokens of a micro-batch", lambda plan: f"{plan.memory.settings.main_tokens:,}")
    for place, name in (("inside", "Received by a GPU from its node, GB per step"),
                        ("between", "Received by a GPU from other nodes, GB per step")):  # fmt: skip
        if not any(getattr(plan.cost.total_traffic, place) for plan in plans):
            continue
        kinds = list(dict.fromkeys(kind for plan in plans for kind in plan.cost.traffic))
        yield name, []
        for kind in kinds:
            values = [getattr(plan.cost.traffic.get(kind), place, 0.0) for plan in plans]
            yield f"  {kind}", [_gb(value) for value in values]
    yield "Seconds of a step", []
    for phase, name in _PHASES.items():
        yield f"  {name}", [_seconds(plan.cost.seconds[phase]) for plan in plans]
    yield row("  total", lambda plan: _seconds(plan.cost.seconds_step))
    for part in dict.fromkeys(part for plan in plans for part in plan.cost.parts):
        yield f"  of which {part}", [_seconds(plan.cost.parts.get(part, 0.0)) for plan in plans]
    yield row("Tokens per day, millions", lambda plan: f"{plan.tokens_per_day / 1e6:,.0f}")
    yield row("Model FLOPs utilization (MFU)", lambda plan: f"{plan.utilization:.1%}")
    if plans[0].cluster.num_nodes > 1:

        def share(plan: RunPlan, minutes: float | None) -> str:
            return "-" if minutes is None else f"{plan.goodput.share(minutes):.1%}"

        yield "Failures and checkpoints", []
        yield row("  hours between failures", lambda plan: f"{plan.goodput.hours_between_failures():,.1f}")
        name = "  seconds for which a checkpoint stops training"
        yield row(name, lambda plan: f"{plan.goodput.seconds_checkpoint:,.1f}")
        name = "  share of the time that trains, as in the recipe"
        yield row(name, lambda plan: share(plan, plan.settings.checkpoint_minutes))
        yield row("  checkpoint.every_minutes that loses least", lambda plan: f"{plan.goodput.best_minutes:,.0f}")
        yield row("  share of the time that trains, with that", lambda plan: share(plan, plan.goodput.best_minutes))
    yield row("GPU hours of scoring 10,000 traces", lambda plan: f"{plan.scoring_gpu_hours(10_000):,.1f}")


def _sharing(plan: RunPlan, part: Part) -> str:
    """Sequence-parallel size in most passes, times the tensor-parallel size."""
    return str(plan.passes[part].typical_parallel_size * plan.batch.tensor) if part in plan.passes else "-"


def _kinds(bytes_by_kind: list[dict[str, int]], prefix: str = "") -> Iterator[Row]:
    """A row per kind of memory, from the bytes by kind of each column."""
    for kind in dict.fromkeys(kind for kinds in bytes_by_kind for kind in kinds):
        values = [kinds.get(kind, 0) for kinds in bytes_by_kind]
        if any(values):
            yield f"  {prefix}{kind}", [gib(value) if value else "-" for value in values]


def _describe_ways(column: Column) -> Iterator[str]:
    if not column.plan.fits and not column.ways:
        yield from ("", f"{column.title} does not fit, and no recipe setting makes it fit on these GPUs")
    if column.ways:
        yield from ("", f"{column.title} does not fit. The changes with the fewest GPU hours that make it fit")
        yield from map(_describe_way, column.ways)


def _describe_expert_sizes(column: Column) -> Iterator[str]:
    if column.expert_sizes:
        yield from ("", f"{column.title} with other expert-parallel sizes")
        yield from map(_describe_way, column.expert_sizes)


def _describe_way(way: Way) -> str:
    plan = way.plan
    return (
        f"  {way.change}: {gib(plan.memory.estimate.peak_bytes)} GiB, {_seconds(plan.cost.seconds_step)} s per step,"
        f" {plan.gpu_hours(plan.costed_steps):,.1f} GPU hours for {count(plan.costed_steps, 'step')}"
        f"{'' if plan.fits else ', does not fit'}"
    )


def _assumptions(columns: Columns) -> Iterator[str]:
    cluster, achieved = columns.cluster, columns.cluster.achieved
    gpu = cluster.gpu
    plans = [column.plan for column in columns.columns]
    first = plans[0]
    yield (f"{first.lengths.describe(first.settings.cutoff_length)}; {first.tokens_per_step:,.0f} tokens per step")
    yield (
        f"Assumed: matrix multiplications reach {achieved.compute:.0%} of {gpu.name}'s {gpu.flops / 1e12:,.0f} TFLOP/s "
        f"({SLOW.compute:.0%} to {FAST.compute:.0%} in the range), fused attention "
        f"{cluster.attention_flops / 1e12:,.0f} TFLOP/s; memory {achieved.memory:.0%} of "
        f"{gpu.memory_bandwidth / 1e12:.2f} TB/s, links within a node {achieved.node:.0%} of "
        f"{gpu.node_bandwidth / 1e9:,.0f} GB/s, the network {achieved.network:.0%} of "
        f"{gpu.network_bandwidth * 8 / 1e9:,.0f} Gbit/s; all-gathers and reduce-scatters overlap with "
        f"{achieved.hidden:.0%} of the computation"
    )
    if cluster.num_nodes > 1:
        goodput, worst, best = first.goodput, run_plan.WORST_GPU_HOURS, run_plan.BEST_GPU_HOURS
        ends = [f"{goodput.hours_between_failures(hours):,.1f}" for hours in (worst, best)]
        yield (
            f"Assumed: a failure in {run_plan.GPU_HOURS_BETWEEN_FAILURES:,.0f} GPU hours (clusters have had one in "
            f"{worst:,.0f} to {best:,.0f}: here {' to '.join(ends)} hours apart), "
            f"{goodput.seconds_restart:,.0f} s until the next step, checkpoints at "
            f"{cluster.storage_bandwidth / 1e9:,.0f} GB/s (--storage)"
        )
    unmeasured = "No speed was measured: these are other trainers' (docs/planning.md); --calibrate RUN takes a run's"
    yield unmeasured if columns.calibration is None else columns.calibration.describe()
    targets = {plan.settings.lora.target_modules for plan in plans if plan.settings.lora is not None}
    if targets - {"all-linear"}:
        yield "Assumed: adapters on all linear layers but no experts, although lora.target_modules lists some"
    moe_plans = [plan for plan in plans if plan.shape.experts is not None]
    if moe_plans:
        loads = sorted({plan.memory.settings.expert_load for plan in moe_plans} - {1.0})
        busiest = " or ".join(f"{load:.2f}" for load in loads)
        yield (
            f"Assumed: the busiest GPU of an expert-parallel group is sent {busiest} times the mean GPU's tokens, and "
            "the others wait for it; a run measures that (docs/parallelism.md)"
            if loads
            else "Every GPU all-gathers all experts of a layer, as parallel.expert is 1 (docs/parallelism.md)"
        )
    tensor = sorted({plan.batch.tensor for plan in plans} - {1})
    if tensor:
        yield (
            f"parallel.tensor {' or '.join(map(str, tensor))} saves no bytes between nodes, because an all-gather "
            "brings all weights to each node once either way, and it sends the hidden states of every layer within the "
            "node: it is for layers and packs that do not fit on one GPU, not for speed (docs/parallelism.md)"
        )
    elif cluster.num_nodes > 1:
        yield (
            "Tensor parallelism within a node would not reduce the bytes between nodes: an all-gather brings all "
            "weights to each node once, whichever of its GPUs holds them"
        )


def _column(column: Column) -> dict[str, Any]:
    plan, smallest = column.plan, column.smallest
    return {
        "title": column.title,
        **_numbers(plan),
        "smallest_cluster": None if smallest is None else {"gpus": smallest.cluster.num_gpus, **_numbers(smallest)},
        "ways_to_fit": [{"change": way.change, **_numbers(way.plan)} for way in column.ways],
        "rarer_probe": None if column.rarer_probe is None else {"every": RARER_PROBE, **_numbers(column.rarer_probe)},
        "expert_degrees": [{"change": way.change, **_numbers(way.plan)} for way in column.expert_sizes],
    }


def _numbers(plan: RunPlan) -> dict[str, Any]:
    estimate, cost = plan.memory.estimate, plan.cost
    return {
        "parameters": plan.counts.all,
        "trained_parameters": plan.counts.trained,
        "active_parameters": active_parameters(plan.shape),
        "memory_bytes": {
            "persistent": dict(estimate.persistent),
            "phases": {phase: dict(kinds) for phase, kinds in estimate.phases.items()},
            "main_forward_with_tangents": dict(estimate.with_tangents),
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
        "seconds": dict(cost.seconds),
        "seconds_by_part": dict(cost.parts),
        "seconds_step": cost.seconds_step,
        "seconds_step_range": plan.seconds_range,
        "tokens_per_step": plan.tokens_per_step,
        "tokens_per_day": plan.tokens_per_day,
        "model_flops_utilization": plan.utilization,
        "hours_between_failures": plan.goodput.hours_between_failures(),
        "seconds_checkpoint": plan.goodput.seconds_checkpoint,
        "best_checkpoint_minutes": plan.goodput.best_minutes,
        "goodput_at_best": plan.goodput.share(plan.goodput.best_minutes),
        "gpu_hours_per_100_steps": plan.gpu_hours(100),
        "num_steps": plan.settings.num_steps,
    }


def _gb(num_bytes: float) -> str:
    return "-" if num_bytes == 0 else f"{num_bytes / 1e9:,.1f}"


def _seconds(seconds: float) -> str:
    return "-" if seconds == 0 else f"{seconds:,.2f}" if seconds >= 0.1 else f"{seconds:,.3f}"
