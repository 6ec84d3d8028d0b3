"""Profiles of single optimizer steps (`run.profile`): PyTorch's traces, in which each phase is a range."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from vcore_ds.common.errors import UserError
from vcore_ds.config.sections import ProfileConfig
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.distributed.position import mark
from vcore_ds.training import console
from vcore_ds.training.run_folder import PROFILES


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


@contextmanager
def profiled_step(profile: ProfileConfig | None, folder: Path, number: int) -> Iterator[None]:
    """A context for optimizer step `number`, from 1, which is profiled if step and rank are chosen. Files that cannot
    be written are a warning: this rank must not exit while others train. `folder`: of the run."""
    if profile is None or number not in profile.steps:
        yield
        return
    if layout.rank("job") not in profile.ranks:
        yield
        mark("profile")
        return
    if profile.memory_snapshot:
        torch.cuda.memory._record_memory_history()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device().type == "cuda" else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        yield
    mark("profile")
    folder, name = folder / PROFILES, f"step_{number:08d}_rank_{layout.rank('job')}"
    try:
        folder.mkdir(exist_ok=True)
        if profile.memory_snapshot:
            torch.cuda.memory._dump_snapshot(str(folder / f"{name}.pickle"))
        # Not `write_atomically`: the suffix .gz makes PyTorch compress the file.
        unfinished = folder / f"unfinished_{name}.json.gz"
        profiler.export_chrome_trace(str(unfinished))
        unfinished.rename(folder / f"{name}.json.gz")
    except (OSError, RuntimeError) as error:
        print(f"warning: the profile of step {number} cannot be written to {folder}: {error}", flush=True)
        return
    finally:
        if profile.memory_snapshot:
            torch.cuda.memory._record_memory_history(enabled=None)
    memory = ", memory in .pickle" if profile.memory_snapshot else ""
    console.say(f"profile of step {number}: {folder / name}.json.gz (Perfetto, chrome://tracing){memory}")
