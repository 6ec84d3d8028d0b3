"""Profiles of steps in one process; those of a run on two ranks are in dist/test_resume.py."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from vcore_ds.common.errors import UserError
from vcore_ds.config.sections import ProfileConfig
from vcore_ds.training.console import Console
from vcore_ds.training.profile import StepProfiler, check_profile, mark_phase, sum_operations
from vcore_ds.training.profile_folder import read_profiles


def make_event(name: str, start: float, end: float, self_time: float, **changes: Any) -> SimpleNamespace:
    """A function event of `torch.profiler`, in microseconds."""
    values = {
        "name": name,
        "time_range": SimpleNamespace(start=start, end=end),
        "self_cpu_time_total": self_time,
        "self_device_time_total": 0.0,
        "device_type": DeviceType.CPU,
        "is_user_annotation": False,
        "is_async": False,
    }
    return SimpleNamespace(**values | changes)


EVENTS = [
    make_event("main", 100.0, 200.0, 10.0, is_user_annotation=True),
    make_event("aten::mm", 110.0, 150.0, 40.0, self_device_time_total=4.0),
    make_event("aten::mm", 150.0, 170.0, 20.0, self_device_time_total=2.0),
    make_event("aten::add", 160.0, 190.0, 30.0, self_device_time_total=18.0),  # of another thread
    make_event("gloo:all_reduce", 160.0, 190.0, 30.0, is_async=True),
    make_event("kernel", 160.0, 190.0, 0.0, self_device_time_total=24.0, device_type=DeviceType.CUDA),
    make_event("update", 210.0, 220.0, 2.0, is_user_annotation=True),
    make_event("aten::mul", 211.0, 219.0, 8.0),
    make_event("aten::sum", 205.0, 206.0, 1.0),
]


def test_operations_belong_to_the_phase_in_which_they_begin() -> None:
    rows = [(row.phase, row.operation, row.calls, row.seconds, row.share) for row in sum_operations(EVENTS, False)]
    assert rows == [
        ("main", "aten::mm", 2, pytest.approx(60e-6), pytest.approx(0.6)),
        ("main", "aten::add", 1, pytest.approx(30e-6), pytest.approx(0.3)),
        ("main", "(Python and waiting)", 1, pytest.approx(10e-6), pytest.approx(0.1)),
        ("update", "aten::mul", 1, pytest.approx(8e-6), pytest.approx(0.8)),
        ("update", "(Python and waiting)", 1, pytest.approx(2e-6), pytest.approx(0.2)),
        ("between", "aten::sum", 1, pytest.approx(1e-6), 1.0),
    ]
    on_gpu = [(row.operation, row.share) for row in sum_operations(EVENTS, True) if row.phase == "main"]
    assert on_gpu == [("aten::add", 0.75), ("aten::mm", 0.25), ("(Python and waiting)", 0.0)]


def test_a_phase_with_many_operations_has_a_row_for_the_rest() -> None:
    many = [make_event("main", 0.0, 100.0, 5.0, is_user_annotation=True)]
    many += [make_event(f"operation {i}", i + 1.0, i + 2.0, 30.0 - i) for i in range(20)]
    rows = sum_operations(many, False)
    assert len(rows) == 13 and (rows[-1].operation, rows[-1].calls) == ("(9 other operations)", 9)
    assert sum(row.share for row in rows) == pytest.approx(1.0)


def profile_steps(folder: Path, steps: int) -> None:
    profiler = StepProfiler(ProfileConfig(steps=[2]), folder, Console(enabled=True))
    for step in range(1, steps + 1):
        with profiler.step(step), mark_phase("main"):
            torch.ones(4, 4) @ torch.ones(4, 4)


def test_only_the_chosen_step_is_profiled_and_the_log_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile_steps(tmp_path, 3)
    (line,) = capsys.readouterr().out.splitlines()
    trace = tmp_path / "profile" / "step_00000002_rank_0.json.gz"
    assert line.startswith(f"profile of step 2: {trace} ")
    (profile,) = read_profiles(tmp_path)
    assert (profile.step, profile.rank, profile.files) == (2, 0, [trace, trace.with_name("step_00000002_rank_0.csv")])
    with gzip.open(trace) as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    assert names.count("aten::mm") == 1 and "aten::mm" in {row.operation for row in profile.rows}


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


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "step_00000002_rank_0.csv").write_text("phase,operation\nmain,x\n")
    with pytest.raises(UserError, match=r"step_00000002_rank_0.csv: is damaged"):
        read_profiles(tmp_path)
