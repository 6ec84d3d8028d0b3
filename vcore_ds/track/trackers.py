"""TensorBoard, MLflow, Trackio and SwanLab as sinks, through `accelerate.tracking`.

Each takes its address and credentials from its own environment variables. What is not said there stays on this machine
for TensorBoard (`tensorboard --logdir` of the run's folder) and Trackio.
"""

import secrets
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from vcore_ds.config.sections import TrackConfig, TrackerName
from vcore_ds.distributed.device import uses_gpu
from vcore_ds.errors import first_line
from vcore_ds.files.aside import written_aside
from vcore_ds.files.run_folder import RECIPE, TRACKERS
from vcore_ds.track.console import Console
from vcore_ds.track.sinks import BackgroundSink


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
    """The sinks of `track.trackers`, by rank 0 of a job whose process group is up.

    Args:
        folder: the run's, with its recipe.yaml.
        config: the recipe's values by their dotted keys.
        num_done: optimizer steps done, more than 0 in a run that is resumed.
    """
    try:
        if track.trackers:
            prepare_accelerate()
    except Exception as error:  # it looks at the machine in many ways, and nothing of that is worth a run
        console.warn(f"track.trackers: accelerate cannot start here: {first_line(error)}. The run continues without")
        return []
    return [
        BackgroundSink(f"track.trackers: {name}", partial(open_tracker, name, folder, track, config, num_done), console)
        for name in track.trackers
    ]


def prepare_accelerate() -> None:
    """Its own view of the process group, without which its trackers refuse to work."""
    from accelerate import PartialState

    num_threads = torch.get_num_threads()
    PartialState(cpu=not uses_gpu())
    torch.set_num_threads(num_threads)  # it may choose another number, with which sums are rounded differently


def open_tracker(
    name: TrackerName, folder: Path, track: TrackConfig, config: Mapping[str, Any], num_done: int
) -> TrackerSink:
    """A tracker that continues what earlier attempts of the run have sent it; the arguments are those of
    `start_trackers`. Raises whatever the tracker does."""
    from accelerate import tracking

    if name == "mlflow":
        check_installed("mlflow", "mlflow-skinny")
    else:
        check_installed(name, name)
    config = {key: value for key, value in config.items() if value is not None}
    tracker: Any
    if name == "tensorboard":
        # Events of steps that are taken again are not shown any more.
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
        keep_id(folder, name, tracker.tracker.info.run_id)
    elif name == "trackio":
        # It knows runs by name alone: a new run does not continue another one whose folder has the same name.
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
        keep_id(folder, name, run_id)
    return TrackerSink(tracker)


def check_installed(module: str, package: str) -> None:
    """Raises ModuleNotFoundError with what to do."""
    if find_spec(module) is None:
        raise ModuleNotFoundError(f"is not installed: pip install {package}")


def read_id(folder: Path, name: str) -> str | None:
    """The run's id at a tracker; None where no attempt has written one."""
    path = folder / TRACKERS / f"{name}_run_id"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def keep_id(folder: Path, name: str, run_id: str) -> None:
    """For the attempts after this one."""
    path = folder / TRACKERS / f"{name}_run_id"
    path.parent.mkdir(exist_ok=True)
    with written_aside(path) as unfinished:
        unfinished.write_text(f"{run_id}\n", encoding="utf-8")
