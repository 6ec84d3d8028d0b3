"""Read a run's checkpoints: which one it resumes from, and its state."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vcore_ds.common.errors import UserError
from vcore_ds.common.text import count
from vcore_ds.config.data_section import DataConfig
from vcore_ds.config.load import read_resolved_recipe
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import run_on_first_rank
from vcore_ds.engine.checkpoint_shards import read_state, run_on_all_ranks
from vcore_ds.engine.flat_shards import full_shape
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.model_identity import compute_model_digest
from vcore_ds.training import checkpoint_folder, console
from vcore_ds.training.feed import Feed
from vcore_ds.training.schedule import Schedule, derive_schedule
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import Estimator


@dataclass(frozen=True)
class RunState:
    """The part of a run's state that is not tensors. Data order, probe stream, learning rate and dropout are functions
    of the step."""

    step: int  # optimizer steps done
    world_size: int
    num_updates: int  # the optimizer's step count; 0 for an optimizer without one
    shapes: dict[str, list[int]]  # shapes of the trained parameters, by name
    direction: dict[str, float | None] | None
    """Norm and displacement of the probe direction, None for methods without one."""
    data_digests: dict[str, str]  # digests of the tokens that training and probe draw from, by recipe key
    validation_losses_before: dict[str, float]  # nats, before the first step, by name of the held-out set
    frozen_digest: str | None
    """Digest of the model whose adapters are trained: a checkpoint holds none of its weights. None where all parameters
    are trained."""
    held_out_loss: float | None
    """Nats after this step, mean over the held-out sets; None if not measured, or not finite."""
    held_out_digest: str | None  # digest of these sets; None without a loss


Checkpoint = tuple[Path, RunState]
"""The folder of a checkpoint that verifies, and its state."""


def find_newest(checkpoints: Path, max_step: int | None = None) -> Checkpoint | None:
    """Find the newest checkpoint (of at most `max_step` steps) whose files match its manifest, each rank verifying a
    part of them; None if none is finished. A collective. Raises UserError if there are checkpoints and none of them
    verifies."""
    unfinished, candidates = run_on_all_ranks(  # rank 0's view serves all
        checkpoints,
        lambda: (checkpoint_folder.list_unfinished(checkpoints), checkpoint_folder.list_checkpoints(checkpoints)),
    )[0]
    if max_step is not None:
        unfinished = []
        candidates = [folder for folder in candidates if (checkpoint_folder.parse_step(folder) or 0) <= max_step]
    skipped = [f"{folder.name}: not finished" for folder in unfinished if folder not in candidates]
    newest, problems = checkpoint_folder.find_newest_usable(candidates, partial(_find_problem, say=console.say))
    skipped += problems
    # A run that was killed between renaming and marking its first checkpoint has lost nothing.
    if newest is None and not set(candidates) <= set(unfinished):
        raise UserError(
            f"run.output_dir: {checkpoints}: found no checkpoint that verifies:\n  "
            + "\n  ".join(skipped)
            + "\nexpected one to resume from. Restore one of them from a copy, or set run.output_dir to a new folder "
            "to start over"
        )
    for line in skipped:
        console.warn(f"skipped checkpoint {line}")
    return None if newest is None else (newest, _read_run_state(newest))


def find_common_checkpoint(checkpoints: Path, newest: Checkpoint, schedule: Schedule, feed: Feed) -> Checkpoint:
    """Find the newest checkpoint up to which the schedule has the learning rates of the run of `newest`. A collective.
    Raises UserError if there is none."""
    folder, state = newest
    path = folder / checkpoint_folder.RECIPE
    recipe = layout.gather_objects("job", run_on_first_rank(lambda: read_resolved_recipe(path)))[0]
    assert recipe is not None  # rank 0's
    before = derive_schedule(
        recipe.schedule, recipe.optimizer.learning_rate, len(feed.dataset), feed.main_order.batch_size
    )
    num_common = before.count_common_steps(schedule)
    if state.step <= num_common:
        return newest
    common = find_newest(checkpoints, num_common)
    if common is None:
        steps = f"the learning rates of another schedule from step {num_common + 1} on, before the checkpoint {folder}"
        if num_common == schedule.num_steps:
            steps = f"{num_common:,} steps, and the checkpoint {folder} of a later one"
        raise UserError(
            f"schedule: found {steps}; expected the learning rates that the run has taken. Set the keys of schedule as "
            "they were, or run.output_dir to a new folder. A run can be longer with schedule.kind constant or wsd, and "
            "schedule.warmup_steps"
        )
    console.say(f"The learning rate differs from step {num_common + 1} on: the run goes back to step {common[1].step}")
    return common


def set_aside_newer(checkpoints: Path, step: int) -> None:
    """Rename the checkpoints after `step`, which do not verify or are of another schedule. A collective."""
    is_first = layout.is_first()
    for renamed in run_on_all_ranks(
        checkpoints, lambda: checkpoint_folder.set_aside_newer(checkpoints, step) if is_first else []
    )[0]:
        console.warn(f"renamed a checkpoint of a later step: {renamed}")


def check_data(checkpoint: Checkpoint, feed: Feed, data: DataConfig) -> None:
    """Raise UserError if the data differ from those that the checkpoint was trained on."""
    folder, state = checkpoint
    for key, digest in list_data_digests(feed).items():
        if digest != state.data_digests[key]:
            is_pool = key == "data.probe_path" and data.probe_path is not None
            path = data.probe_path if is_pool else data.train_name()
            raise UserError(
                f"{key}: {path}: found other tokens than those that {folder} was trained on (data, template, "
                "tokenizer, weights or kept traces have changed); expected the same, to resume. Restore them, or set "
                "run.output_dir to a new folder"
            )


def list_data_digests(feed: Feed) -> dict[str, str]:
    """Map recipe keys to digests of the tokens, which with the step determine a batch."""
    return {"data.train_path": feed.training_digest(), "data.probe_path": feed.probe_dataset.digest}


def compute_frozen_digest(model: str, *, has_adapters: bool) -> str | None:
    """Compute the digest of the model under the adapters; None without adapters, or for weights that only transformers
    finds. `model`: model.path."""
    try:
        return compute_model_digest(model) if has_adapters else None
    except UserError:
        return None


def load_checkpoint(
    checkpoint: Checkpoint,
    engine: Engine,
    estimator: Estimator,
    model: str,
    frozen_digest: str | None,
    probe_every: int,
) -> None:
    """Load a checkpoint into a new engine, as `read_checkpoint`, and into the estimator. A collective. `probe_every`:
    steps that share a probe direction."""
    started = time.perf_counter()
    folder, state = checkpoint
    direction = find_reused_direction(state.step, probe_every, estimator)
    read_checkpoint(checkpoint, engine, direction, model, frozen_digest)
    if state.direction is not None:
        estimator.load_state(state.direction)
    seconds = time.perf_counter() - started
    console.say(f"Resumed after step {state.step} from {folder}, read in {seconds:.1f} s")
    if state.world_size != layout.size("job"):
        console.say(
            f"The checkpoint is of {count(state.world_size, 'rank')}, this is {layout.size('job')}: the steps see the "
            "same sequences, and differ by rounding"
        )


def find_reused_direction(num_done: int, probe_every: int, estimator: Estimator) -> Direction | None:
    """Return the direction if the step after `num_done` steps reuses it."""
    return estimator.direction if num_done % probe_every != 0 else None


def read_checkpoint(
    checkpoint: Checkpoint, engine: Engine, direction: Direction | None, model: str, frozen_digest: str | None
) -> None:
    """Load a checkpoint into the parameters and the optimizer's state of `engine`, and into `direction`. A collective.
    `model`: model.path; `frozen_digest`: of the model under the adapters, on rank 0. Raises UserError if the model's
    parameters have other names or shapes than the checkpoint's, or frozen ones other values."""
    folder, state = checkpoint

    def check_frozen() -> None:
        if state.frozen_digest not in (None, frozen_digest):
            raise UserError(
                f"model.path: {model}: found other weights than those that {folder} has adapters for; expected the "
                "model that the run began with. Restore it, or set run.output_dir to a new folder"
            )

    run_on_first_rank(check_frozen)
    shapes = list_shapes(engine)
    for name in sorted(shapes.keys() | state.shapes.keys()):
        if shapes.get(name) != state.shapes.get(name):
            raise UserError(
                f"model.path: {model}: parameter {name} has shape {shapes.get(name)}; the checkpoint {folder} has "
                f"{state.shapes.get(name)}; expected the model that the run began with"
            )
    read_state(engine, direction, folder / checkpoint_folder.STATE, state.num_updates)


