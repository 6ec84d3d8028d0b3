"""Write one checkpoint: all ranks together, in their main threads or in a background thread of each."""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread

from vcore_ds.common.paths import discard, unfinished_path
from vcore_ds.distributed import layout
from vcore_ds.engine import checkpoint_folder
from vcore_ds.engine.checkpoint_shards import (
    CheckpointFailed,
    Group,
    State,
    list_files_of_this_rank,
    run_on_all_ranks,
    write_state,
)

MARGIN_BYTES = 64 * 2**20
"""Free space required besides the tensors: for index, recipe, and what other processes write meanwhile."""


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
    wandb_run_id: str | None
    frozen_digest: str | None = None
    """Digest of the model whose adapters are trained: a checkpoint holds none of its weights. None where all parameters
    are trained, and in checkpoints of vcore_ds 0.7 and before."""
    held_out_loss: float | None = None
    """Nats after this step, mean over the held-out sets; None if not measured, or not finite."""
    held_out_digest: str | None = None  # digest of these sets; None without a loss


@dataclass(frozen=True)
class CheckpointContent:
    """Everything that a checkpoint holds, as it was when its step ended."""

    state: RunState
    recipe_yaml: str
    tensors: State
    num_bytes: int  # of the tensors, all ranks' together


@dataclass(frozen=True)
class WrittenCheckpoint:
    """A checkpoint that is complete on disk."""

    folder: Path
    seconds: float
    bytes: int  # all ranks' together
    warning: str | None  # on rank 0: why an old checkpoint could not be deleted


def write_checkpoint(
    checkpoints: Path, content: CheckpointContent, remove_old: Callable[[], str | None], group: Group | None = None
) -> WrittenCheckpoint:
    """Write a checkpoint into the folder `checkpoints`, then call `remove_old` on rank 0, which deletes old ones and
    returns a warning. A collective. A background thread needs a separate `group` (see `run_on_all_ranks`): ranks could
    start the collectives of two threads on one group in different orders, and hang. Raises CheckpointFailed on all
    ranks alike, naming the rank at fault; the other checkpoints are untouched."""
    started = time.perf_counter()
    is_first, step = layout.is_first(), content.state.step
    unfinished = unfinished_path(checkpoint_folder.step_folder(checkpoints, step))
    num_bytes = content.num_bytes + MARGIN_BYTES
    try:
        run_on_all_ranks(
            unfinished, lambda: checkpoint_folder.begin(checkpoints, step, num_bytes) if is_first else None, group
        )
        write_state(content.tensors, unfinished / checkpoint_folder.STATE, group)
        written = run_on_all_ranks(unfinished, lambda: _write_rest(unfinished, content), group)
        records = {name: record for rank_records in written for name, record in rank_records.items()}
        folder = run_on_all_ranks(
            unfinished,
            lambda: (
                checkpoint_folder.finish(checkpoints, step, content.state.world_size, records) if is_first else None
            ),
            group,
        )[0]
    except CheckpointFailed as error:
        if is_first:
            discard(unfinished)
        raise CheckpointFailed(
            f"the checkpoint of step {step} could not be written: {error}. Earlier checkpoints are untouched"
        ) from None
    warning = run_on_all_ranks(checkpoints, lambda: remove_old() if is_first else None, group)[0]
    assert folder is not None  # rank 0 made it
    num_bytes = sum(record.bytes for record in records.values())
    return WrittenCheckpoint(folder, time.perf_counter() - started, num_bytes, warning)


def _write_rest(unfinished: Path, content: CheckpointContent) -> dict[str, checkpoint_folder.FileRecord]:
    """Write the small files, on rank 0; read this rank's files back and return their records."""
    paths = list_files_of_this_rank(unfinished / checkpoint_folder.STATE)
    if layout.is_first():
        state = json.dumps(asdict(content.state), indent=2) + "\n"
        for name, text in ((checkpoint_folder.RUN_STATE, state), (checkpoint_folder.RECIPE, content.recipe_yaml)):
            (unfinished / name).write_text(text, encoding="utf-8")
            paths.append(unfinished / name)
    return {path.relative_to(unfinished).as_posix(): checkpoint_folder.hash_file(path) for path in paths}


class BackgroundWrite:
    """A checkpoint that background threads of all ranks write together."""

    def __init__(self, write: Callable[[], WrittenCheckpoint]):
        """`write`: must communicate over a group that no other thread uses meanwhile."""
        self._result: Future[WrittenCheckpoint] = Future()
        # A daemon: a rank that ends with an error must not wait for the files of ranks that may be gone.
        Thread(target=self._run, args=(write,), name="checkpoint", daemon=True).start()

    def is_done(self) -> bool:
        return self._result.done()

    def wait(self) -> WrittenCheckpoint:
        """Wait for the end of the thread. Raises what it raised: `CheckpointFailed` on all ranks alike."""
        return self._result.result()

    def _run(self, write: Callable[[], WrittenCheckpoint]) -> None:
        try:
            self._result.set_result(write())
        except BaseException as error:
            self._result.set_exception(error)
