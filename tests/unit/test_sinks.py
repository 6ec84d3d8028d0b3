"""Sinks beside metrics.jsonl: the lines that they get; one that fails or hangs costs only a warning."""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from vcore_ds.training.metrics_log import MOST_WAITING, BackgroundSink, MetricsLog


class Kept:
    """Keeps what it gets, after raising for some steps."""

    def __init__(self, bad_steps: tuple[int, ...] = ()):
        self.lines: list[Mapping[str, float | int]] = []
        self.is_closed = False
        self._bad_steps = bad_steps

    def write(self, values: Mapping[str, float | int]) -> None:
        if values["step"] in self._bad_steps:
            raise ConnectionError(f"no server at step {values['step']}\nand a second line")
        self.lines.append(values)

    def close(self) -> None:
        self.is_closed = True


class Hanging(Kept):
    """Takes the first line, and never comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def write(self, values: Mapping[str, float | int]) -> None:
        self.release.wait()


def read_warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]


def test_a_sink_gets_every_line_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = Kept()
    log = MetricsLog(tmp_path, [BackgroundSink("kept", lambda: sink)])
    for step in range(1, 51):
        log.write({"step": step, "loss": 1.0 / step, "tau": None, "kl": float("inf")})
    log.close()
    assert sink.lines == [{"step": step, "loss": 1.0 / step} for step in range(1, 51)]
    assert sink.is_closed and not read_warnings(capsys)


def test_errors_are_one_warning_and_later_lines_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    sink = Kept(bad_steps=(1, 3))
    background = BackgroundSink("there", lambda: sink)
    for step in range(1, 5):
        background.write({"step": step})
    background.close()
    assert [line["step"] for line in sink.lines] == [2, 4] and sink.is_closed
    assert read_warnings(capsys) == [
        "warning: there: ConnectionError: no server at step 1. The run continues; metrics.jsonl has everything"
    ]


@pytest.mark.parametrize("error", [ModuleNotFoundError("is not installed: pip install there"), SystemExit(1)])
def test_a_sink_that_cannot_be_opened_causes_a_warning(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Kept:
        raise error

    background = BackgroundSink("there", fail)
    background.write({"step": 0})
    background._thread.join(600)  # it has failed by then; any number of lines may come before its thread gets a core
    for step in range(3 * MOST_WAITING):
        background.write({"step": step})
    background.close()
    (warning,) = read_warnings(capsys)
    assert warning.startswith(f"warning: there: {type(error).__name__}: {error}. The run continues")


def test_a_sink_that_hangs_neither_stops_the_run_nor_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hanging, num_steps = Hanging(), MOST_WAITING + 100
    log = MetricsLog(tmp_path, [BackgroundSink("hanging", lambda: hanging, close_seconds=0.1)])
    for step in range(1, num_steps + 1):
        log.write({"step": step})
    log.close()
    lines = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, num_steps + 1))
    (warning,) = read_warnings(capsys)
    assert warning.startswith("warning: hanging: 1,000 lines wait to be sent; further ones are dropped")
    hanging.release.set()


def test_a_sink_that_hangs_at_the_end_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    hanging = Hanging()
    background = BackgroundSink("hanging", lambda: hanging, close_seconds=0.1)
    background.write({"step": 1})
    background.close()
    (warning,) = read_warnings(capsys)
    assert warning.startswith("warning: hanging: has not taken everything within 0.1 s after the end of the run")
    hanging.release.set()


def test_a_run_that_ends_early_sends_its_last_lines(tmp_path: Path) -> None:
    """The sink takes its lines only once the main thread has ended, as a slow one might."""
    program = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from vcore_ds.training.metrics_log import BackgroundSink\n"
        "class Slow:\n"
        "    def write(self, values):\n"
        "        threading.main_thread().join()\n"
        "        with open(sys.argv[1], 'a') as file:\n"
        "            file.write(f'{values}\\n')\n"
        "    def close(self):\n"
        "        Path(sys.argv[1]).write_text('closed')\n"
        "sink = BackgroundSink('slow', Slow)\n"
        "for step in range(3):\n"
        "    sink.write({'step': step})\n"
        "sys.exit(85)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "lines")], capture_output=True, text=True)
    assert done.returncode == 85 and not done.stderr
    assert (tmp_path / "lines").read_text() == "{'step': 0}\n{'step': 1}\n{'step': 2}\n"
