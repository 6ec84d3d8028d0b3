"""Settings of all tests: Ctrl-C works as on a terminal, each process has one thread and sees no GPU, Hypothesis has no
deadlines, the number of workers fits the machine, and the longest files run first."""

import gc
import os
import signal
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from tests.helpers.soak import IS_SOAK
from vcore_ds.distributed.signals import stop_signals

# A background job of a shell script ignores SIGINT, and every command that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread per process: sums do not depend on the number of cores, and workers do not compete for cores.
os.environ["OMP_NUM_THREADS"] = "1"

# No deadline for Hypothesis examples: their time depends on the machine's load. The same examples in every run: a new
# one could fail a change that has nothing to do with the bug it finds.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def commands_in_this_process_leave_its_signals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep commands that start ranks from installing signal handlers, which all later tests would inherit."""
    monkeypatch.setattr(stop_signals, "listen", lambda: None)


def pytest_configure(config: pytest.Config) -> None:
    """Keep all tests but those of tests/gpu, and the processes they start, on the CPU even on a machine with GPUs: two
    ranks cannot share a GPU, and numbers are compared to the last bit.

    The variables are set before torch initialises CUDA, which reads them; workers and ranks inherit them.
    """
    gc.disable()  # until collection ends: garbage collection would take a sixth of the time of the imports
    folder = Path(__file__).parent / "gpu"
    paths = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    if not all(path.is_relative_to(folder) for path in paths):
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")


BYTES_PER_WORKER = int(3.5e9)
"""Memory of a worker and its four ranks, at about 0.7 GB each."""

FIRST = (
    "tests/slurm/test_slurm.py",
    "tests/dist/test_fidelity.py",
    "tests/e2e/test_quickstart.py",
    "tests/dist/test_megatron",
    "tests/dist",
    "tests/simulated",
    "tests/models",
    "tests/slurm",
    "tests/chaos",
    "tests/e2e",
    "tests/trajectories",
)
"""Prefixes of test files, roughly in order of decreasing duration: a worker takes whole files, so a long file that
starts last would delay the end of the run."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Number of workers for `-n auto`: one per core and one more, for the time that others wait, as far as memory
    allows."""
    num_cores = float(len(os.sched_getaffinity(0)))
    num_bytes = psutil.virtual_memory().available
    # The two calls above do not report the limits of a container.
    quota, _, period = _control_group("cpu.max").partition(" ")
    if quota.isdecimal():
        num_cores = min(num_cores, int(quota) / int(period))
    limit = _control_group("memory.max")
    if limit.isdecimal():
        num_bytes = min(num_bytes, int(limit))
    return max(1, min(round(num_cores) + 1, num_bytes // BYTES_PER_WORKER))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not IS_SOAK:
        deselected = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]

    def place(item: pytest.Item) -> int:
        return next((i for i, start in enumerate(FIRST) if item.nodeid.startswith(start)), len(FIRST))

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report in one line the tests skipped for lack of a GPU."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if report.nodeid.startswith("tests/gpu/")]
    if skipped:
        terminalreporter.write_line(
            f"{len(skipped)} tests need a GPU and did not run: `make gpu` on a machine with one",
            yellow=True,
            bold=True,
        )


def _control_group(name: str) -> str:
    path = Path("/sys/fs/cgroup") / name
    return path.read_text().strip() if path.is_file() else ""
