"""`python -m pytest -p tests.helpers.cpu_seconds FILE...`: print the CPU seconds of each file, over this process, the
server of ranks and everything that they have started and waited for. Imports of the collection are not counted."""

from contextlib import suppress

import psutil
import pytest

_seconds: dict[str, float] = {}
_last = 0.0


def measure() -> float:
    process, total = psutil.Process(), 0.0
    for each in (process, *process.children()):
        with suppress(psutil.NoSuchProcess):
            total += sum(each.cpu_times()[:4])  # user, system, and those of children that have ended
    return total


def pytest_collection_finish() -> None:
    global _last
    _last = measure()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _last
    file, now = report.nodeid.partition("::")[0], measure()
    _seconds[file] = _seconds.get(file, 0.0) + now - _last
    _last = now


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for file, seconds in sorted(_seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{seconds:7.1f} CPU seconds  {file}")
