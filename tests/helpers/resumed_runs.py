"""Runs (`vcore_ds.training.run.train`) that stop after a given step, and the files that they leave; called through
`run_ranks`."""

import gc
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp

from tests.helpers.commands import drop_machine_keys, read_metrics
from vcore_ds.config.schema import Recipe
from vcore_ds.distributed import layout
from vcore_ds.engine.zero3 import Engine
from vcore_ds.training import run
from vcore_ds.training.checkpoint_read import RunState
from vcore_ds.training.checkpoints import Checkpoints

NUM_STEPS = 4
CHECKS = ("check_architecture", "check_start", "check_derivatives")
"""Functions of `run` that depend on no data."""

_checked: set[str] = set()
"""Model-related sections, as JSON, of the recipes whose checks at the start have passed in this process."""


class Stopped(Exception):
    pass


@contextmanager
def saving_after(steps: Sequence[int], stop: bool, killed: Path | None = None) -> Iterator[None]:
    """Make runs inside the block save after these steps and after the last one. `stop`: whether they raise `Stopped` at
    the last of these steps. `killed`: folder for a copy of the files that a kill at that moment would leave."""
    is_due, save, build_engine = Checkpoints.is_due, Checkpoints.save, run.build_engine
    engines = []

    def build(*arguments):
        engines.append(build_engine(*arguments))
        return engines[-1]

    def save_and_stop(self, step, *rest, **options):
        saved = save(self, step, *rest, **options)
        if stop and step == steps[-1]:
            raise Stopped
        if killed is not None and step in steps and layout.is_first():
            shutil.copytree(saved[0].parents[1], killed)
        return saved

    Checkpoints.is_due = lambda self, step, num_steps: step in steps or step == num_steps
    Checkpoints.save, run.build_engine = save_and_stop, build
    try:
        yield
    except BaseException:
        for engine in engines:
            engine.close()  # else the next run in this process could not start one
        raise
    finally:
        Checkpoints.is_due, Checkpoints.save, run.build_engine = is_due, save, build_engine


def train(recipe: Recipe, *, with_card: bool = False) -> Path:
    """Train without a model card unless `with_card`, and without the checks at the start if an earlier run of this
    process has passed them with the same model: together a quarter of a short run. Returns the run's folder."""
    gc.freeze()  # DeepSpeed collects garbage at each start of an engine, which would traverse those of earlier runs
    sections = recipe.model_dump_json(include={"model", "lora", "parallel", "batch", "utility"})
    replaced = {} if with_card else {"make_model_card": lambda *_, **__: ""}
    if sections in _checked:
        replaced |= dict.fromkeys(CHECKS, lambda *_: None)
    with patch.multiple(run, **replaced):
        try:
            folder = run.train(recipe).folder
        except Stopped:
            _checked.add(sections)
            raise
    _checked.add(sections)
    return folder


def run_to_end(recipe: Recipe, *saved: int, with_card: bool = False) -> Path:
    """Run to the last step, from the beginning or resumed, and also save after each of `saved`; returns the run's
    folder."""
    with saving_after(saved, stop=False):
        return train(recipe, with_card=with_card)


def run_and_copy_after(recipe: Recipe, step: int, killed: Path) -> Path:
    """Run to the last step, copying the folder to `killed` as it is after `step`; returns the run's folder."""
    with saving_after([step], stop=False, killed=killed):
        return train(recipe)


def run_until(recipe: Recipe, *steps: int) -> Path:
    """Run, save after each of `steps`, and stop after the last of them; returns the run's folder."""
    try:
        with saving_after(steps, stop=True):
            train(recipe)
    except Stopped:
        return Path(recipe.run.output_dir)
    raise AssertionError(f"the run did not stop after step {steps[-1]}")


@contextmanager
def inspecting_engines(inspect: Callable[[Engine], None]) -> Iterator[None]:
    """Call `inspect` with every engine that is closed inside the block, before it is closed."""
    close = Engine.close

    def inspect_and_close(engine: Engine) -> None:
        inspect(engine)
        close(engine)

    with patch.object(Engine, "close", inspect_and_close):
        yield


def load_checkpoint_tensors(folder: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Unsharded tensors of a run's checkpoint at `step`, by default the last."""
    checkpoints = folder / "checkpoints"
    checkpoint = max(checkpoints.glob("step_????????")) if step is None else checkpoints / f"step_{step:08d}"
    return load_state_tensors(checkpoint / "state")


def load_state_tensors(state: Path) -> dict[str, torch.Tensor]:
    """Unsharded tensors in a folder written by torch.distributed.checkpoint."""
    reader = dcp.FileSystemReader(state)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in stored.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def make_run_state() -> RunState:
    """The state of a run that has trained nothing."""
    return RunState(0, 1, 0, {}, None, {}, {}, None, None, None)


def read_deterministic_metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without the keys that depend on the machine."""
    return [drop_machine_keys(line) for line in read_metrics(folder)]


def read_token_records(folder: Path, name: str = "tokens") -> dict[str, bytes]:
    """Name -> content of each token record in a run's folder."""
    return {path.name: path.read_bytes() for path in sorted((folder / name).iterdir())}


def find_differences(folder: Path, expected: Path, num_steps: int = NUM_STEPS) -> list[str]:
    """Names of tensors in the last checkpoint, metrics and token records that are not equal bit for bit."""
    tensors, expected_tensors = load_checkpoint_tensors(folder, num_steps), load_checkpoint_tensors(expected, num_steps)
    differing = sorted(tensors.keys() ^ expected_tensors.keys())
    differing += [
        name
        for name in tensors.keys() & expected_tensors.keys()
        if not torch.equal(tensors[name], expected_tensors[name])
    ]
    records, expected_records = read_token_records(folder), read_token_records(expected)
    # With so few steps, each has a token record, and measures followed traces if the run has any.
    assert sum(name.startswith("step_") for name in expected_records) == num_steps
    assert sum(name.startswith("followed_") for name in expected_records) in (0, num_steps)
    names = sorted(records.keys() | expected_records.keys())
    differing += [name for name in names if records.get(name) != expected_records.get(name)]
    lines, expected_lines = read_deterministic_metrics(folder), read_deterministic_metrics(expected)
    differing += [f"{len(lines)} lines"] if [line["step"] for line in lines] != list(range(1, num_steps + 1)) else []
    differing += [
        f"step {a['step']}: {key}"
        for a, b in zip(lines, expected_lines, strict=True)
        for key in a.keys() | b.keys()
        if a.get(key) != b.get(key)
    ]
    return differing
