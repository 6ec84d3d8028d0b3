"""The memory of a recipe in words: what `vcore-ds check` says of it, and what a run says that does not fit."""

from collections.abc import Mapping

from vcore_ds.planning.memory_plan import Available, MemoryPlan
from vcore_ds.units import gib


def describe_memory(plan: MemoryPlan) -> str:
    """One line on what a rank needs."""
    estimate = plan.estimate
    host = f", {gib(estimate.host_bytes, 1)} GiB in host memory" if estimate.host else ""
    return (
        f"Memory of each rank, estimated: {gib(estimate.persistent_bytes, 1)} GiB for the whole run, "
        f"{gib(estimate.peak_bytes, 1)} GiB at the peak ({estimate.peak_phase}, "
        f"{plan.settings.main_tokens:,} tokens in a micro-batch){host}"
    )


def describe_tightness(plan: MemoryPlan, available: Available) -> str:
    """The warning of a run that fits without a margin."""
    estimate = plan.estimate
    return (
        f"memory: {gib(estimate.peak_bytes)} of {gib(available.device)} GiB a rank are needed by the estimate, "
        f"in {estimate.peak_phase}; it may be short by {gib(estimate.margin_bytes)} GiB. Less is taken with\n"
        + _remedies(plan, available)
    )


def describe_shortage(plan: MemoryPlan, available: Available, remedies: str = "") -> str:
    """The message of a run that does not fit.

    Args:
        remedies: what to do, a line each; empty for every change that takes less, with its bytes.
    """
    estimate = plan.estimate
    where = "host memory" if available.is_cpu else "GPU memory"
    needed, room = estimate.peak_bytes + (estimate.host_bytes if available.is_cpu else 0), available.device
    if needed <= room:
        where, needed, room = "host memory", estimate.host_bytes, available.host
    phase = estimate.peak_phase
    lines = [
        f"memory: found {gib(room)} GiB of {where} for each rank; expected {gib(needed)} GiB, by an estimate for "
        f"{plan.plan.num_ranks_of_job:,} rank(s) and {plan.settings.main_tokens:,} tokens in a micro-batch on a "
        f"{plan.plan.member}:",
        *_table("for the whole run", estimate.persistent),
        *_table(f"at the peak, in {phase}", estimate.phases[phase]),
        *_table("in host memory", estimate.host),
        remedies or f"Less is taken with\n{_remedies(plan, available)}",
        "engine.memory_check=false starts anyway",
    ]
    return "\n".join(lines)


def _table(title: str, kinds: Mapping[str, int]) -> list[str]:
    """GiB by kind, one line each, below their sum; nothing where there are none."""
    if not kinds:
        return []
    rows = [f"  {gib(num_bytes):>10}    {kind}" for kind, num_bytes in kinds.items() if num_bytes]
    return [f"  {gib(sum(kinds.values())):>10}  {title}", *rows]


def _remedies(plan: MemoryPlan, available: Available) -> str:
    lines = []
    for remedy in plan.remedies(available):
        estimate = remedy.estimate
        host = f" and {gib(estimate.host_bytes)} in host memory" if estimate.host else ""
        verdict = "" if available.holds(estimate) else ", not enough alone"
        lines.append(f"  {remedy.change}: {gib(estimate.peak_bytes)} GiB{host}{verdict}")
    return "\n".join(lines) or "  (nothing that the recipe could say)"
