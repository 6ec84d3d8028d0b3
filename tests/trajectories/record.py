"""The committed trajectories, with the environment they were made in, and what differs from them."""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.trajectories.runs import Trajectory

FILE = Path(__file__).with_name("trajectories.json")

TOLERANCE, TOLERANCE_OF_UTILITIES = 2e-6, 2e-5
"""Relative; the second for `vcore`, whose utilities are derivatives or differences of losses, so that rounding weighs
more in them. README.md has the measurements behind both."""

SCALES = {"utility_mean": "utility_std"}
"""A mean of numbers of both signs is compared on the scale of those numbers."""

COMMAND = "python -m tests.trajectories.write"


def environment() -> dict[str, str]:
    """What the numbers may depend on."""
    packages = ("torch", "deepspeed", "transformers", "peft", "numpy")
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def read() -> dict[str, Any]:
    """Keys `environment` and `trajectories`."""
    return json.loads(FILE.read_text())


def write(trajectories: Mapping[str, Trajectory]) -> None:
    rounded = {
        case: [{name: None if x is None else float(f"{x:.9g}") for name, x in step.items()} for step in trajectory]
        for case, trajectory in trajectories.items()
    }
    cases = ",\n".join(
        f"  {json.dumps(case)}: [\n" + ",\n".join(f"   {json.dumps(step)}" for step in steps) + "\n  ]"
        for case, steps in rounded.items()
    )
    header = json.dumps(environment(), indent=2).replace("\n", "\n ")
    FILE.write_text(f'{{\n "environment": {header},\n "trajectories": {{\n{cases}\n }}\n}}\n')


def deviation(quantity: str, found: Mapping[str, float | None], expected: Mapping[str, float | None]) -> float:
    """Relative; infinite where only one of the two has the quantity."""
    a, b = found.get(quantity), expected.get(quantity)
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return abs(a - b) / max(abs(expected[SCALES.get(quantity, quantity)] or 0.0), 1e-12)


def tolerance_of(case: str) -> float:
    return TOLERANCE_OF_UTILITIES if case.startswith("vcore") else TOLERANCE


def differences(found: Trajectory, expected: Trajectory, tolerance: float) -> list[str]:
    """What deviates by more than the tolerance, in the order of the steps: the first line is where it began."""
    if len(found) != len(expected):
        return [f"{len(found)} steps, expected {len(expected)}"]
    return [
        f"step {k}: {quantity} is {here.get(quantity)}, was {there.get(quantity)}: "
        f"off by {deviation(quantity, here, there):.1e}"
        for k, (here, there) in enumerate(zip(found, expected, strict=True), start=1)
        for quantity in sorted(here.keys() | there.keys())
        if not deviation(quantity, here, there) <= tolerance
    ]


def describe_environments(then: Mapping[str, str]) -> str:
    """Then and now, what has changed first."""
    now = environment()
    keys = sorted(now, key=lambda key: now[key] == then.get(key))
    return "\n".join(
        f"{key}: {now[key]}" if now[key] == then.get(key) else f"{key}: {then.get(key)} then, {now[key]} now"
        for key in keys
    )
