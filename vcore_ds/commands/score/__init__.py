"""`vcore-ds score`: the influence of each training trace on a target set of trusted traces."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcore_ds.commands.arguments import add_again, add_overrides
from vcore_ds.common.errors import UserError
from vcore_ds.common.imports import lasting_imports
from vcore_ds.common.paths import reading, refuse_existing
from vcore_ds.config import sections
from vcore_ds.config.exports import ADAPTER_CONFIG
from vcore_ds.config.load import SHIPPED_RECIPES, load_recipe, make_override
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.schema import Recipe
from vcore_ds.data.prepare.sources import check_inputs, check_source
from vcore_ds.training import checkpoint_folder
from vcore_ds.training.run_folder import RECIPE, read_run_metrics

if TYPE_CHECKING:
    from vcore_ds.data.scores_folder import ScoredCheckpoint

HELP = "score training traces by their influence on a target set"
DESCRIPTION = (
    "Compute the influence of each training trace (--data, or a recipe's data.train_path) on a set of trusted traces "
    "(the target or validation set of LESS; --set, or data.probe_path). A trace's utility is the derivative of its "
    "loss along the gradient of the set's loss, positive where learning the trace lowers the set's loss. Utilities are "
    "exact and cost one forward-mode (JVP) pass over the data per set, with no backward over the data and no stored "
    "gradients. Writes a table of all traces, the tokens of the best and the worst, and a page. The same command "
    "resumes a stopped scoring. Runs as one process, or under a launcher as one process per rank. Example: vcore-ds "
    "score MODEL --data pool.jsonl --set good=trusted.jsonl"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    target = "a model, with --data; a recipe, to score with its base model; or a run, with its checkpoint"
    add("target", metavar="MODEL | RECIPE | RUN", help=target)
    data = "traces to score: files, folder or token store (default: those of the RECIPE or RUN)"
    add("--data", metavar="PATH", help=data)
    add_overrides(parser)
    sets = "a named trusted set instead of data.probe_path; repeat it for several: each adds a pass over the data"
    add("--set", dest="sets", action="append", default=[], metavar="NAME=PATH", help=sets)
    checkpoint = (
        "for a RUN: a checkpoint such as step_00000100, or `all`: the sum over all, each weighted by the mean learning "
        "rate of the steps since the one before, as TracInCP (default: the newest)"
    )
    add("--checkpoint", metavar="NAME", help=checkpoint)
    add("--output", type=Path, metavar="DIR", help="new folder (default runs/scores/NAME, of the recipe or the run)")
    tokens = (
        "write utilities of the tokens of the best and worst traces, or of all, for `keep --weights` (default shown)"
    )
    add("--tokens", choices=["shown", "all"], default="shown", help=tokens)
    add_again(parser)


NEW_FOLDER = "a new folder that can be written"
_ONLY_SET = "trusted"  # name of the set at data.probe_path
_SET = re.compile(r"(\w{1,64})=(.+)")


def main(arguments: argparse.Namespace) -> None:
    inputs = read_inputs(
        arguments.target,
        arguments.overrides,
        arguments.sets,
        arguments.checkpoint,
        arguments.output,
        data=arguments.data,
        again=arguments.again,
        all_tokens=arguments.tokens == "all",
    )
    check_inputs(inputs.recipe.model.path, inputs.recipe.data)
    for path in inputs.sets.values():
        check_source(path, inputs.recipe.data.split)
    with lasting_imports():
        from vcore_ds.commands.score.compute import score

    score(inputs)


@dataclass(frozen=True)
class ScoreInputs:
    """The data, weights and directions to score with."""

    recipe: Recipe  # `run.output_dir` is the run's present folder
    sets: dict[str, str]
    checkpoints: "list[ScoredCheckpoint]"  # in ascending order of steps; empty for the base model
    output: Path
    again: bool = False
    all_tokens: bool = False  # write the utilities of all tokens, not only of the best and worst traces'
    adapter: str | None = None  # folder of the adapter that is scored, or from which the run began


def read_inputs(
    target: str,
    overrides: Sequence[str],
    sets: Sequence[str],
    checkpoint: str | None,
    output: Path | None,
    data: str | None = None,
    again: bool = False,
    all_tokens: bool = False,
) -> ScoreInputs:
    """Check the command's arguments, and read what they name, before torch is imported. Raises UserError where the
    recipe, the run, the checkpoint, a set or the output cannot be used. `data`: traces to score where `target` is a
    model."""
    run = Path(target) if (Path(target) / RECIPE).is_file() else None
    if run is None and data is None and Path(target).is_dir():
        raise UserError(
            f"{target}: found no {RECIPE} there; expected a recipe, a run's folder (run.output_dir), or a model's with "
            "--data PATH"
        )
    if run is None and checkpoint is not None:
        raise UserError(f"--checkpoint: found {checkpoint} without a run; expected a run's folder (RUN)")
    if data is None:
        recipe = load_recipe(target if run is None else run / RECIPE, overrides)
    elif run is not None or target.endswith(".yaml"):
        words = [*overrides, make_override("data.train_path", data)]
        recipe = load_recipe(target if run is None else run / RECIPE, words)
    else:
        key = "lora.adapter" if (Path(target) / ADAPTER_CONFIG).is_file() else "model.path"
        words = [make_override(key, target), make_override("data.train_path", data)]
        recipe = load_recipe(SHIPPED_RECIPES / "parts" / "scoring.yaml", [*words, *overrides])
    path_of_set: dict[str, str] = {}
    for word in sets:
        match = _SET.fullmatch(word)
        if match is None or match[1] in path_of_set:
            raise UserError(
                f"--set: found {word}; expected NAME=PATH, with a unique NAME of at most 64 letters, digits and _"
            )
        path_of_set[match[1]] = match[2]
    if not path_of_set:
        if recipe.data.probe_path is None:
            raise UserError(
                "data.probe_path: found null; expected a trusted set: traces that are known to be right, a few are "
                "enough. Add data.probe_path=PATH, or --set NAME=PATH for each of several sets"
            )
        path_of_set = {_ONLY_SET: recipe.data.probe_path}
    if output is None:
        output = Path("runs", "scores", (run or Path(target)).resolve().name.removesuffix(".yaml"))
    refuse_existing(output, NEW_FOLDER)
    approximates = any(word.partition("=")[0] == "probe.rank" for word in overrides)
    scoring_recipe = _scoring_recipe(recipe, run, approximates=approximates)
    checkpoints = [] if run is None else _select_checkpoints(run, checkpoint)
    adapter = recipe.lora.adapter if recipe.lora else None
    return ScoreInputs(scoring_recipe, path_of_set, checkpoints, output, again, all_tokens, adapter)


def _scoring_recipe(recipe: Recipe, run: Path | None, *, approximates: bool) -> Recipe:
    """The recipe, changed to take directions of complete trusted sets, whatever its method. What scoring does not use
    gets a fixed value, because the recipe is part of the inputs' identity (`describe_inputs`). `approximates`:
    whether to keep `probe.rank`, which a training accepts for its speed; scores are exact unless asked."""
    has_moments = run is not None and recipe.probe.direction != "sgd"
    probe = {"batch_size": "all", "every": 1} | ({} if approximates else {"rank": None, "rank_passes": 1})
    unused = ("reference_log_probabilities", "token_weights", "keep", "validation_path", "validation_share")
    data = {"trusted_share": 0.0, "trusted_overlap": "drop", **dict.fromkeys(unused)}
    changes: dict[str, Any] = {
        "method": MethodConfig(name="vcore", kl_budget=0.05, normalization=recipe.method.normalization),
        "utility": sections.UtilityConfig(micro_batch_size_per_rank=recipe.utility.micro_batch_size_per_rank),
        # Clipping scales all utilities alike. The optimizer's Jacobian needs it: moments are of clipped gradients.
        "probe": recipe.probe.model_copy(update=probe if has_moments else probe | {"direction": "sgd", "clip": None}),
        "data": recipe.data.model_copy(update=data),
        # A checkpoint has its adapter, and needs no longer the one that the run began from.
        "lora": recipe.lora and recipe.lora.model_copy(update={} if run is None else {"adapter": None}),
        "schedule": sections.ScheduleConfig(num_steps=1),
        "run": sections.RunConfig(output_dir=recipe.run.output_dir if run is None else str(run), seed=recipe.run.seed),
        "track": sections.TrackConfig(),
        "checkpoint": sections.CheckpointConfig(),
    }
    if not has_moments:  # AdamW's unused moments would take two thirds of the optimizer's memory
        changes["optimizer"] = sections.OptimizerConfig(name="sgd", learning_rate=1.0)
    return recipe.model_copy(update=changes)


def _select_checkpoints(run: Path, name: str | None) -> "list[ScoredCheckpoint]":
    """The named checkpoint, all of them, or the newest (None), with their weights in the sum. Raises UserError if there
    is no such checkpoint."""
    from vcore_ds.data.scores_folder import ScoredCheckpoint  # imports numpy

    with reading("RUN", run, "the folder of a run"):
        complete = {
            folder.name: (checkpoint_folder.parse_step(folder) or 0, checkpoint_folder.read_digest(folder))
            for folder in reversed(checkpoint_folder.list_complete(run / "checkpoints"))
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
