"""Profiles of single optimizer steps (`run.profile`): PyTorch's traces, and tables of operations by phase."""

import csv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import write_atomically
from vcore_ds.config.sections import ProfileConfig
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.distributed.watchdog import mark
from vcore_ds.training.console import Console
from vcore_ds.training.profile_folder import PROFILES, OperationRow

PHASES = {"probe": "probe", "utility": "utility", "main": "main", "step": "update", "followed": "followed"}
"""Phase of a step (`StepRecorder.measuring`) -> its range in a trace."""
OUTSIDE = "between"  # operations of a step outside the phases: all-reduces of sums
MAX_OPERATIONS = 12  # rows of a phase in a table, besides the rest
WAITING = "(Python and waiting)"
"""Time of a phase in which its main thread ran no operation; on CPUs only."""


@contextmanager
def mark_phase(name: str) -> Iterator[None]:
    """A context that is a range in the trace of a profiled step; without a profiler it does nothing."""
    if not torch.autograd._profiler_enabled():
        yield
        return
    with torch.profiler.record_function(PHASES[name]):
        yield


def check_profile(profile: ProfileConfig | None, num_steps: int) -> None:
    """Raise UserError if a run of `num_steps` on these ranks and devices has no such step, rank or record of memory."""
    if profile is None:
        return
    num_ranks = layout.size("job")
    if (last := max(profile.steps)) > num_steps:
        raise UserError(f"run.profile.steps: found {last}; expected steps from 1 to {num_steps}, the last of the run")
    if (last := max(profile.ranks)) >= num_ranks:
        raise UserError(f"run.profile.ranks: found {last}; expected ranks from 0 to {num_ranks - 1}")
    if profile.memory_snapshot and device().type != "cuda":
        raise UserError(
            "run.profile.memory_snapshot: found true on CPUs; expected false: PyTorch records the allocations of GPUs "
            "only. The peak of each phase is in metrics.jsonl"
        )


class StepProfiler:
    """Profiles the chosen steps of a run on this rank, if it is a chosen one."""

    def __init__(self, profile: ProfileConfig | None, folder: Path, console: Console):
        self._profile, self._folder, self._console = profile, folder / PROFILES, console

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context for optimizer step `number`, from 1. Files that cannot be written are a warning: this rank must not
        exit while others train."""
        profile = self._profile
        if profile is None or number not in profile.steps:
            yield
            return
        if layout.rank("job") not in profile.ranks:
            yield
            mark("profile")
            return
        on_gpu = device().type == "cuda"
        if profile.memory_snapshot:
            torch.cuda.memory._record_memory_history()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with torch.profiler.profile(activities=activities) as profiler:
            yield
        mark("profile")
        name = f"step_{number:08d}_rank_{layout.rank('job')}"
        try:
            self._write(profiler, name, on_gpu, profile.memory_snapshot)
        except (OSError, RuntimeError) as error:
            Console(enabled=True).warn(f"the profile of step {number} cannot be written to {self._folder}: {error}")
            return
        finally:
            if profile.memory_snapshot:
                torch.cuda.memory._record_memory_history(enabled=None)
        self._console.say(
            f"profile of step {number}: {self._folder / name}.json.gz (Perfetto, chrome://tracing), operations by "
            "phase in .csv" + (", memory in .pickle" if profile.memory_snapshot else "")
        )

    def _write(self, profiler: torch.profiler.profile, name: str, on_gpu: bool, memory_snapshot: bool) -> None:
        self._folder.mkdir(exist_ok=True)
        if memory_snapshot:
            torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}.pickle"))
        # Not `write_atomically`: the suffix .gz makes PyTorch compress the file.
        unfinished = self._folder / f"unfinished_{name}.json.gz"
        profiler.export_chrome_trace(str(unfinished))
        unfinished.rename(self._folder / f"{name}.json.gz")
        events = profiler.events()
        with write_atomically(self._folder / f"{name}.csv") as path, path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(OperationRow.__dataclass_fields__)
            for row in sum_operations(events or (), on_gpu):
                writer.writerow([row.phase, row.operation, row.calls, f"{row.seconds:.9f}", f"{row.share:.6f}"])


def sum_operations(events: Iterable[Any], on_gpu: bool) -> list[OperationRow]:
    """Sum the seconds of operations by phase, the longest first, and the rest of each phase in one row. `events`:
    `torch.profiler`'s function events of a step. `on_gpu`: sum the time of the kernels that operations launch."""
    # Device events repeat the time of the operations that launched them.
    on_host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU and not event.is_async]
    ranges = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in on_host
        if event.is_user_annotation and event.name in PHASES.values()
    ]
    sums: dict[str, dict[str, list[float]]] = {name: {} for *_, name in sorted(ranges)}
    sums[OUTSIDE] = {}
    for event in on_host:
        # By time, not by thread: the backward runs on autograd's. Phases do not overlap.
        phase = next((name for start, end, name in ranges if start <= event.time_range.start <= end), OUTSIDE)
        operation = WAITING if event.is_user_annotation and event.name == phase else event.name
        entry = sums[phase].setdefault(operation, [0, 0.0])
        entry[0] += 1
        entry[1] += 1e-6 * (event.self_device_time_total if on_gpu else event.self_cpu_time_total)
    return [row for phase, operations in sums.items() for row in _make_rows(phase, operations)]


def _make_rows(phase: str, operations: dict[str, list[float]]) -> Iterator[OperationRow]:
    total = sum(seconds for _, seconds in operations.values())
    if total == 0.0:
        return
    longest = sorted(operations.items(), key=lambda item: -item[1][1])
    listed, rest = longest[:MAX_OPERATIONS], longest[MAX_OPERATIONS:]
    if rest:
        calls, seconds = (sum(values) for values in zip(*(entry for _, entry in rest), strict=True))
        listed.append((f"({len(rest)} other operations)", [calls, seconds]))
    for operation, (calls, seconds) in listed:
        yield OperationRow(phase, operation, int(calls), seconds, seconds / total)
