"""The first three steps of every method against the committed four; in `make soak`, all four."""

import pytest

from tests.trajectories import record, runs

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def trajectories() -> dict[str, runs.Trajectory]:
    return runs.run_all(runs.NUM_COMPARED)


def test_the_record_has_every_case() -> None:
    assert list(record.read()["trajectories"]) == list(runs.CASES)


@pytest.mark.parametrize("case", runs.CASES)
def test_a_trajectory_equals_the_one_on_record(trajectories: dict[str, runs.Trajectory], case: str) -> None:
    expected, tolerance = record.read(), record.find_tolerance(case)
    changed = record.find_differences(
        trajectories[case], expected["trajectories"][case][: runs.NUM_COMPARED], tolerance
    )
    assert not changed, "\n".join(
        [
            f"{case}: {len(changed)} numbers differ from {record.FILE.name} by more than {tolerance:.0e}:",
            *changed[:10],
            record.describe_environments(expected["environment"]),
            f"If the change is meant: {record.COMMAND}",
        ]
    )
