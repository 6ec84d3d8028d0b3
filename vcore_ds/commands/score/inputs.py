"""The inputs of `vcore-ds score`: what its arguments name, checked before torch is imported, and their identity."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import reading, refuse_existing
from vcore_ds.config import sections
from vcore_ds.config.load import load_recipe
from vcore_ds.config.resume import flat_values
from vcore_ds.config.schema import Recipe
from vcore_ds.data.scores_folder import ScoredCheckpoint, Scores
from vcore_ds.data.store import TokenStore
from vcore_ds.engine import checkpoint_folder
from vcore_ds.training.run_folder import RECIPE, read_run_metrics

ONLY_SET = "trusted"  # name of the set at data.probe_path
NEW_FOLDER = "a new folder that can be written"

_SET = re.compile(r"(\w{1,64})=(.+)")


@dataclass(frozen=True)
class ScoreInputs:
    """The data, weights and directions to score with."""

    recipe: Recipe  # `run.output_dir` is the run's present folder
    sets: dict[str, str]
    checkpoints: list[ScoredCheckpoint]  # in ascending order of steps; empty for the base model
    output: Path
    again: bool = False
    trained_on_selection: bool = False
    all_tokens: bool = False  # write the utilities of all tokens, not only of the best and worst traces'


def read_inputs(
    target: str,
    overrides: Sequence[str],
    sets: Sequence[str],
    checkpoint: str | None,
    output: Path | None,
    again: bool = False,
    all_tokens: bool = False,
) -> ScoreInputs:
    """Check the command's arguments, and read what they name. Raises UserError where the recipe, the run, the
    checkpoint, a set or the output cannot be used."""
    run = Path(target) if Path(target).is_dir() else None
    if run is not None and not (run / RECIPE).is_file():
        raise UserError(f"RUN: {run}: found no {RECIPE} there; expected a recipe, or a run's folder (run.output_dir)")
    if run is None and checkpoint is not None:
        raise UserError(f"--checkpoint: found {checkpoint} together with a recipe; expected a run's folder (RUN)")
    recipe = load_recipe(target if run is None else run / RECIPE, overrides)
    if recipe.method.uses_utilities and recipe.utility.estimator != "jvp":
        raise UserError(
            "utility.estimator: found finite_difference; expected jvp: scores are exact derivatives, by forward-mode "
            "differentiation. Add utility.estimator=jvp utility.epsilon=null"
        )
    path_of_set = _parse_sets(sets)
    if not path_of_set and recipe.data.probe_path is not None:
        path_of_set = {ONLY_SET: recipe.data.probe_path}
    if not path_of_set:
        raise UserError(
            "data.probe_path: found null; expected a trusted set: traces that are known to be right, a few are enough. "
            "Add data.probe_path=PATH, or --set NAME=PATH for each of several sets"
        )
    if output is None:
        output = Path("runs", "scores", Path(target).name.removesuffix(".yaml") if run is None else run.resolve().name)
    refuse_existing(output, NEW_FOLDER)
    checkpoints = [] if run is None else _select_checkpoints(run, checkpoint)
    selected = run is not None and recipe.data.keep is not None
    approximates = any(word.partition("=")[0] == "probe.rank" for word in overrides)
    scoring_recipe = _scoring_recipe(recipe, run, approximates=approximates)
    return ScoreInputs(scoring_recipe, path_of_set, checkpoints, output, again, selected, all_tokens)


def _parse_sets(words: Sequence[str]) -> dict[str, str]:
    path_of_set: dict[str, str] = {}
    for word in words:
        match = _SET.fullmatch(word)
        if match is None or match[1] in path_of_set:
            raise UserError(
                f"--set: found {word}; expected NAME=PATH, with a unique NAME of at most 64 letters, digits and _"
            )
        path_of_set[match[1]] = match[2]
    return path_of_set


def _scoring_recipe(recipe: Recipe, run: Path | None, *, approximates: bool) -> Recipe:
    """The recipe, changed to take directions of complete trusted sets, whatever its method. What scoring does not use
    gets a fixed value, because the recipe is part of the inputs' identity (`describe_inputs`). `approximates`:
    whether to keep `probe.rank`, which a training accepts for its speed; scores are exact unless asked."""
    has_moments = run is not None and recipe.probe.direction != "sgd"
    probe = {"batch_size": "all", "every": 1} | ({} if approximates else {"rank": None, "rank_passes": 1})
    unused = ("reference_log_probabilities", "token_weights", "keep", "validation_path")
    data = {"trusted_share": 0.0, "trusted_overlap": "drop", **dict.fromkeys(unused)}
    changes = {
        "method": sections.MethodConfig(name="vcore", kl_budget=0.05, normalization=recipe.method.normalization),
        "utility": sections.UtilityConfig(micro_batch_size_per_rank=recipe.utility.micro_batch_size_per_rank),
        # Clipping scales all utilities alike. The optimizer's Jacobian needs it: moments are of clipped gradients.
        "probe": recipe.probe.model_copy(update=probe if has_moments else probe | {"direction": "sgd", "clip": None}),
        "data": recipe.data.model_copy(update=data),
        "schedule": sections.ScheduleConfig(num_steps=1),
        "run": sections.RunConfig(output_dir=recipe.run.output_dir if run is None else str(run), seed=recipe.run.seed),
        "track": sections.TrackConfig(),
        "checkpoint": sections.CheckpointConfig(),
    }
    if not has_moments:  # AdamW's unused moments would take two thirds of the optimizer's memory
        changes["optimizer"] = sections.OptimizerConfig(name="sgd", learning_rate=1.0)
    return recipe.model_copy(update=changes)


def _select_checkpoints(run: Path, name: str | None) -> list[ScoredCheckpoint]:
    """The named checkpoint, all of them, or the newest (None), with their weights in the sum. Raises UserError if there
    is no such checkpoint."""
    with reading("RUN", run, "the folder of a run"):
        complete = {
            folder.name: (step, checkpoint_folder.read_digest(folder))
            for folder in reversed(checkpoint_folder.list_checkpoints(run / "checkpoints"))
            if (folder / checkpoint_folder.COMPLETE).is_file()
            and (step := checkpoint_folder.parse_step(folder)) is not None
        }
    if not complete or name not in (None, "all", *complete):
        names = ", ".join(complete) or "no finished one"
        raise UserError(f"--checkpoint: {run / 'checkpoints'}: expected {name or 'a checkpoint'}; found {names}")
    if name != "all":
        step, digest = complete[name] if name is not None else max(complete.values())
        return [ScoredCheckpoint(str(run), step, 1.0, digest)]
    rates = {int(line["step"] or 0): line["learning_rate"] or 0.0 for line in read_run_metrics(run)}
    checkpoints, previous = [], 0
    for step, digest in complete.values():
        steps = range(previous + 1, step + 1)
        if missing := [k for k in steps if k not in rates]:
            raise UserError(
                f"RUN: {run}: found no learning rate of step {missing[0]} in metrics.jsonl; expected one for each step "
                "up to the last checkpoint, to weight the checkpoints. Name one of them with --checkpoint"
            )
        checkpoints.append(ScoredCheckpoint(str(run), step, sum(rates[k] for k in steps) / len(steps), digest))
        previous = step
    return checkpoints


BY_DIGEST = frozenset(
    {"model.path", "data.train_path", "data.probe_path", "data.cache_dir", "run.output_dir", "engine.deepspeed_config"}
)
"""Keys of files, which are compared by content."""
WITHOUT_EFFECT = {f"model.{key}" for key in ("gradient_checkpointing", "activation_offload")} | {
    f"engine.{key}" for key in ("memory_check", "timeout_minutes", "lost_rank_seconds")
}
"""Keys that may differ when a scoring is resumed, such as after a rank ran out of memory: they change no number."""


def describe_inputs(
    recipe: Recipe,
    description: Scores,
    deepspeed_config: Mapping[str, Any],
    passes: Sequence[tuple[str, TokenStore, ScoredCheckpoint | None]],
) -> dict[str, Any]:
    """The identity of a scoring, for JSON: all that its losses and utilities depend on. Unfinished work is resumed only
    for the same identity. It includes every key of the recipe except those above, so that no new key can be forgotten.
    `passes`: name and data of the trusted set, and the checkpoint, in the order of the passes' numbers."""
    data = description.data
    return {
        "version": description.version,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "model": description.model_digest,
        "data": {"digest": data.digest, "tokenizer": data.tokenizer_hash, "chat_template": data.chat_template_hash},
        "recipe": {k: v for k, v in flat_values(recipe).items() if k not in BY_DIGEST | WITHOUT_EFFECT},
        # Neither ZeRO-3's settings (offload, bucket sizes) nor the number of ranks changes a result.
        "deepspeed": {k: v for k, v in deepspeed_config.items() if k not in ("zero_optimization", "train_batch_size")},
        "passes": [
            {"set": name, "digest": trusted.digest}
            | ({} if checkpoint is None else {"step": checkpoint.step, "checkpoint": checkpoint.digest})
            for name, trusted, checkpoint in passes
        ],
    }
