"""Commands as functions: `train` and `score`."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from vcore_ds.commands.score import read_inputs
from vcore_ds.commands.score.compute import score as run_scoring
from vcore_ds.config.load import list_overrides, load_recipe
from vcore_ds.distributed.device import local_rank, uses_gpu
from vcore_ds.training.run import RunResult
from vcore_ds.training.run import train as run_training


def train(recipe: str | Path, *fragments: str, **overrides: Any) -> RunResult:
    """Train a recipe, as `vcore-ds train`: in this process, or in each rank of a launcher. The same call resumes.

    `recipe`: a YAML file or a shipped recipe. `fragments`: merged over it, such as `methods/sft.yaml`. `overrides`:
    sections with their keys, as in `method={"kl_budget": 0.05}, lora=None`. Raises UserError before anything is
    written, for whatever the user can fix.
    """
    with _preserved_random_state():
        return run_training(load_recipe(recipe, [*fragments, *list_overrides(overrides)]), says_next=False)


def score(
    recipe: str | Path,
    *fragments: str,
    output: str | Path,
    sets: Mapping[str, str | Path] | None = None,
    checkpoint: str | None = None,
    all_tokens: bool = False,
    **overrides: Any,
) -> Path:
    """Score training traces by their influence on trusted ones, as `vcore-ds score`. The same call resumes.

    `recipe`: a recipe, or the folder of a run. `fragments`, `overrides`: as in `train`. `output`: new folder. `sets`:
    path of each trusted set by its name; None for `data={"probe_path": ...}`. `checkpoint`: of a run; None for the
    newest. `all_tokens`: also write the utilities of all tokens. Returns `output`, whose files docs/scoring.md
    describes. Raises UserError for whatever the user can fix.
    """
    words = [f"{name}={path}" for name, path in (sets or {}).items()]
    lines = [*fragments, *list_overrides(overrides)]
    inputs = read_inputs(str(recipe), lines, words, checkpoint, Path(output), all_tokens=all_tokens)
    with _preserved_random_state():
        run_scoring(inputs)
    return inputs.output


def _preserved_random_state() -> AbstractContextManager[None]:
    return torch.random.fork_rng([local_rank()] if uses_gpu() else [])
