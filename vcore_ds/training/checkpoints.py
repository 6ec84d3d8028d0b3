"""The checkpoints of a run: when it saves, which ones it keeps, and which one it resumes from."""

import hashlib
import math
import shlex
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from vcore_ds.common.errors import UserError
from vcore_ds.common.text import count
from vcore_ds.config.load import dump_recipe
from vcore_ds.config.schema import Recipe, first_compared_step
from vcore_ds.data.dataset import Dataset, KeptDataset
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import run_on_first_rank
from vcore_ds.engine import checkpoint_folder
from vcore_ds.engine.checkpoint_folder import step_folder
from vcore_ds.engine.checkpoint_shards import (
    Group,
    Stager,
    State,
    count_state_bytes,
    read_state,
    run_on_all_ranks,
    state_tensors,
)
from vcore_ds.engine.flat_shards import full_shape
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.model_identity import compute_model_digest
from vcore_ds.training.checkpoint_write import (
    BackgroundWrite,
    CheckpointContent,
    RunState,
    WrittenCheckpoint,
    write_checkpoint,
)
from vcore_ds.training.console import Console
from vcore_ds.training.feed import Feed
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import Estimator


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is complete, or that a background thread writes."""

    folder: Path
    seconds: float  # for which the steps waited
    is_complete: bool


class Checkpoints:
    """The checkpoints of one run. Every rank has one, and its methods are collectives.

    Attributes:
        validation_losses_before: nats, before the first step, by name of the held-out set; a resumed run cannot measure
            them any more.
        wandb_run_id: the run on Weights & Biases, None without; only rank 0's is saved.
        branch_step: step after which the learning rate of `wsd` decays; its checkpoint is kept, so that the run can be
            extended and decays of other lengths can branch off; None for other schedules.
        validation_losses_after: nats, after the last step, if measured before its checkpoint.
        held_out_digest: digest of the held-out sets, whose losses compare checkpoints; set before the first save.
        seconds_write: duration of the last write in the background (`checkpoint.async`); None before its end.
    """

    def __init__(self, recipe: Recipe, console: Console):
        self.validation_losses_before: dict[str, float] = {}
        self.wandb_run_id: str | None = None
        self.branch_step: int | None = None
        self.validation_losses_after: dict[str, float] | None = None
        self.held_out_digest = ""
        self.seconds_write: float | None = None
        self._recipe, self._console = recipe, console
        self._folder = Path(recipe.run.output_dir) / "checkpoints"
        self._last_end = time.monotonic()
        self._writing: BackgroundWrite | None = None
        self._stager: Stager | None = None
        self._group: Group | None = None
        self._metrics: dict[str, float] = {}

    @property
    def compares(self) -> bool:
        """Whether checkpoints are kept by their held-out loss (`checkpoint.keep_best`)."""
        return self._recipe.checkpoint.keep_best is not None

    @cached_property
    def frozen_digest(self) -> str | None:
        """Digest of the model under the adapters at the first access; None without adapters, or for weights that only
        transformers finds. Rank 0 alone writes and compares it."""
        if self._recipe.lora is None:
            return None
        try:
            return compute_model_digest(self._recipe.model.path)
        except UserError:
            return None

    def find_newest(self, max_step: int | None = None) -> tuple[Path, RunState] | None:
        """Find the newest checkpoint (of at most `max_step` steps) whose files match its manifest, each rank verifying
        a part of them; None if none is finished. Raises UserError if there are checkpoints and none of them
        verifies."""
        unfinished, candidates = run_on_all_ranks(  # rank 0's view serves all
            self._folder,
            lambda: (checkpoint_folder.list_unfinished(self._folder), checkpoint_folder.list_checkpoints(self._folder)),
        )[0]
        if max_step is not None:
            unfinished = []
            candidates = [f for f in candidates if (checkpoint_folder.parse_step(f) or 0) <= max_step]
        skipped = [f"{folder.name}: not finished" for folder in unfinished if folder not in candidates]
        newest, problems = checkpoint_folder.find_newest_usable(candidates, self._find_problem)
        skipped += problems
        # A run that was killed between renaming and marking its first checkpoint has lost nothing.
        if newest is None and not set(candidates) <= set(unfinished):
            raise UserError(
                f"run.output_dir: {self._folder}: found no checkpoint that verifies:\n  "
                + "\n  ".join(skipped)
                + "\nexpected one to resume from. Restore one of them from a copy, or set run.output_dir to a new "
                "folder to start over"
            )
        for line in skipped:
            self._console.warn(f"skipped checkpoint {line}")
        return None if newest is None else (newest, self._read_run_state(newest))

    def set_aside_newer(self, step: int) -> None:
        """Rename the checkpoints after `step`, which do not verify or are of another schedule."""
        is_first = layout.is_first()
        for renamed in run_on_all_ranks(
            self._folder, lambda: checkpoint_folder.set_aside_newer(self._folder, step) if is_first else []
        )[0]:
            self._console.warn(f"renamed a checkpoint of a later step: {renamed}")

    def check_data(self, checkpoint: tuple[Path, RunState], feed: Feed) -> None:
        """Raise UserError if the data differ from those that the checkpoint was trained on."""
        folder, state = checkpoint
        for key, digest in _list_data_digests(feed).items():
            if digest != state.data_digests[key]:
                data = self._recipe.data
                is_pool = key == "data.probe_path" and data.probe_path is not None
                path = data.probe_path if is_pool else data.train_name()
                is_reduced = isinstance(feed.dataset, KeptDataset) and feed.dataset.num_trusted > 0 and not is_pool
                hint = ". Runs of vcore_ds 0.7 and before resume with data.trusted_overlap=keep" if is_reduced else ""
                raise UserError(
                    f"{key}: {path}: found other tokens than those that {folder} was trained on (data, template, "
                    "tokenizer, weights or kept traces have changed); expected the same, to resume. Restore them, or "
                    f"set run.output_dir to a new folder{hint}"
                )

    def load(self, checkpoint: tuple[Path, RunState], engine: Engine, estimator: Estimator) -> int:
        """Load a checkpoint into a new engine, and return the number of steps done. Raises UserError if the model's
        parameters have other names or shapes than the checkpoint's."""
        started = time.perf_counter()
        folder, state = checkpoint
        self.read(checkpoint, engine, self._find_reused_direction(state.step, estimator))
        if state.direction is not None:
            estimator.load_state(state.direction)
        seconds = time.perf_counter() - started
        self._console.say(f"Resumed after step {state.step} from {folder}, read in {seconds:.1f} s")
        if state.world_size != layout.size("job"):
            self._console.say(
                f"The checkpoint is of {count(state.world_size, 'rank')}, this is {layout.size('job')}: the steps see "
                "the same sequences, and differ by rounding"
            )
        self.validation_losses_before = state.validation_losses_before
        source = self._recipe.checkpoint.branch_from
        if source is None or folder.name != Path(source).name:  # the start of a branch would log to its source
            self.wandb_run_id = state.wandb_run_id
        self._last_end = time.monotonic()
        return state.step

    def verify_step(self, step: int, digest: str) -> tuple[Path, RunState]:
        """Verify and return the checkpoint after `step` steps. Raises UserError if its files do not match its manifest,
        or it does not have this digest (`checkpoint_folder.read_digest`)."""
        folder = checkpoint_folder.step_folder(self._folder, step)
        problem = self._find_problem(folder)
        if problem is None:
            digests = run_on_all_ranks(folder, lambda: {digest, checkpoint_folder.read_digest(folder)})
            if len(set().union(*digests)) > 1:
                problem = "it was rewritten after this command had started"
        if problem is not None:
            raise UserError(
                f"{folder}: does not verify: {problem}; expected a complete checkpoint. Restore it from a copy, or "
                "name another one"
            )
        return folder, self._read_run_state(folder)

    def read(self, checkpoint: tuple[Path, RunState], engine: Engine, direction: Direction | None) -> None:
        """Load a checkpoint into the parameters and the optimizer's state of `engine`, and into `direction`. Raises
        UserError if the model's parameters have other names or shapes than the checkpoint's, or frozen ones other
        values."""
        folder, state = checkpoint
        run_on_first_rank(lambda: self._check_frozen(checkpoint))
        shapes = _list_shapes(engine)
        for name in sorted(shapes.keys() | state.shapes.keys()):
            if shapes.get(name) != state.shapes.get(name):
                raise UserError(
                    f"model.path: {self._recipe.model.path}: parameter {name} has shape {shapes.get(name)}; the "
                    f"checkpoint {folder} has {state.shapes.get(name)}; expected the model that the run began with"
                )
        read_state(engine, direction, folder / checkpoint_folder.STATE, state.num_updates)

    def _check_frozen(self, checkpoint: tuple[Path, RunState]) -> None:
        folder, state = checkpoint
        if state.frozen_digest not in (None, self.frozen_digest):
            raise UserError(
                f"model.path: {self._recipe.model.path}: found other weights than those that {folder} "
                "has adapters for; expected the model that the run began with. Restore it, or set run.output_dir to a "
                "new folder"
            )

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether the run saves after `step` steps. A collective."""
        settings = self._recipe.checkpoint
        every = [n for n in (settings.every_steps, settings.keep_every_steps) if n is not None]
        if step in (num_steps, self.branch_step) or any(step % n == 0 for n in every):
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
        feed: Feed,
        losses: Mapping[str, float] | None = None,
        *,
        is_last: bool = False,
    ) -> SavedCheckpoint:
        """Write the checkpoint after `step` steps, then delete old ones according to the recipe. `losses`: nats after
        this step, by name of the held-out set. `is_last`: no step follows in this process, so the checkpoint is
        complete when this returns.
        With `checkpoint.async` this waits for the previous write and copies the state, which a thread writes during the
        next steps. Raises CheckpointFailed on all ranks alike, naming the rank at fault, also for the previous write;
        the other checkpoints are untouched."""
        started = time.perf_counter()
        self.wait()
        is_async = self._recipe.checkpoint.async_ and not is_last
        is_first, folder = layout.is_first(), checkpoint_folder.step_folder(self._folder, step)
        loss = statistics.fmean(losses.values()) if losses else math.nan
        direction = self._find_reused_direction(step, estimator)
        tensors = self._stage(folder, engine, direction) if is_async else state_tensors(engine, direction)
        content = CheckpointContent(
            RunState(
                step=step,
                world_size=layout.size("job"),
                num_updates=engine.num_updates,
                shapes=_list_shapes(engine),
                direction=estimator.state(),
                data_digests=_list_data_digests(feed),
                validation_losses_before=self.validation_losses_before,
                wandb_run_id=self.wandb_run_id,
                frozen_digest=self.frozen_digest if is_first else None,
                held_out_loss=loss if math.isfinite(loss) else None,
                held_out_digest=self.held_out_digest if losses else None,
            ),
            dump_recipe(self._recipe),
            tensors,
            count_state_bytes(tensors),
        )
        if is_async:
            # Made in the main threads, since making a group is a collective too. Only background threads use it, one
            # write after another, so their collectives are in the same order on all ranks.
            group = self._group = self._group or layout.duplicate_job_group("gloo")
            self._writing = BackgroundWrite(lambda: write_checkpoint(self._folder, content, self.remove_old, group))
            self._last_end = time.monotonic()
        else:
            self._report(write_checkpoint(self._folder, content, self.remove_old))
        seconds = time.perf_counter() - started
        self._metrics["seconds_checkpoint"] = seconds
        return SavedCheckpoint(folder, seconds, is_complete=not is_async)

    def take_metrics(self) -> dict[str, float]:
        """Return the measurements of checkpoints since the last call, for a line of metrics.jsonl."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _stage(self, folder: Path, engine: Engine, direction: Direction | None) -> State:
        """Copy the state to host memory. A collective: a rank without room for the copy ends all of them."""
        self._stager = stager = self._stager or Stager()
        staged: list[State] = []
        run_on_all_ranks(folder, lambda: staged.append(stager.stage(engine, direction)))
        return staged[0]

    def collect(self) -> None:
        """Report a background write that has ended on all ranks. A collective. Raises CheckpointFailed on all ranks
        alike."""
        if self._writing is None:  # on all ranks alike
            return
        # Only when the threads of all ranks have ended: a rank that raised an error a step before the others would
        # leave them hanging in the next step's collectives.
        if layout.sum_over("job", [float(self._writing.is_done())])[0] == layout.size("job"):
            self.wait()

    def wait(self) -> None:
        """Wait for a background write, if any, which ends on all ranks together. Raises CheckpointFailed on all ranks
        alike."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        written = writing.wait()
        self.seconds_write = self._metrics["seconds_checkpoint_write"] = written.seconds
        self._report(written, " in the background")

    def finish_after_failure(self) -> None:
        """Wait for a background write when the run fails: its state is valid. Not a collective."""
        with suppress(Exception):  # the run's failure is the one to report
            self.wait()

    def _report(self, written: WrittenCheckpoint, how: str = "") -> None:
        self._console.say(f"checkpoint: {written.folder}: {written.bytes / 1e9:.3g} GB in {written.seconds:.1f} s{how}")
        if written.warning is not None:
            self._console.warn(written.warning)
        self._metrics["checkpoint_bytes"] = written.bytes
        self._last_end = time.monotonic()

    def remove_old(self) -> str | None:
        """Delete the checkpoints that the recipe does not keep, on rank 0. Returns a warning if one cannot be deleted,
        as when an export has it open on a network file system."""
        settings = self._recipe.checkpoint
        try:
            checkpoint_folder.remove_old(
                self._folder,
                keep_last=settings.keep_last,
                keep_every_steps=settings.keep_every_steps,
                keep_step=self.branch_step,
                best=[folder for _, folder in self.rank_by_loss()[: settings.keep_best or 0]],
            )
        except OSError as error:
            return f"an old checkpoint cannot be deleted: {error}. Delete it if the disk is short of space"
        return None

    def rank_by_loss(self) -> list[tuple[float, Path]]:
        """List held-out loss in nats and folder of the checkpoints that have one, the lowest first; empty without
        `checkpoint.keep_best`. For rank 0."""
        return checkpoint_folder.rank_by_loss(self._folder, self.held_out_digest) if self.compares else []

    def _find_reused_direction(self, num_done: int, estimator: Estimator) -> Direction | None:
        """Return the direction if the step after `num_done` steps reuses it."""
        return estimator.direction if num_done % self._recipe.probe.every != 0 else None

    def _find_problem(self, folder: Path) -> str | None:
        """Call `checkpoint_folder.find_problem`, with the files divided among the ranks. A collective."""
        part, num_parts = layout.rank("job"), layout.size("job")
        problem = checkpoint_folder.find_problem(folder, self._console.say, part=part, num_parts=num_parts)
        return "; ".join(dict.fromkeys(filter(None, layout.gather_objects("job", problem)))) or None

    def _read_run_state(self, folder: Path) -> RunState:
        values: dict[str, Any] = run_on_all_ranks(folder, lambda: checkpoint_folder.read_run_state(folder))[
            layout.rank("job")
        ]
        return RunState(**{field.name: values[field.name] for field in fields(RunState) if field.name in values})


def _list_shapes(engine: Engine) -> dict[str, list[int]]:
    return {name: list(full_shape(parameter)) for name, parameter in engine.trainable}


def _list_data_digests(feed: Feed) -> dict[str, str]:
    """Map recipe keys to digests of the tokens, which with the step determine a batch."""
    return {"data.train_path": feed.training_digest(), "data.probe_path": feed.probe_dataset.digest}


def check_compared(recipe: Recipe, num_steps: int) -> None:
    """Raise UserError if `checkpoint.keep_best` would compare nothing; a rule of the recipe covers the other cases."""
    first = first_compared_step(recipe)
    if recipe.checkpoint.keep_best is not None and first is not None and first >= num_steps:
        raise UserError(
            f"checkpoint.keep_best: found step {first} as the first with a checkpoint and an evaluation, and "
            f"{num_steps} as the last of the run; expected one before it. Lower checkpoint.every_steps and "
            "run.validate_every to the same number"
        )


def make_digest(validation: Mapping[str, Dataset]) -> str:
    """Hash the held-out sets and their names."""
    text = "\n".join(f"{name} {dataset.digest}" for name, dataset in sorted(validation.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def say_best(checkpoints: Checkpoints, num_steps: int, console: Console) -> None:
    """Name the checkpoint with the lowest held-out loss, if the run compares them and it is not the last. On rank 0."""
    ranked = checkpoints.rank_by_loss()
    if ranked and ranked[0][1].name != step_folder(Path(), num_steps).name:
        loss, folder = ranked[0]
        console.say(
            f"Lowest held-out loss: {loss:.4f}, {folder.name}. As a model: vcore-ds export "
            f"{shlex.quote(str(folder.parents[1]))} --checkpoint {folder.name}"
        )