def list_shapes(engine: Engine) -> dict[str, list[int]]:
    """List the shapes of the trained parameters, by name."""
    return {name: list(full_shape(parameter)) for name, parameter in engine.trainable}


def verify_step(checkpoints: Path, step: int, digest: str, say: Callable[[str], None]) -> Checkpoint:
    """Verify and return the checkpoint after `step` steps. A collective. Raises UserError if its files do not match its
    manifest, or it does not have this digest (`checkpoint_folder.read_digest`)."""
    folder = checkpoint_folder.step_folder(checkpoints, step)
    problem = _find_problem(folder, say)
    if problem is None:
        digests = run_on_all_ranks(folder, lambda: {digest, checkpoint_folder.read_digest(folder)})
        if len(set().union(*digests)) > 1:
            problem = "it was rewritten after this command had started"
    if problem is not None:
        raise UserError(
            f"{folder}: does not verify: {problem}; expected a complete checkpoint. Restore it from a copy, or name "
            "another one"
        )
    return folder, _read_run_state(folder)


def _find_problem(folder: Path, say: Callable[[str], None]) -> str | None:
    """Call `checkpoint_folder.find_problem`, with the files divided among the ranks. A collective."""
    problem = checkpoint_folder.find_problem(folder, say, part=layout.rank("job"), num_parts=layout.size("job"))
    return "; ".join(dict.fromkeys(filter(None, layout.gather_objects("job", problem)))) or None


def _read_run_state(folder: Path) -> RunState:
    by_rank = run_on_all_ranks(folder, lambda: RunState(**checkpoint_folder.read_run_state(folder)))
    return by_rank[layout.rank("job")]
