"""Profiles of steps in one process; those of a run on two ranks are in dist/test_resume.py."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vcore_ds.common.errors import UserError
from vcore_ds.config.sections import ProfileConfig
from vcore_ds.training.profile import check_profile, profiled_step


def profile_steps(folder: Path, steps: int) -> None:
    for step in range(1, steps + 1):
        with profiled_step(ProfileConfig(steps=[2]), folder, step), torch.profiler.record_function("main"):
            torch.ones(4, 4) @ torch.ones(4, 4)


def test_only_the_chosen_step_is_profiled_and_the_log_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile_steps(tmp_path, 3)
    (line,) = capsys.readouterr().out.splitlines()
    trace = tmp_path / "profile" / "step_00000002_rank_0.json.gz"
    assert line.startswith(f"profile of step 2: {trace} ")
    assert [*trace.parent.iterdir()] == [trace]
    with gzip.open(trace) as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    assert names.count("aten::mm") == 1 and "main" in names


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile").touch()
    profile_steps(tmp_path, 2)
    assert "warning: the profile of step 2 cannot be written to" in capsys.readouterr().out


@pytest.mark.parametrize(
    "values, message",
    [
        ({"steps": [3, 7]}, "run.profile.steps: found 7; expected steps from 1 to 6, the last of the run"),
        ({"steps": [3], "ranks": [0, 1]}, "run.profile.ranks: found 1; expected ranks from 0 to 0"),
        ({"steps": [3], "memory_snapshot": True}, "run.profile.memory_snapshot: found true on CPUs; expected false"),
    ],
)
def test_steps_ranks_and_memory_that_a_run_lacks_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        check_profile(ProfileConfig(**values), num_steps=6)
    assert str(refused.value).startswith(message)
