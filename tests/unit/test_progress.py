"""Progress in a log file and on a terminal, on a simulated clock."""

import os
import pty
import sys
import termios

import pytest

from vcore_ds.common.text import Progress, duration


def collect_lines(seconds_each: float, total: int, idle_seconds: float = 0.0, **options: bool) -> list[str]:
    """Lines that a log gets from `total` parts that take `seconds_each`, the first after `idle_seconds`."""
    lines: list[str] = []
    now = [1000.0]
    with Progress("Work", total, say=lines.append, clock=lambda: now[0], **options) as progress:
        now[0] += idle_seconds  # such as for a look at what an earlier run has left, on a slow file system
        progress.advance(0)
        for _ in progress.over(range(total)):
            now[0] += seconds_each
    return lines


def test_a_log_gets_a_line_after_ten_seconds_then_every_half_minute_then_rarely() -> None:
    assert collect_lines(1.0, 9) == collect_lines(1.0, 10) == collect_lines(1.0, 100, enabled=False) == []
    assert collect_lines(1.0, 100) == ["Work: 10%, 1m30s left", "Work: 40%, 1m00s left", "Work: 70%, 30s left"]
    hours = collect_lines(1.0, 10 * 3600)
    assert hours[-1].startswith("Work: 9") and len(hours) <= 60
    assert collect_lines(90.0, 3) == ["Work: 33%, 3m00s left", "Work: 67%, 1m30s left"]
    assert collect_lines(0.0, 4, idle_seconds=60.0) == ["Work: 25%, 3m00s left"]  # nothing done leaves no line


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
