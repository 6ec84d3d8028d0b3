"""The metrics log of a run, metrics.jsonl, and the trackers that receive its lines, with names in groups.

Trackers are those of `accelerate.tracking`. Each reads address and credentials from environment variables. TensorBoard
(`tensorboard --logdir` of the run's folder) and Trackio need none: their data stay on this machine.
"""

import atexit
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch

from vcore_ds.common.errors import first_line, is_out_of_memory
from vcore_ds.common.paths import write_json, write_text, writing
from vcore_ds.config.sections import TrackConfig, TrackerName
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import uses_gpu
from vcore_ds.training import console
from vcore_ds.training.run_folder import END, METRICS, RECIPE, TRACKERS
from vcore_ds.training.run_notes import End

MOST_WAITING = 1000  # lines that may wait for a tracker; further ones are dropped
CLOSE_SECONDS = 60.0  # time to send the remaining lines at the end of a run
DRAIN_SECONDS = 5.0  # the same if a run ends early: another attempt may be waiting

GROUPS = {
    "eval": r"validation_loss.*",
    "time": r"seconds.*|.*tokens_per_second|flops_.*|utilization.*",
    "memory": r"peak_memory_bytes.*|checkpoint_bytes",
    "layout": r"padding_share|(probe_)?(rank_imbalance|sequence_parallel)|expert_.*",
    "probe": r"(probe|direction|utility)_.*|epsilon|changed_fraction|signal_to_noise",
    "weights": r"alpha|(batch_)?(tau|kl|effective_sample_size)|num_saturated|total_weight",
}
"""Group of metrics at trackers -> pattern of their keys, the first that matches; those of the rest are in `train`."""


def tracker_name(key: str) -> str:
    """The name at trackers of a key of metrics.jsonl: GROUP/KEY; of the axis, `step`, itself."""
    group = next((name for name, pattern in GROUPS.items() if re.fullmatch(pattern, key)), "train")
    return key if key == "step" else f"{group}/{key}"


def name_held_out(losses: Mapping[str, float]) -> dict[str, float]:
    """The held-out losses, by name of their set, under their keys in metrics.jsonl."""
    return {f"validation_loss{name and '_'}{name}": loss for name, loss in losses.items()}


class BackgroundTracker:
    """Runs one of accelerate's trackers in a thread, so that it can neither fail nor slow the run: its methods may
    raise anything and take any time. Errors become one warning, printed by the caller's thread with the next line or at
    the end."""

    def __init__(self, name: str, open_tracker: Callable[[], Any], *, close_seconds: float = CLOSE_SECONDS):
        self._name, self._close_seconds = name, close_seconds
        # The last one is whether to close the tracker.
        self._lines: Queue[Mapping[str, float | int] | bool] = Queue()
        self._problem: str | None = None
        self._has_warned = False
        self._thread = Thread(target=self._work, args=(open_tracker,), name=f"tracker {name}", daemon=True)
        self._thread.start()
        atexit.register(self._finish, False, DRAIN_SECONDS)

    def write(self, values: Mapping[str, float | int]) -> None:
        """Queue a step's numbers; returns at once."""
        if self._lines.qsize() < MOST_WAITING:
            self._lines.put(values)
        elif self._problem is None:
            self._problem = f"{MOST_WAITING:,} lines wait to be sent; further ones are dropped"
        self._warn()

    def close(self) -> None:
        """Wait until everything is sent, `close_seconds` at most."""
        atexit.unregister(self._finish)
        self._finish(True, self._close_seconds)
        if self._thread.is_alive() and self._problem is None:
            self._problem = f"has not taken everything within {self._close_seconds:g} s after the end of the run"
        self._warn()

    def _finish(self, closes: bool, seconds: float) -> None:
        self._lines.put(closes)
        self._thread.join(seconds)

    def _work(self, open_tracker: Callable[[], Any]) -> None:
        tracker = self._attempt(open_tracker)
        if tracker is None:
            return
        while not isinstance(values := self._lines.get(), bool):
            # The step of Weights & Biases never goes back, but a run repeats the steps after its last checkpoint.
            step = None if tracker.name == "wandb" else int(values["step"])
            shown = {key: value for key, value in values.items() if step is None or key != "step"}
            self._attempt(partial(tracker.log, shown, step=step))
        if values:
            self._attempt(tracker.finish)

    def _attempt(self, action: Callable[[], Any]) -> Any:
        """Return what `action` returns; None, noting why, if it fails. It may raise anything, SystemExit too."""
        try:
            return action()
        except (Exception, SystemExit) as error:
            self._problem = self._problem or f"{type(error).__name__}: {first_line(error)}".rstrip(".")

    def _warn(self) -> None:
        if self._problem is not None and not self._has_warned:
            self._has_warned = True
            console.warn(f"{self._name}: {self._problem}. The run continues; metrics.jsonl has everything")


