"""Trackers beside metrics.jsonl: the lines that they get; one that fails or hangs costs only a warning."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers.commands import REPOSITORY
from vcore_ds.training.metrics_log import GROUPS, MOST_WAITING, BackgroundTracker, MetricsLog, tracker_name


class Kept:
    """Keeps what it gets, after raising for some steps."""

    name = "kept"

    def __init__(self, bad_steps: tuple[int, ...] = ()):
        self.lines: list[Mapping[str, float | int]] = []
        self.is_closed = False
        self._bad_steps = bad_steps

    def log(self, values: Mapping[str, float | int], step: int) -> None:
        if step in self._bad_steps:
            raise ConnectionError(f"no server at step {step}\nand a second line")
        self.lines.append({"step": step, **values})

    def finish(self) -> None:
        self.is_closed = True


class Hanging(Kept):
    """Takes the first line, and never comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def log(self, values: Mapping[str, float | int], step: int) -> None:
        self.release.wait()


def read_warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]


def test_a_tracker_gets_every_line_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Kept()
    log = MetricsLog(tmp_path, [BackgroundTracker("kept", lambda: tracker)])
    for step in range(1, 51):
        log.write({"step": step, "loss": 1.0 / step, "tau": None, "kl": float("inf")})
    log.close()
    assert tracker.lines == [{"step": step, "train/loss": 1.0 / step} for step in range(1, 51)]
    assert tracker.is_closed and not read_warnings(capsys)


def test_the_page_of_trackers_has_the_group_of_each_metric() -> None:
    rows = re.findall(r"(?m)^\| `(\w+)/` \| (.*) \|$", (REPOSITORY / "docs" / "tracking.md").read_text())
    assert {group for group, _ in rows} == {*GROUPS, "train"}
    for group, keys in rows:
        names = [name for name in re.findall(r"`(\w+)`", keys) if not name.endswith("_")]  # those are beginnings
        assert names and [tracker_name(name) for name in names] == [f"{group}/{name}" for name in names]


def test_errors_are_one_warning_and_later_lines_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Kept(bad_steps=(1, 3))
    background = BackgroundTracker("there", lambda: tracker)
    for step in range(1, 5):
        background.write({"step": step})
    background.close()
    assert [line["step"] for line in tracker.lines] == [2, 4] and tracker.is_closed
    assert read_warnings(capsys) == [
        "warning: there: ConnectionError: no server at step 1. The run continues; metrics.jsonl has everything"
    ]


@pytest.mark.parametrize("error", [ModuleNotFoundError("is not installed: pip install there"), SystemExit(1)])
def test_a_tracker_that_cannot_be_opened_causes_a_warning(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Kept:
        raise error

    background = BackgroundTracker("there", fail)
    background.write({"step": 0})
    background._thread.join(600)  # it has failed by then; any number of lines may come before its thread gets a core
    for step in range(3 * MOST_WAITING):
        background.write({"step": step})
    background.close()
    (warning,) = read_warnings(capsys)
    assert warning.startswith(f"warning: there: {type(error).__name__}: {error}. The run continues")


def test_a_hanging_tracker_neither_stops_the_run_nor_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hanging, num_steps = Hanging(), MOST_WAITING + 100
    log = MetricsLog(tmp_path, [BackgroundTracker("hanging", lambda: hanging, close_seconds=0.1)])
    for step in range(1, num_steps + 1):
        log.write({"step": step})
    log.close()
    lines = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, num_steps + 1))
    (warning,) = read_warnings(capsys)
    assert warning.startswith("warning: hanging: 1,000 lines wait to be sent; further ones are dropped")
    hanging.release.set()


def test_a_tracker_that_hangs_at_the_end_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    hanging = Hanging()
    background = BackgroundTracker("hanging", lambda: hanging, close_seconds=0.1)
    background.write({"step": 1})
    background.close()
    (warning,) = read_warnings(capsys)
    assert warning.startswith("warning: hanging: has not taken everything within 0.1 s after the end of the run")
    hanging.release.set()


def test_a_run_that_ends_early_sends_its_last_lines(tmp_path: Path) -> None:
    """The tracker takes its lines only once the main thread has ended, as a slow one might."""
    program = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from vcore_ds.training.metrics_log import BackgroundTracker\n"
        "class Slow:\n"
        "    name = 'slow'\n"
        "    def log(self, values, step):\n"
        "        threading.main_thread().join()\n"
        "        with open(sys.argv[1], 'a') as file:\n"
        "            file.write(f'{step}\\n')\n"
        "    def finish(self):\n"
        "        Path(sys.argv[1]).write_text('closed')\n"
        "tracker = BackgroundTracker('slow', Slow)\n"
        "for step in range(3):\n"
        "    tracker.write({'step': step})\n"
        "sys.exit(85)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "lines")], capture_output=True, text=True)
    assert done.returncode == 85 and not done.stderr
    assert (tmp_path / "lines").read_text() == "0\n1\n2\n"
