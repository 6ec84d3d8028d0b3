"""Write a run's checkpoints: when to save, which state, and which checkpoints to keep.

All ranks write one checkpoint together, in their main threads or in a background thread of each.
"""

import hashlib
import json
import math
import shlex
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import torch

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import discard, unfinished_path
from vcore_ds.config.schema import first_compared_step
from vcore_ds.config.sections import CheckpointConfig, RunConfig
from vcore_ds.data.dataset import Dataset
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.engine.checkpoint_shards import (
    CheckpointFailed,
    Group,
    Stager,
    State,
    count_local_bytes,
    run_on_all_ranks,
    state_tensors,
    write_state,
)
from vcore_ds.engine.zero3 import Engine
from vcore_ds.training import checkpoint_folder, console
from vcore_ds.training.checkpoint_read import RunState, find_reused_direction
from vcore_ds.utility.estimators import Estimator

MARGIN_BYTES = 64 * 2**20
"""Free space required besides the tensors: for index, recipe, and what other processes write meanwhile."""


class WrittenCheckpoint(NamedTuple):
    """A checkpoint that is complete on disk."""

    folder: Path
    seconds: float
    bytes: int  # all ranks' together
    warning: str | None  # on rank 0: why an old checkpoint could not be deleted


class Checkpoints:
    """Writes the checkpoints of one run into `folder`. Every rank has one, and its methods are collectives."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        recipe_yaml: str,
        start: RunState,
        *,
        branch_step: int | None = None,
        probe_every: int = 1,
    ):
        """`start`: the state at the start of this process, with what all checkpoints of the run hold alike.
        `branch_step`: step after which the learning rate of `wsd` decays, None for other schedules; its checkpoint is
        kept, so that the run can be extended and decays of other lengths can branch off. `probe_every`: steps that
        share a probe direction."""
        self._folder, self._config = folder, config
        self._recipe_yaml, self._start = recipe_yaml, start
        self._branch_step, self._probe_every = branch_step, probe_every
        self._last_end = time.monotonic()
        self._writing: Future[WrittenCheckpoint] | None = None
        self._stager: Stager | None = None
        self._group: Group | None = None
        self._metrics: dict[str, float] = {}
        self._seconds_write: float | None = None

    @property
    def compares(self) -> bool:
        """Whether checkpoints are kept by their held-out loss (`checkpoint.keep_best`)."""
        return self._config.keep_best is not None

    @property
    def seconds_last_save(self) -> float | None:
        """Seconds that a save at a stop is expected to take, by the last write; None before the end of the first. With
        `checkpoint.async` it may have to wait for the write in progress, and then for its own."""
        if self._seconds_write is None:
            return None
        return self._seconds_write * (2 if self._config.async_ else 1)

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether the run saves after `step` steps. A collective."""
        settings = self._config
        every = [n for n in (settings.every_steps, settings.keep_every_steps) if n is not None]
        if step in (num_steps, self._branch_step) or any(step % n == 0 for n in every):
            return True
        if settings.every_minutes is None:
            return False
        # Rank 0's clock decides: with several clocks one rank would save while another trained, and both would hang.
        is_overdue = layout.is_first() and time.monotonic() - self._last_end >= 60 * settings.every_minutes
        return layout.sum_over("job", [float(is_overdue)])[0] > 0

    def save(
        self,
        step: int,
        engine: Engine,
        estimator: Estimator,
        losses: Mapping[str, float] | None = None,
        *,
        is_last: bool = False,
    ) -> tuple[Path, float]:
        """Write the checkpoint after `step` steps, then delete old ones according to the recipe; return its folder, and
        the seconds for which the steps waited. `losses`: nats after this step, by name of the held-out set. `is_last`:
        no step follows in this process, so the checkpoint is complete when this returns.
        With `checkpoint.async` this waits for the previous write and copies the state, which a thread writes during the
        next steps. Raises CheckpointFailed on all ranks alike, naming the rank at fault, also for the previous write;
        the other checkpoints are untouched."""
        started = time.perf_counter()
        self.wait()
        is_async = self._config.async_ and not is_last
        folder = checkpoint_folder.step_folder(self._folder, step)
        loss = statistics.fmean(losses.values()) if losses else math.nan
        direction = find_reused_direction(step, self._probe_every, estimator)
        if is_async:  # a rank without room for the copy ends all of them
            self._stager = stager = self._stager or Stager()
            staged: list[State] = []
            run_on_all_ranks(folder, lambda: staged.append(stager.stage(engine, direction)))
            tensors = staged[0]
        else:
            tensors = state_tensors(engine, direction)
        state = replace(
            self._start,
            step=step,
            num_updates=engine.num_updates,
            direction=estimator.state(),
            held_out_loss=loss if math.isfinite(loss) else None,
            held_out_digest=self._start.held_out_digest if losses else None,
        )
        if is_async:
            # Made in the main threads, since making a group is a collective too. Only background threads use it, one
            # write after another, so their collectives are in the same order on all ranks.
            group = self._group = self._group or layout.make_group(backend="gloo")
            self._writing = start_write(lambda: self._write(state, tensors, group))
            self._last_end = time.monotonic()
        else:
            self._report(self._write(state, tensors))
        seconds = self._metrics["seconds_checkpoint"] = time.perf_counter() - started
        if not self._config.async_:
            self._seconds_write = seconds
        return folder, seconds

    def take_metrics(self) -> dict[str, float]:
        """Return the measurements of checkpoints since the last call, for a line of metrics.jsonl."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def collect(self) -> None:
        """Report a background write that has ended on all ranks. A collective. Raises CheckpointFailed on all ranks
        alike."""
        if self._writing is None:  # on all ranks alike
            return
        # Only when the threads of all ranks have ended: a rank that raised an error a step before the others would
        # leave them hanging in the next step's collectives.
        if layout.sum_over("job", [float(self._writing.done())])[0] == layout.size("job"):
            self.wait()

    def wait(self) -> None:
        """Wait for a background write, if any, which ends on all ranks together. Raises CheckpointFailed on all ranks
        alike."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        written = writing.result()
        self._seconds_write = self._metrics["seconds_checkpoint_write"] = written.seconds
        self._report(written, " in the background")

    def finish_after_failure(self) -> None:
        """Wait for a background write when the run fails: its state is valid. Not a collective."""
        with suppress(Exception):  # the run's failure is the one to report
            self.wait()

    def _write(self, state: RunState, tensors: State, group: Group | None = None) -> WrittenCheckpoint:
        """Write a checkpoint, then delete old ones. A collective. A background thread needs a separate `group` (see
        `run_on_all_ranks`): ranks could start the collectives of two threads on one group in different orders, and
        hang. Raises CheckpointFailed on all ranks alike."""
        started, is_first, step = time.perf_counter(), layout.is_first(), state.step
        unfinished = unfinished_path(checkpoint_folder.step_folder(self._folder, step))

        def on_first_rank(action: Callable[[], Path | str | None]) -> Path | str | None:
            return run_on_all_ranks(unfinished, lambda: action() if is_first else None, group)[0]

        try:
            num_bytes = sum(run_on_all_ranks(unfinished, lambda: count_local_bytes(tensors), group)) + MARGIN_BYTES
            on_first_rank(lambda: checkpoint_folder.begin(self._folder, step, num_bytes))
            write_state(tensors, unfinished / checkpoint_folder.STATE, group)
            by_rank = run_on_all_ranks(unfinished, lambda: self._write_rest(unfinished, state), group)
            records = {name: record for rank_records in by_rank for name, record in rank_records.items()}
            folder = on_first_rank(lambda: checkpoint_folder.finish(self._folder, step, state.world_size, records))
        except CheckpointFailed as error:
            if is_first:
                discard(unfinished)
            raise CheckpointFailed(
                f"the checkpoint of step {step} could not be written: {error}. Earlier checkpoints are untouched"
            ) from None
        warning = on_first_rank(self.remove_old)
        assert isinstance(folder, Path) and not isinstance(warning, Path)  # rank 0's results
        seconds = time.perf_counter() - started
        return WrittenCheckpoint(folder, seconds, sum(record.bytes for record in records.values()), warning)

    def _write_rest(self, unfinished: Path, state: RunState) -> dict[str, checkpoint_folder.FileRecord]:
        """Write the small files, on rank 0; read this rank's files back and return their records."""
        paths = sorted((unfinished / checkpoint_folder.STATE).glob(f"__{layout.rank('job')}_*"))
        if layout.is_first():
            paths += (unfinished / checkpoint_folder.STATE).glob(".metadata")  # the index
            run_state = json.dumps(asdict(state), indent=2) + "\n"
            for name, text in ((checkpoint_folder.RUN_STATE, run_state), (checkpoint_folder.RECIPE, self._recipe_yaml)):
                (unfinished / name).write_text(text, encoding="utf-8")
                paths.append(unfinished / name)
        return {path.relative_to(unfinished).as_posix(): checkpoint_folder.hash_file(path) for path in paths}

    def _report(self, written: WrittenCheckpoint, how: str = "") -> None:
        console.say(f"checkpoint: {written.folder}: {written.bytes / 1e9:.3g} GB in {written.seconds:.1f} s{how}")
        if written.warning is not None:
            console.warn(written.warning)
        self._metrics["checkpoint_bytes"] = written.bytes
        self._last_end = time.monotonic()

    def remove_old(self) -> str | None:
        """Delete the checkpoints that the recipe does not keep, on rank 0. Returns a warning if one cannot be deleted,
        as when an export has it open on a network file system."""
        try:
            checkpoint_folder.remove_old(
                self._folder,
                keep_last=self._config.keep_last,
                keep_every_steps=self._config.keep_every_steps,
                keep_step=self._branch_step,
                best=[folder for _, folder in self.rank_by_loss()[: self._config.keep_best or 0]],
            )
        except OSError as error:
            return f"an old checkpoint cannot be deleted: {error}. Delete it if the disk is short of space"
        return None

    def rank_by_loss(self) -> list[tuple[float, Path]]:
        """List held-out loss in nats and folder of the checkpoints that have one, the lowest first; empty without
        `checkpoint.keep_best`. For rank 0."""
        digest = self._start.held_out_digest
        return checkpoint_folder.rank_by_loss(self._folder, digest) if self.compares and digest else []


