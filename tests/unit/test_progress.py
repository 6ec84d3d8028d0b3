"""Progress in a log file and on a terminal, on a simulated clock."""

import os
import pty
import sys
import termios

import pytest

from vcore_ds.common.text import Progress, duration


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def collect_lines(seconds_each: float, total: int, **options: bool) -> list[str]:
    """Lines that a log gets from `total` parts that take `seconds_each`."""
    lines: list[str] = []
    clock = Clock()
    with Progress("Work", total, say=lines.append, clock=clock, **options) as progress:
        for _ in progress.over(range(total)):
            clock.now += seconds_each
    return lines


def test_a_log_gets_a_line_after_ten_seconds_then_every_half_minute_then_rarely() -> None:
    assert collect_lines(1.0, 9) == []
    assert collect_lines(1.0, 10) == []  # done is no progress
    assert collect_lines(1.0, 100) == [
        "Work: 10%, 1m30s left",
        "Work: 40%, 1m00s left",
        "Work: 70%, 30s left",
    ]
    hours = collect_lines(1.0, 10 * 3600)
    assert hours[-1].startswith("Work: 9") and len(hours) <= 60
    assert collect_lines(1.0, 100, enabled=False) == []


def test_nothing_done_leaves_no_line() -> None:
    lines: list[str] = []
    clock = Clock()
    with Progress("Work", 4, say=lines.append, clock=clock) as progress:
        clock.now += 60.0  # such as for a look at what an earlier run has left, on a slow file system
        progress.advance(0)
        progress.advance(1)
    assert lines == ["Work: 25%, 3m00s left"]


def test_parts_that_take_minutes_are_reported_one_by_one() -> None:
    assert collect_lines(90.0, 3) == ["Work: 33%, 3m00s left", "Work: 67%, 1m30s left"]


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = pty.openpty()
    termios.tcsetwinsize(writing, (24, 80))  # a new one has no size, and a bar on it is empty
    with os.fdopen(writing, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr("vcore_ds.common.text.BAR_SECONDS", 0.0)
        with Progress("Work", 4) as progress:
            progress.advance(1)
            progress._bar.refresh()  # type: ignore[union-attr]
        monkeypatch.undo()
        print(end="done", file=terminal, flush=True)  # there is something to read whatever happens
        shown = ""
        while not shown.endswith("done"):
            shown += os.read(reading, 100_000).decode()
    os.close(reading)
    assert "Work:  25%|" in shown and " left" in shown
    *_, blank, last = shown.split("\r")
    assert blank.strip() == "" and last == "done"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (3725, "1h02m")])
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert duration(seconds) == text
