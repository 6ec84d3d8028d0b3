"""A run's plan in words: one line of it, and the message of a run that a cluster cannot hold."""

from collections.abc import Sequence

from vcore_ds.planning.memory_text import describe_shortage
from vcore_ds.planning.run_plan import RunPlan, Way
from vcore_ds.units import gib


def plan_verdict(plan: RunPlan) -> str:
    """Whether it fits; `tight` where the margin is not left."""
    return "fits" if plan.fits_with_margin else "tight" if plan.fits else "does not fit"


def describe_plan(plan: RunPlan) -> str:
    """One line, such as `Plan on 64 H100 (8 nodes of 8): 3.98 s a step, 2,066 million tokens a day, ...`."""
    estimate = plan.memory.estimate
    return (
        f"Plan on {plan.cluster.describe()}: {plan_verdict(plan)}, {gib(estimate.peak_bytes, 1)} of "
        f"{gib(plan.available.device, 0)} GiB; {plan.cost.seconds_step:,.3g} s a step, "
        f"{plan.tokens_per_day / 1e6:,.0f} million tokens a day, {plan.gpu_hours(100):,.1f} GPU hours of 100 steps "
        "(assumed speeds: vcore-ds plan)"
    )


def describe_refusal(plan: RunPlan, ways: Sequence[Way]) -> str:
    """The message of a run that does not fit: bytes by kind, and the changes with which it would, cheapest first."""
    lines = [
        f"  {way.change}: {gib(way.plan.memory.estimate.peak_bytes)} GiB, "
        f"{way.plan.gpu_hours(100):,.1f} GPU hours of 100 steps"
        for way in ways
    ]
    heading = "It fits, with the fewest GPU hours by a prediction, with"
    return describe_shortage(plan.memory, plan.available, "\n".join([heading, *lines]) if ways else "")
