"""Trackers as sinks: Weights & Biases, and TensorBoard, MLflow, Trackio and SwanLab through `accelerate.tracking`.

Each reads address and credentials from environment variables. Without them, data stay on this machine for TensorBoard
(`tensorboard --logdir` of the run's folder) and Trackio.
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
from vcore_ds.training.console import Console
from vcore_ds.training.metrics_log import BackgroundSink
from vcore_ds.training.run_folder import RECIPE, TRACKERS


class TrackerSink:
    """One of accelerate's trackers, started."""

    def __init__(self, tracker: Any):
        self.tracker = tracker

    def write(self, values: Mapping[str, float | int]) -> None:
        self.tracker.log({key: value for key, value in values.items() if key != "step"}, step=int(values["step"]))

    def close(self) -> None:
        self.tracker.finish()


def start_trackers(
    folder: Path, track: TrackConfig, config: Mapping[str, Any], num_done: int, console: Console
) -> list[BackgroundSink]:
    """Start the sinks of `track.trackers` except Weights & Biases, on rank 0, within a process group. `config`: the
    recipe's values by dotted keys; `num_done`: optimizer steps done in a run that is resumed."""
    names = [name for name in track.trackers if name != "wandb"]
    try:
        if names:
            share_process_group()
    except Exception as error:  # of any class: it inspects the machine in many ways, and must not end the run
        console.warn(f"track.trackers: accelerate cannot start here: {first_line(error)}. The run continues without")
        return []
    return [
        BackgroundSink(f"track.trackers: {name}", partial(open_tracker, name, folder, track, config, num_done), console)
        for name in names
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
    """Open a tracker that continues the records of earlier attempts of the run; arguments as in `start_trackers`.
    Raises whatever the tracker raises."""
    from accelerate import tracking

    check_installed(name, "mlflow-skinny" if name == "mlflow" else name)
    config = {key: value for key, value in config.items() if value is not None}
    tracker: Any
    if name == "tensorboard":
        # Hides events of repeated steps.
        purge_step = num_done + 1 if num_done else None
        tracker = tracking.TensorBoardTracker("tensorboard", logging_dir=str(folder), purge_step=purge_step)
        tracker.start()
        recipe = (folder / RECIPE).read_text(encoding="utf-8")
        tracker.log({"recipe": f"    {recipe}".replace("\n", "\n    ")}, step=num_done)
    elif name == "mlflow":
        tags = {"tags": ", ".join(track.tags)} if track.tags else {}
        tags |= {"group": track.group} if track.group is not None else {}
        run_id = read_id(folder, name)
        tracker = tracking.MLflowTracker(track.project, run_id=run_id, tags=tags, run_name=folder.name)
        tracker.start()
        if run_id is None:
            tracker.store_init_configuration(config)
        write_id(folder, name, tracker.tracker.info.run_id)
    elif name == "trackio":
        # It identifies runs by name: a new run must not continue another one whose folder has the same name.
        resume = "allow" if num_done else "never"
        tracker = tracking.TrackioTracker(
            track.project, name=folder.name, group=track.group, resume=resume, config=config
        )
        tracker.start()
    else:
        run_id = read_id(folder, name) or secrets.token_hex(8)
        tracker = tracking.SwanLabTracker(
            track.project,
            name=folder.name,
            group=track.group,
            tags=list(track.tags),
            id=run_id,
            resume="allow",
            log_dir=str(folder / "swanlab"),
            config=config,
        )
        tracker.start()
        write_id(folder, name, run_id)
    return TrackerSink(tracker)


def check_installed(module: str, package: str) -> None:
    """Raise ModuleNotFoundError, with a remedy, if a module is missing."""
    if find_spec(module) is None:
        raise ModuleNotFoundError(f"is not installed: pip install {package}")


def read_id(folder: Path, name: str) -> str | None:
    """Read the run's id at a tracker; None if no attempt has written one."""
    path = folder / TRACKERS / f"{name}_run_id"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def write_id(folder: Path, name: str, run_id: str) -> None:
    """Write the run's id at a tracker, for later attempts."""
    path = folder / TRACKERS / f"{name}_run_id"
    path.parent.mkdir(exist_ok=True)
    write_text(path, f"{run_id}\n")


INIT_SECONDS = 60.0  # time to reach the server before the first step; after it the run continues offline

FINISH_SECONDS = 120.0  # time to send the remaining data at the end


class WandbLog:
    """A run on Weights & Biases, on rank 0, configured by WANDB_MODE, WANDB_ENTITY, WANDB_BASE_URL and
    WANDB_INIT_TIMEOUT. Data that cannot be sent stay in the run's folder, for `wandb sync`. `run_id` is stored in the
    checkpoints, so that a resumed run continues the same one."""

    def __init__(
        self, folder: Path, track: TrackConfig, config: Mapping[str, Any], console: Console, run_id: str | None
    ):
        import wandb  # takes half a second

        self.run_id = run_id or secrets.token_hex(4)
        init_seconds = float(os.environ.get("WANDB_INIT_TIMEOUT", INIT_SECONDS))
        settings = wandb.Settings(init_timeout=init_seconds, finish_timeout=FINISH_SECONDS, silent=True)
        options: dict[str, Any] = dict(
            project=track.project,
            name=folder.name,
            group=track.group,
            tags=track.tags,
            id=self.run_id,
            resume="allow",
            dir=str(folder),
            config=config,
            settings=settings,
        )
        try:
            self._run = wandb.init(**options)
        except (wandb.Error, OSError) as error:
            console.warn(
                f"track.trackers: Weights & Biases cannot be reached ({first_line(error)}); the run continues, and "
                f"is kept in {folder / 'wandb'}: send it later with `wandb sync {folder / 'wandb'}/offline-run-*`"
            )
            wandb.teardown()  # its service still holds the id for the failed attempt
            self._run = wandb.init(**options, mode="offline")
        # Steps after the last checkpoint are repeated, so the axis is our step, which may go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @property
    def url(self) -> str | None:
        return self._run.url

    def write(self, values: Mapping[str, float | int]) -> None:
        self._run.log(dict(values))

    def close(self) -> None:
        """Send the remaining data, `FINISH_SECONDS` at most."""
        self._run.finish()
