"""`vcore-ds check`: a recipe, resolved and validated, without a GPU."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vcore_ds.commands.arguments import add_recipe, positive
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import is_readable
from vcore_ds.config.load import dump_recipe, load_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.batch_plan import BatchPlan, plan_batch
from vcore_ds.planning.deepspeed_json import deepspeed_config
from vcore_ds.planning.hardware import GPUS, Cluster
from vcore_ds.planning.known_models import known_model
from vcore_ds.planning.memory_plan import describe_memory, plan_memory
from vcore_ds.planning.model_shape import is_on_disk, shape_on_disk
from vcore_ds.planning.run_plan import (
    cheapest_ways,
    describe_plan,
    describe_refusal,
    find_model,
    named_gpu,
    plan_run,
    shape_or_assumed,
)
from vcore_ds.planning.settings import PlanSettings, derive_plan_settings
from vcore_ds.planning.spread import SIMULATED_MEAN
from vcore_ds.train.run_folder import can_resume, check_output_folder

HELP = "validate a recipe without a GPU"
DESCRIPTION = (
    "Resolve and validate a recipe; print it with all its defaults, and how its batch is spread over the ranks. Needs "
    "no GPU, model or data, and writes nothing: how well the ranks are used is calculated for simulated lengths. Where "
    "the model is on this machine, what training would refuse in its configuration is said too, which takes seconds."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--ranks",
        type=positive,
        metavar="N",
        help="spread the batch over N ranks: the GPUs of the run, over all nodes of 8 (default: as many as share a "
        "layer, mostly 1)",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"also say what the run costs on this kind of GPU, and refuse one that cannot fit: {', '.join(GPUS)}",
    )


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError for impossible arithmetic, a contradiction with the DeepSpeed JSON, a model that cannot be
    trained so, an output folder that is used or cannot be written, or with --gpu a run that does not fit."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    settings = derive_plan_settings(recipe)
    if is_on_disk(recipe.model.path):
        from vcore_ds.train.model_check import check_configuration  # here alone: torch and transformers take seconds

        check_configuration(settings)
    arguments.ranks = arguments.ranks or recipe.parallel.tensor * recipe.parallel.expert
    plan = plan_batch(settings, arguments.ranks, shape_or_assumed(recipe.model.path))
    ds_config = deepspeed_config(settings, plan)
    can_resume(recipe)
    check_output_folder(Path(recipe.run.output_dir))
    print(
        f"{dump_recipe(recipe).rstrip()}\n\nBatch: {plan.describe()}",
        *describe_kept(recipe),
        *describe_ranks(recipe, plan, ds_config),
        *describe_missing(recipe),
        sep="\n",
    )
    if arguments.gpu is not None:
        print(plan_on(arguments, recipe))


def plan_on(arguments: argparse.Namespace, recipe: Recipe) -> str:
    """The line on what the run costs on its GPUs. Raises UserError for a run that does not fit, with the cheapest
    changes with which it would; unless the recipe does without that check."""
    shape, _ = find_model(recipe.model.path)
    plan = plan_run(derive_plan_settings(recipe), Cluster(named_gpu(arguments.gpu), arguments.ranks), shape)
    if plan.fits or not recipe.engine.memory_check:
        return describe_plan(plan)

    def reload(extra: Sequence[str]) -> PlanSettings:
        return derive_plan_settings(load_recipe(arguments.recipe, [*arguments.overrides, *extra]))

    raise UserError(describe_refusal(plan, cheapest_ways(plan, reload)))


def describe_kept(recipe: Recipe) -> Iterator[str]:
    """A line on the traces that `data.keep` keeps, where their scores are on this machine."""
    if recipe.data.keep is None:
        return
    from vcore_ds.train.selection import read_selection_on_disk  # here alone: torch takes seconds to import
    from vcore_ds.train.settings import derive_schedule

    selection = read_selection_on_disk(recipe.data.keep)
    if selection is not None:
        steps = derive_schedule(recipe, len(selection.positions)).num_steps
        yield f"Training data: {selection.describe()}; the run takes {steps:,} steps"


def describe_missing(recipe: Recipe) -> Iterator[str]:
    """A line on the data that this machine does not have: a typo, or data that only the cluster has."""
    data = recipe.data
    paths = {"train_path": data.train_path, "probe_path": data.probe_path}
    paths["keep.scores"] = None if data.keep is None else data.keep.scores
    paths |= {f"validation_path{name and '.'}{name}": path for name, path in data.validation_paths().items()}
    missing = [f"data.{key} {path}" for key, path in paths.items() if path is not None and not is_readable(path)]
    if missing:
        yield f"Not on this machine, and needed where the recipe runs: {', '.join(missing)}"


def describe_ranks(recipe: Recipe, plan: BatchPlan, ds_config: dict[str, Any]) -> Iterator[str]:
    """Lines on how well the ranks are used, what would use them better, and how much memory each needs."""
    longest = recipe.data.cutoff_length
    if recipe.parallel.tensor > 1:
        yield (
            f"Tensor parallelism: groups of {recipe.parallel.tensor} ranks, which work on the same rows. Larger models "
            "and longer rows fit; it is no faster than ZeRO-3 over all ranks (docs/megatron.md)"
        )
    if recipe.parallel.expert > 1:
        yield (
            f"Expert parallelism: groups of {recipe.parallel.expert} ranks, which divide the experts of every layer "
            "and send each other their tokens (docs/parallelism.md)"
        )
    found, one = plan.simulate(longest), plan.member
    for part, utilization in found.items():
        yield f"Balance of the {part} batch: {utilization.describe(one)}"
        if utilization.is_low:
            yield f"Warning: {plan.warning(part)}"
    if plan.longest_sequence is not None:
        share = f"{plan.main_degrees[-1]} {one}s" if plan.main_degrees[-1] > 1 else f"one {one}"
        yield f"Longest sequence that fits: {plan.longest_sequence:,} tokens, on {share}"
    memory = plan_memory(derive_plan_settings(recipe), plan, ds_config, found)
    if memory is not None:
        yield describe_memory(memory)
    if found:
        yield (
            f"Assumed: lengths as of reasoning traces (lognormal, mean {SIMULATED_MEAN:,} tokens, cut at {longest:,}), "
            "8 GPUs a node; a run says the same of its own data"
        )
    if shape_on_disk(recipe.model.path) is None:
        name = known_model(recipe.model.path) or "Qwen3-32B"
        yield f"Assumed: the layers and heads of {name}, since {recipe.model.path} is not on this machine"
