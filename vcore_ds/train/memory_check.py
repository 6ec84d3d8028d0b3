"""Whether a run fits into the memory of its ranks, before its model is loaded."""

from vcore_ds.config.sections import EngineConfig
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import available_host_bytes, available_memory_bytes, device
from vcore_ds.errors import UserError
from vcore_ds.planning.memory_plan import Available, MemoryPlan
from vcore_ds.planning.memory_text import describe_shortage, describe_tightness
from vcore_ds.track.console import Console


def check_memory(plan: MemoryPlan | None, engine: EngineConfig, console: Console) -> None:
    """Compares the estimate with what the rank that has least has left; says so where it is close. A collective.

    Args:
        plan: None for a model whose sizes are unknown, which is not checked.

    Raises:
        UserError: on all ranks alike, where the run cannot fit: the bytes by kind, and what would take fewer.
    """
    if plan is None or not engine.memory_check:  # on all ranks alike
        return
    available, estimate = least_available(), plan.estimate
    if not available.holds(estimate):
        raise UserError(describe_shortage(plan, available))
    if not available.holds_with_margin(estimate):
        console.warn(describe_tightness(plan, available))


def least_available() -> Available:
    """What the rank that has least may use. A collective."""
    found = layout.gather_objects("job", (available_memory_bytes(), available_host_bytes()))
    return Available(min(own for own, _ in found), min(host for _, host in found), is_cpu=device().type == "cpu")
