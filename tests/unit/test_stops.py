"""The reason to stop on which ranks agree after a step. One rank here; more in e2e/test_stops.py."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from vcore_ds.distributed import layout, signals
from vcore_ds.distributed.signals import REASONS, Stops

PROCESS_AGE_SECONDS = signals.process_age_seconds
LIMIT = "run.time_limit_minutes"


class Clock:
    """A clock that the test advances: on a loaded machine the real one would decide the outcome."""

    now = 1000.0
    time = staticmethod(time.time)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """One rank, in a process that has just been started."""
    clock = Clock()
    monkeypatch.setattr(layout, "is_first", lambda: True)
    monkeypatch.setattr(layout, "sum_over", lambda axis, values: values)
    monkeypatch.setattr(signals, "time", clock)
    monkeypatch.setattr(signals, "process_age_seconds", lambda: 0.0)
    return clock


def test_stop_file_is_removed_when_it_is_honoured(tmp_path: Path):
    here = Stops(tmp_path, 60.0)
    assert here.agree_on_reason() is None
    (tmp_path / "STOP").touch()
    assert here.agree_on_reason() == "the STOP file"
    assert not (tmp_path / "STOP").exists()
    assert here.agree_on_reason() is None


def test_a_signal_to_this_rank_or_another_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signals.stop_signals, "received", "SIGUSR1")
    assert Stops(tmp_path, None).agree_on_reason() == "SIGUSR1"
    monkeypatch.setattr(signals.stop_signals, "received", None)
    rank_1_flags = [float(reason == "SIGTERM") for reason in REASONS]
    monkeypatch.setattr(
        layout, "sum_over", lambda axis, values: [a + b for a, b in zip(values, rank_1_flags, strict=True)]
    )
    assert Stops(tmp_path, None).agree_on_reason() == "SIGTERM"


def test_time_limit_leaves_room_for_a_step_and_a_save(tmp_path: Path, clock: Clock):
    here = Stops(tmp_path, 10.0)
    here.record_save(20.0, 20.0)
    clock.now += 20.0 + 100.0
    assert here.agree_on_reason() is None  # 480 s are left, 1.5 x (100 s + 20 s) = 180 s are needed
    clock.now += 150.0
    assert here.agree_on_reason() is None  # 330 s, and 255 s
    clock.now += 80.0
    assert here.agree_on_reason() == LIMIT  # 250 s, and still 255 s: the longest step counts


@pytest.mark.parametrize(
    "seconds, seconds_next, reason",
    [
        # 380 s are left. 1.5 x (10 s + 200 s) = 315 s are needed: the save is not part of a step.
        (200.0, 200.0, None),
        # 310 s are left. 1.5 x (10 s + 200 s) = 315 s are needed; before the first write, 1.5 x (10 s + 60 s).
        (270.0, 200.0, LIMIT),
        (270.0, None, None),
    ],
)
def test_the_time_of_a_save_is_no_step_and_the_next_save_must_fit(
    tmp_path: Path, clock: Clock, seconds: float, seconds_next: float | None, reason: str | None
):
    here = Stops(tmp_path, 10.0)
    clock.now += 10.0
    assert here.agree_on_reason() is None
    clock.now += seconds
    here.record_save(seconds, seconds_next)
    clock.now += 10.0
    assert here.agree_on_reason() == reason


@pytest.mark.parametrize(
    "age_seconds, limit_minutes, reason",
    [
        (50.0, 1.0, None),  # 10 s of 60 s are left, 9 s are needed: an unmeasured save takes a tenth of a short limit
        (52.0, 1.0, LIMIT),
        (24 * 3600 - 500.0, 24 * 60.0, None),  # 450 s are needed: it takes five minutes of a long one
        (24 * 3600 - 400.0, 24 * 60.0, LIMIT),
    ],
)
def test_the_remaining_time_counts_from_the_start_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_seconds: float, limit_minutes: float, reason: str | None
):
    monkeypatch.setattr(signals, "process_age_seconds", lambda: age_seconds)
    assert Stops(tmp_path, limit_minutes).agree_on_reason() == reason


def test_the_age_of_a_process_is_that_of_ps():
    before = PROCESS_AGE_SECONDS()
    ps = subprocess.run(["ps", "-o", "etimes=", "-p", str(os.getpid())], capture_output=True, text=True, check=True)
    assert before - 2 < float(ps.stdout) < PROCESS_AGE_SECONDS() + 2  # however long ps took
