"""Trackers, by the names of `accelerate.tracking`, as sinks of the metrics log.

Each reads address and credentials from environment variables. Without them, data stay on this machine for TensorBoard
(`tensorboard --logdir` of the run's folder) and Trackio; what Weights & Biases cannot send stays in the run's folder.
"""

import os
import secrets
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from vcore_ds.common.errors import first_line
from vcore_ds.common.paths import write_text
from vcore_ds.config.sections import TrackConfig, TrackerName
from vcore_ds.distributed.device import uses_gpu
from vcore_ds.training import console
from vcore_ds.training.metrics_log import CLOSE_SECONDS, BackgroundSink
from vcore_ds.training.run_folder import RECIPE, TRACKERS

WANDB_SECONDS = {"init_timeout": 60.0, "finish_timeout": 120.0}
"""Time for Weights & Biases to reach its server (WANDB_INIT_TIMEOUT changes it), and to send the rest at the end."""


class TrackerSink:
    """One of accelerate's trackers, started."""

    def __init__(self, tracker: Any):
        self.tracker = tracker

    def write(self, values: Mapping[str, float | int]) -> None:
        # The step of Weights & Biases never goes back, but a run repeats the steps after its last checkpoint.
        if self.tracker.name == "wandb":
            self.tracker.log(dict(values))
        else:
            self.tracker.log({key: value for key, value in values.items() if key != "step"}, step=int(values["step"]))

    def close(self) -> None:
        self.tracker.finish()


def start_trackers(folder: Path, track: TrackConfig, config: Mapping[str, Any], num_done: int) -> list[BackgroundSink]:
    """Start the sinks of `track.trackers`, on rank 0, within a process group. `config`: the recipe's values by dotted
    keys; `num_done`: optimizer steps done in a run that is resumed."""
    try:
        if track.trackers:
            share_process_group()
    except Exception as error:  # of any class: it inspects the machine in many ways, and must not end the run
        console.warn(f"track.trackers: accelerate cannot start here: {first_line(error)}. The run continues without")
        return []
    values = {key: value for key, value in config.items() if value is not None}
    return [
        BackgroundSink(
            f"track.trackers: {name}",
            partial(open_tracker, name, folder, track, values, num_done),
            close_seconds=CLOSE_SECONDS + (WANDB_SECONDS["finish_timeout"] if name == "wandb" else 0.0),
        )
        for name in track.trackers
    ]


def share_process_group() -> None:
    """Initialize accelerate's view of the process group, which its trackers require."""
    from accelerate import PartialState

    num_threads = torch.get_num_threads()
    PartialState(cpu=not uses_gpu())
    torch.set_num_threads(num_threads)  # accelerate may change it, and sums would round differently


def open_tracker(
    name: TrackerName, folder: Path, track: TrackConfig, config: Mapping[str, Any], num_done: int
) -> TrackerSink:
    """Open a tracker that continues the records of earlier attempts of the run, whose id is kept in the run's folder;
    arguments as in `start_trackers`. Raises whatever the tracker raises."""
    from accelerate import tracking

    if find_spec(name) is None:
        raise ModuleNotFoundError(f"is not installed: pip install {'mlflow-skinny' if name == 'mlflow' else name}")
    id_file = folder / TRACKERS / f"{name}_run_id"
    run_id = id_file.read_text(encoding="utf-8").strip() if id_file.is_file() else None
    tracker: Any
    if name == "tensorboard":
        # Hides events of repeated steps.
        purge_step = num_done + 1 if num_done else None
        tracker = tracking.TensorBoardTracker("tensorboard", logging_dir=str(folder), purge_step=purge_step)
        tracker.start()
        recipe = (folder / RECIPE).read_text(encoding="utf-8")
        tracker.log({"recipe": f"    {recipe}".replace("\n", "\n    ")}, step=num_done)
        return TrackerSink(tracker)
    if name == "mlflow":
        tags = {"tags": ", ".join(track.tags)} if track.tags else {}
        tags |= {"group": track.group} if track.group is not None else {}
        tracker = tracking.MLflowTracker(track.project, run_id=run_id, tags=tags, run_name=folder.name)
        tracker.start()
        if run_id is None:
            tracker.store_init_configuration(config)
        run_id = tracker.tracker.info.run_id
    elif name == "trackio":
        # It identifies runs by name: a new run must not continue another one whose folder has the same name.
        resume = "allow" if num_done else "never"
        tracker = tracking.TrackioTracker(
            track.project, name=folder.name, group=track.group, resume=resume, config=config
        )
        tracker.start()
    else:
        run_id = run_id or secrets.token_hex(8)
        options: dict[str, Any] = dict(
            name=folder.name, group=track.group, tags=list(track.tags), id=run_id, resume="allow"
        )
        if name == "wandb":
            tracker = start_wandb(track.project, folder, options | {"config": config})
        else:
            options |= dict(log_dir=str(folder / "swanlab"), config=config)
            tracker = tracking.SwanLabTracker(track.project, **options)
            tracker.start()
    if run_id is not None:
        id_file.parent.mkdir(exist_ok=True)
        write_text(id_file, f"{run_id}\n")
    return TrackerSink(tracker)


def start_wandb(project: str, folder: Path, options: Mapping[str, Any]) -> Any:
    """Start the tracker of Weights & Biases; offline, with a warning, if its server cannot be reached."""
    import wandb
    from accelerate.tracking import WandBTracker

    seconds = WANDB_SECONDS | {k: float(s) for k in WANDB_SECONDS if (s := os.environ.get(f"WANDB_{k.upper()}"))}
    options = {**options, "dir": str(folder), "settings": wandb.Settings(silent=True, **seconds)}
    tracker = WandBTracker(project, **options)
    try:
        tracker.start()
    except (wandb.Error, OSError) as error:
        console.warn(
            f"track.trackers: Weights & Biases cannot be reached ({first_line(error)}); the run continues, and is kept "
            f"in {folder / 'wandb'}: send it later with `wandb sync {folder / 'wandb'}/offline-run-*`"
        )
        wandb.teardown()  # its service still holds the id for the failed attempt
        tracker = WandBTracker(project, **options, mode="offline")
        tracker.start()
    # The axis is our step, which may go back.
    tracker.tracker.define_metric("step")
    tracker.tracker.define_metric("*", step_metric="step")
    console.say(f"Weights & Biases: {tracker.tracker.url or 'offline'}")
    return tracker
