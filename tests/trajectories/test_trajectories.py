"""The first three steps of every method against the committed four; in `make soak`, all four.

`python -m tests.trajectories.test_trajectories` writes the record again, for an intended change of numbers: say in the
commit which one, and why.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.trajectories import runs

pytestmark = pytest.mark.dist

FILE = Path(__file__).with_name("trajectories.json")

TOLERANCE, UTILITY_TOLERANCE = 2e-6, 2e-5
"""Relative tolerances; the second is for `vcore`, whose utilities are derivatives or differences of losses, on which
rounding has a larger effect. README.md has the measurements behind both."""


def write(trajectories: Mapping[str, runs.Trajectory]) -> None:
    """Write the record, a line for each step."""
    cases = []
    for case, steps in trajectories.items():
        rounded = [{name: None if x is None else float(f"{x:.9g}") for name, x in step.items()} for step in steps]
        cases.append(f"  {json.dumps(case)}: [\n" + ",\n".join(f"   {json.dumps(step)}" for step in rounded) + "\n  ]")
    FILE.write_text('{\n "trajectories": {\n' + ",\n".join(cases) + "\n }\n}\n")


def read() -> dict[str, runs.Trajectory]:
    return json.loads(FILE.read_text())["trajectories"]


def approximate(case: str, step: Mapping[str, float | None]) -> dict[str, object]:
    """Expected numbers; a mean of numbers of both signs is compared on the scale of those numbers."""
    tolerance = UTILITY_TOLERANCE if case.startswith("vcore") else TOLERANCE
    scales = {**step, "utility_mean": step["utility_std"]}
    return {
        name: value if value is None else pytest.approx(value, rel=0, abs=tolerance * abs(scales[name] or 0.0))
        for name, value in step.items()
    }


@pytest.fixture(scope="module")
def trajectories() -> dict[str, runs.Trajectory]:
    return runs.run_all(runs.NUM_COMPARED)


def test_the_record_has_every_case() -> None:
    assert list(read()) == list(runs.CASES)


@pytest.mark.parametrize("case", runs.CASES)
def test_a_trajectory_equals_the_one_on_record(trajectories: dict[str, runs.Trajectory], case: str) -> None:
    expected = read()[case][: runs.NUM_COMPARED]
    assert len(trajectories[case]) == len(expected)
    for step, recorded in zip(trajectories[case], expected, strict=True):
        assert step == approximate(case, recorded)


if __name__ == "__main__":
    write(runs.run_all())