class MetricsLog:
    """The metrics log, on rank 0. A full disk must not end rank 0 alone while the others wait for it, so lines that
    cannot be written wait in memory until `flush`, whose failure the caller shares with all ranks. The file never holds
    part of a line."""

    def __init__(self, folder: Path, trackers: Sequence[BackgroundTracker] = ()):
        self._path, self._trackers = folder / METRICS, trackers
        # Unbuffered: the file has all lines of a killed run.
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._waiting = b""

    def write(self, values: dict[str, Any]) -> None:
        """Write one line, with null for numbers that are not finite; warn if it cannot be written."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        is_first_to_wait = not self._waiting
        self._waiting += json.dumps(clean).encode() + b"\n"
        try:
            self._write_waiting()
        except OSError as error:
            if is_first_to_wait:
                console.warn(
                    f"{self._path} cannot be written ({error.strerror}): its lines are kept in memory, and the run "
                    "ends at the next checkpoint unless they can be written by then"
                )
        self.track(clean)

    def track(self, values: Mapping[str, Any]) -> None:
        """Send numbers to the trackers alone, with the axis `step`; None is left out."""
        numbers = {tracker_name(key): value for key, value in values.items() if value is not None}
        for tracker in self._trackers:
            tracker.write(numbers)

    def flush(self) -> None:
        """Flush all lines to disk: a checkpoint may not outlive them. Raises UserError if they cannot be written."""
        with writing("run.output_dir", self._path, "room for the metrics of the steps"):
            self._write_waiting()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and all trackers, which send their remaining lines first."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def _write_waiting(self) -> None:
        """Append all waiting lines, or none of them (OSError)."""
        descriptor, rest = self._file.fileno(), self._waiting
        end = os.fstat(descriptor).st_size
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, end)  # part of a line may have been written
            raise
        self._waiting = b""


def start_trackers(
    folder: Path, track: TrackConfig, config: Mapping[str, Any], num_done: int
) -> list[BackgroundTracker]:
    """Start `track.trackers`, on rank 0, within a process group. `config`: the recipe's values by dotted
    keys; `num_done`: optimizer steps done in a run that is resumed."""
    if not track.trackers:
        return []
    from accelerate import PartialState

    num_threads = torch.get_num_threads()
    try:
        PartialState(cpu=not uses_gpu())  # its trackers require it
    except Exception as error:  # of any class: it inspects the machine in many ways, and must not end the run
        console.warn(f"track.trackers: accelerate cannot start here: {first_line(error)}. The run continues without")
        return []
    finally:
        torch.set_num_threads(num_threads)  # accelerate may change it, and sums would round differently
    values = {key: value for key, value in config.items() if value is not None}
    return [
        BackgroundTracker(f"track.trackers: {name}", partial(open_tracker, name, folder, track, values, num_done))
        for name in track.trackers
    ]


def open_tracker(name: TrackerName, folder: Path, track: TrackConfig, config: Mapping[str, Any], num_done: int) -> Any:
    """Open a tracker that continues the records of earlier attempts of the run, whose id is kept in the run's folder;
    arguments as in `start_trackers`. Raises whatever the tracker raises."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    if find_spec(name) is None:
        raise ModuleNotFoundError(f"is not installed: pip install {'mlflow-skinny' if name == 'mlflow' else name}")
    id_file = folder / TRACKERS / f"{name}_run_id"
    run_id = id_file.read_text(encoding="utf-8").strip() if id_file.is_file() else None
    group, tags = track.group, list(track.tags)
    options: dict[str, Any]
    if name == "tensorboard":  # `purge_step` hides events of repeated steps
        options = {"logging_dir": str(folder), "purge_step": num_done + 1 if num_done else None}
    elif name == "mlflow":
        labels = {"tags": ", ".join(tags), "group": group}
        options = {"run_id": run_id, "run_name": folder.name, "tags": {k: v for k, v in labels.items() if v}}
    elif name == "trackio":
        # It identifies runs by name: a new run must not continue another one whose folder has the same name.
        options = {"name": folder.name, "group": group, "resume": "allow" if num_done else "never"}
    else:
        run_id = run_id or secrets.token_hex(8)
        options = {"name": folder.name, "group": group, "tags": tags, "id": run_id, "resume": "allow"}
        options |= {"dir": str(folder)} if name == "wandb" else {"log_dir": str(folder / "swanlab")}
    tracker: Any = LOGGER_TYPE_TO_CLASS[name]("tensorboard" if name == "tensorboard" else track.project, **options)
    tracker.start()
    if name == "tensorboard":
        recipe = (folder / RECIPE).read_text(encoding="utf-8")
        tracker.log({"recipe": f"    {recipe}".replace("\n", "\n    ")}, step=num_done)
    elif not num_done:
        tracker.store_init_configuration(config)
    if name == "wandb":
        tracker.tracker.define_metric("step")  # the axis is our step, which may go back
        tracker.tracker.define_metric("*", step_metric="step")
        console.say(f"Weights & Biases: {tracker.tracker.url or 'offline'}")
    run_id = tracker.tracker.info.run_id if name == "mlflow" else run_id
    if run_id is not None:
        id_file.parent.mkdir(exist_ok=True)
        write_text(id_file, f"{run_id}\n")
    return tracker


def record_end(folder: Path, step: int, error: Exception) -> None:
    """Write for the report how an attempt ended, in optimizer step `step`, from 1, unless another rank has: its failure
    is the cause of this one. A full disk is no second failure."""
    with suppress(OSError):
        if not (folder / END).exists():
            cause = f"rank {layout.rank('job')}: out of memory: " if is_out_of_memory(error) else ""
            write_json(folder / END, asdict(End(step, cause + first_line(error))))
