"""The committed trajectories with the environment that they were made in, and the comparison with them."""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.trajectories.runs import Trajectory

FILE = Path(__file__).with_name("trajectories.json")

TOLERANCE, UTILITY_TOLERANCE = 2e-6, 2e-5
"""Relative tolerances; the second is for `vcore`, whose utilities are derivatives or differences of losses, on which
rounding has a larger effect. README.md has the measurements behind both."""

SCALES = {"utility_mean": "utility_std"}
"""A mean of numbers of both signs is compared on the scale of those numbers."""

COMMAND = "python -m tests.trajectories.write"


def environment() -> dict[str, str]:
    """Versions and processor, on which the numbers may depend."""
    packages = ("torch", "deepspeed", "transformers", "peft", "numpy")
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def read() -> dict[str, Any]:
    """Read the record, a dictionary with the keys `environment` and `trajectories`."""
    return json.loads(FILE.read_text())


def write(trajectories: Mapping[str, Trajectory]) -> None:
    """Write the record, a line for each step."""
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


def find_deviation(quantity: str, step: Mapping[str, float | None], expected: Mapping[str, float | None]) -> float:
    """Relative deviation; infinite where only one of the two has the quantity."""
    a, b = step.get(quantity), expected.get(quantity)
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return abs(a - b) / max(abs(expected[SCALES.get(quantity, quantity)] or 0.0), 1e-12)


def find_tolerance(case: str) -> float:
    return UTILITY_TOLERANCE if case.startswith("vcore") else TOLERANCE


def find_differences(trajectory: Trajectory, expected: Trajectory, tolerance: float) -> list[str]:
    """List numbers that deviate by more than the tolerance, in the order of the steps."""
    if len(trajectory) != len(expected):
        return [f"{len(trajectory)} steps, expected {len(expected)}"]
    return [
        f"step {k}: {quantity} is {here.get(quantity)}, was {there.get(quantity)}: "
        f"off by {find_deviation(quantity, here, there):.1e}"
        for k, (here, there) in enumerate(zip(trajectory, expected, strict=True), start=1)
        for quantity in sorted(here.keys() | there.keys())
        if not find_deviation(quantity, here, there) <= tolerance
    ]


def describe_environments(then: Mapping[str, str]) -> str:
    """Describe the recorded and the present environment, changed entries first."""
    now = environment()
    keys = sorted(now, key=lambda key: now[key] == then.get(key))
    return "\n".join(
        f"{key}: {now[key]}" if now[key] == then.get(key) else f"{key}: {then.get(key)} then, {now[key]} now"
        for key in keys
    )
