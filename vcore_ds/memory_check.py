"""Whether a run fits into the memory of its ranks, before its model is loaded."""

from collections.abc import Mapping

from vcore_ds.config import Available, MemoryPlan
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import available_host_bytes, available_memory_bytes, device
from vcore_ds.errors import UserError
from vcore_ds.track.console import Console

GIB = 2**30


def check_memory(plan: MemoryPlan | None, console: Console) -> None:
    """Compares the estimate with what the rank that has least has left; says so where it is close. A collective.

    Args:
        plan: None for a model whose sizes are unknown, which is not checked.

    Raises:
        UserError: on all ranks alike, where the run cannot fit: the bytes by kind, and what would take fewer.
    """
    if plan is None or not plan.recipe.engine.memory_check:  # on all ranks alike
        return
    available, estimate = least_available(), plan.estimate
    if not available.holds(estimate):
        raise UserError(describe_shortage(plan, available))
    if not available.holds_with_margin(estimate):
        console.warn(
            f"memory: {_gib(estimate.peak_bytes)} of {_gib(available.device)} GiB a rank are needed by the estimate, "
            f"in {estimate.peak_phase}; it may be short by {_gib(estimate.margin_bytes)} GiB. Less is taken with\n"
            + _remedies(plan, available)
        )


def least_available() -> Available:
    """What the rank that has least may use. A collective."""
    found = layout.gather_objects("job", (available_memory_bytes(), available_host_bytes()))
    return Available(min(own for own, _ in found), min(host for _, host in found), is_cpu=device().type == "cpu")


def describe_shortage(plan: MemoryPlan, available: Available) -> str:
    """The message of a run that does not fit."""
    estimate = plan.estimate
    where = "host memory" if available.is_cpu else "GPU memory"
    needed, room = estimate.peak_bytes + (estimate.host_bytes if available.is_cpu else 0), available.device
    if needed <= room:
        where, needed, room = "host memory", estimate.host_bytes, available.host
    phase = estimate.peak_phase
    lines = [
        f"memory: found {_gib(room)} GiB of {where} for each rank; expected {_gib(needed)} GiB, by an estimate for "
        f"{plan.settings.num_ranks:,} rank(s) and {plan.settings.main_tokens:,} tokens in a micro-batch on a rank:",
        *_table("for the whole run", estimate.persistent),
        *_table(f"at the peak, in {phase}", estimate.phases[phase]),
        *_table("in host memory", estimate.host),
        "Less is taken with",
        _remedies(plan, available),
        "engine.memory_check=false starts anyway",
    ]
    return "\n".join(lines)


def _table(title: str, kinds: Mapping[str, int]) -> list[str]:
    """GiB by kind, one line each, below their sum; nothing where there are none."""
    if not kinds:
        return []
    rows = [f"  {_gib(num_bytes):>10}    {kind}" for kind, num_bytes in kinds.items() if num_bytes]
    return [f"  {_gib(sum(kinds.values())):>10}  {title}", *rows]


def _remedies(plan: MemoryPlan, available: Available) -> str:
    lines = []
    for remedy in plan.remedies(available):
        estimate = remedy.estimate
        host = f" and {_gib(estimate.host_bytes)} in host memory" if estimate.host else ""
        verdict = "" if available.holds(estimate) else ", not enough alone"
        lines.append(f"  {remedy.change}: {_gib(estimate.peak_bytes)} GiB{host}{verdict}")
    return "\n".join(lines) or "  (nothing that the recipe could say)"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f}"