def start_write(write: Callable[[], WrittenCheckpoint]) -> Future[WrittenCheckpoint]:
    """Call `write` in a background thread, as on all other ranks; it must communicate over a group that no other thread
    uses meanwhile."""
    result: Future[WrittenCheckpoint] = Future()
    chosen = device()

    def run() -> None:
        try:
            if chosen.type == "cuda":  # PyTorch starts each thread on GPU 0
                torch.cuda.set_device(chosen)
            result.set_result(write())
        except BaseException as error:
            result.set_exception(error)

    # A daemon: a rank that ends with an error must not wait for the files of ranks that may be gone.
    Thread(target=run, name="checkpoint", daemon=True).start()
    return result


def check_compared(config: CheckpointConfig, run: RunConfig, num_steps: int) -> None:
    """Raise UserError if `checkpoint.keep_best` would compare nothing; a rule of the recipe covers the other cases."""
    first = first_compared_step(config, run)
    if config.keep_best is not None and first is not None and first >= num_steps:
        raise UserError(
            f"checkpoint.keep_best: found step {first} as the first with a checkpoint and an evaluation, and "
            f"{num_steps} as the last of the run; expected one before it. Lower checkpoint.every_steps and "
            "run.validate_every to the same number"
        )


def make_digest(validation: Mapping[str, Dataset]) -> str:
    """Hash the held-out sets and their names."""
    text = "\n".join(f"{name} {dataset.digest}" for name, dataset in sorted(validation.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def say_best(checkpoints: Checkpoints, num_steps: int) -> None:
    """Name the checkpoint with the lowest held-out loss, if the run compares them and it is not the last. On rank 0."""
    ranked = checkpoints.rank_by_loss()
    if ranked and ranked[0][1].name != checkpoint_folder.step_folder(Path(), num_steps).name:
        loss, folder = ranked[0]
        console.say(
            f"Lowest held-out loss: {loss:.4f}, {folder.name}. As a model: vcore-ds export "
            f"{shlex.quote(str(folder.parents[1]))} --checkpoint {folder.name}"
        )
