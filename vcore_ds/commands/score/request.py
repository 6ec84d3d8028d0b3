"""What `vcore-ds score` was asked for, and what it refuses at once, before torch is imported."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import reading, refuse_existing
from vcore_ds.config.load import load_recipe
from vcore_ds.config.resume import flat_values
from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import (
    CheckpointConfig,
    MethodConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrackConfig,
    UtilityConfig,
)
from vcore_ds.data.scores_folder import ScoredCheckpoint, Scores
from vcore_ds.data.store import TokenStore
from vcore_ds.engine import checkpoint_folder
from vcore_ds.train.run_folder import RECIPE
from vcore_ds.train.run_reader import read_metrics_of

ONLY_SET = "trusted"
"""Name of the set at data.probe_path."""
NEW_FOLDER = "a new folder that can be written"
"""What `--output` has to be, for messages."""

_SET = re.compile(r"(\w{1,64})=(.+)")


@dataclass(frozen=True)
class ScoreRequest:
    """Data, weights and directions of a scoring."""

    recipe: Recipe
    """With `run.output_dir` where the run is now."""
    sets: dict[str, str]
    """Name -> path of each trusted set."""
    checkpoints: list[ScoredCheckpoint]
    """In the order of their steps; empty for the base model."""
    output: Path
    again: bool = False
    """Delete what an earlier attempt has left unfinished."""


def make_request(
    target: str,
    overrides: Sequence[str],
    sets: Sequence[str],
    checkpoint: str | None,
    output: Path | None,
    again: bool = False,
) -> ScoreRequest:
    """The arguments of the command, read and checked.

    Raises:
        UserError: the recipe, the run, the checkpoint, a set or the output is not what it has to be.
    """
    run = Path(target) if Path(target).is_dir() else None
    if run is not None and not (run / RECIPE).is_file():
        raise UserError(f"RUN: {run}: found no {RECIPE} there; expected a recipe, or a run's folder (run.output_dir)")
    if run is None and checkpoint is not None:
        raise UserError(f"--checkpoint: found {checkpoint} together with a recipe; expected a run's folder (RUN)")
    recipe = load_recipe(target if run is None else run / RECIPE, overrides, accept_retired=run is not None)
    if recipe.method.uses_utilities and recipe.utility.estimator != "jvp":
        raise UserError(
            "utility.estimator: found finite_difference; expected jvp: scores are exact derivatives, of forward mode. "
            "Add utility.estimator=jvp utility.epsilon=null"
        )
    named = _named_sets(sets)
    if not named and recipe.data.probe_path is not None:
        named = {ONLY_SET: recipe.data.probe_path}
    if not named:
        raise UserError(
            "data.probe_path: found null; expected a trusted set: traces that are known to be right, a few will do. "
            "Add data.probe_path=PATH, or --set NAME=PATH for each of several"
        )
    if output is None:
        output = Path("runs", "scores", Path(target).stem if run is None else run.resolve().name)
    refuse_existing(output, NEW_FOLDER)
    checkpoints = [] if run is None else _checkpoints(run, checkpoint)
    return ScoreRequest(_scored(recipe, run), named, checkpoints, output, again)


def _named_sets(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        match = _SET.fullmatch(word)
        if match is None or match[1] in found:
            raise UserError(
                f"--set: found {word}; expected NAME=PATH, where NAME has letters, digits and _, 64 at most, and "
                "another one for each set"
            )
        found[match[1]] = match[2]
    return found


def _scored(recipe: Recipe, run: Path | None) -> Recipe:
    """The recipe as one that takes directions of whole trusted sets, whatever its method is.

    What a scoring does not read is the same in all of these recipes: they are what identifies a scoring
    (`identity.describe_request`).
    """
    has_moments = run is not None and recipe.probe.direction == "adam"
    probe = {"batch_size": "all", "every": 1}
    data = {"trusted_share": 0.0, "reference_log_probabilities": None, "keep": None, "validation_path": None}
    changes = {
        "method": MethodConfig(name="vcore", kl_budget=0.05, normalization=recipe.method.normalization),
        "utility": UtilityConfig(micro_batch_size_per_rank=recipe.utility.micro_batch_size_per_rank),
        # Clipping is a factor of all utilities, but for Adam's Jacobian, which belongs to clipped gradients.
        "probe": recipe.probe.model_copy(update=probe if has_moments else probe | {"direction": "sgd", "clip": None}),
        "data": recipe.data.model_copy(update=data),
        "schedule": ScheduleConfig(num_steps=1),
        "run": RunConfig(output_dir=recipe.run.output_dir if run is None else str(run), seed=recipe.run.seed),
        "track": TrackConfig(),
        "checkpoint": CheckpointConfig(),
    }
    if not has_moments:  # what the optimizer would keep beside the parameters takes two thirds of its memory
        changes["optimizer"] = OptimizerConfig(name="sgd", learning_rate=1.0)
    return recipe.model_copy(update=changes)


def _checkpoints(run: Path, name: str | None) -> list[ScoredCheckpoint]:
    """The named one, all of them or the newest, with their weights in the sum.

    Raises UserError where there is none of that name.
    """
    with reading("RUN", run, "the folder of a run"):
        complete = {
            folder.name: (step, checkpoint_folder.read_digest(folder))
            for folder in reversed(checkpoint_folder.list_checkpoints(run / "checkpoints"))
            if (folder / checkpoint_folder.COMPLETE).is_file()
            and (step := checkpoint_folder.parse_step(folder)) is not None
        }
    if not complete or name not in (None, "all", *complete):
        there = ", ".join(complete) or "no finished one"
        raise UserError(f"--checkpoint: {run / 'checkpoints'}: expected {name or 'a checkpoint'}; found {there}")
    if name != "all":
        step, digest = complete[name] if name is not None else max(complete.values())
        return [ScoredCheckpoint(str(run), step, 1.0, digest)]
    rates = {int(line["step"] or 0): line["learning_rate"] or 0.0 for line in read_metrics_of(run)}
    found, before = [], 0
    for step, digest in complete.values():
        steps = range(before + 1, step + 1)
        if missing := [k for k in steps if k not in rates]:
            raise UserError(
                f"RUN: {run}: found no learning rate of step {missing[0]} in metrics.jsonl; expected that of all steps "
                "up to the last checkpoint, to weight the checkpoints. Name one of them with --checkpoint"
            )
        found.append(ScoredCheckpoint(str(run), step, sum(rates[k] for k in steps) / len(steps), digest))
        before = step
    return found


# What identifies a scoring: everything that its losses and utilities depend on. Work that differs is not continued.


BY_DIGEST = frozenset(
    {
        "model.path",
        "data.train_path",
        "data.probe_path",
        "data.cache_dir",
        "run.output_dir",
        "engine.deepspeed_config",
    }
)
"""Keys of files whose contents count, wherever they are."""
WITHOUT_EFFECT = frozenset(
    {
        # The same numbers in less memory.
        "model.gradient_checkpointing",
        "model.activation_offload",
        "engine.memory_check",
        "engine.timeout_minutes",
        "engine.lost_rank_seconds",
    }
)
"""Keys that may differ when a scoring is continued, such as after a rank ran out of memory."""


def describe_request(
    recipe: Recipe,
    description: Scores,
    deepspeed_config: Mapping[str, Any],
    passes: Sequence[tuple[str, TokenStore, ScoredCheckpoint | None]],
) -> dict[str, Any]:
    """The identity of a scoring, for JSON.

    All keys of the recipe count but those named above: a new one cannot be forgotten.

    Args:
        recipe: as `request` makes it of the user's.
        description: of the data and the model.
        deepspeed_config: complete.
        passes: name and data of the trusted set, and the checkpoint, in the order of their numbers.
    """
    data = description.data
    return {
        "version": description.version,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "model": description.model_digest,
        "data": {
            "digest": data.digest,
            "tokenizer": data.tokenizer_hash,
            "chat_template": data.chat_template_hash,
        },
        "recipe": {k: v for k, v in flat_values(recipe).items() if k not in BY_DIGEST | WITHOUT_EFFECT},
        # Where ZeRO-3 keeps shards and in which pieces it sends them changes no number, nor does the number of ranks.
        "deepspeed": {k: v for k, v in deepspeed_config.items() if k not in ("zero_optimization", "train_batch_size")},
        "passes": [
            {"set": name, "digest": trusted.digest}
            | ({} if checkpoint is None else {"step": checkpoint.step, "checkpoint": checkpoint.digest})
            for name, trusted, checkpoint in passes
        ],
    }
