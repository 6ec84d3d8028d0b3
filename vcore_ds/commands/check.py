"""`vcore-ds check`: resolve and validate a recipe without a GPU."""

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
    "Resolve and validate a recipe; print it with all defaults, and how its batch is divided among the ranks. Needs no "
    "GPU, model or data, and writes nothing: load balance is estimated with simulated sequence lengths. If the model "
    "is on this machine, its configuration is checked too, which takes seconds. Example: vcore-ds check "
    "qwen3_8b_math_lora.yaml batch.global_size=16 --ranks 8 --gpu H100"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--ranks",
        type=positive,
        metavar="N",
        help="number of ranks, one per GPU, over all nodes of 8 GPUs (default: parallel.tensor * parallel.expert, "
        "usually 1)",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"also estimate memory and time on this kind of GPU, and fail if the run does not fit: {', '.join(GPUS)}",
    )


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError where training would refuse the recipe: batch arithmetic, a contradiction with the DeepSpeed
    JSON, the model's configuration, an output folder in use or not writable; and with --gpu if it does not fit."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    settings = derive_plan_settings(recipe)
    if is_on_disk(recipe.model.path):
        from vcore_ds.train.model_check import check_configuration  # imports torch and transformers: seconds

        check_configuration(settings)
    arguments.ranks = arguments.ranks or recipe.parallel.tensor * recipe.parallel.expert
    plan = plan_batch(settings, arguments.ranks, shape_or_assumed(recipe.model.path))
    ds_config = deepspeed_config(settings, plan)
    can_resume(recipe)
    check_output_folder(Path(recipe.run.output_dir))
    print(
        f"{dump_recipe(recipe).rstrip()}\n\nBatch: {plan.describe()}",
        *describe_kept(recipe),
        *describe_trusted(recipe),
        *describe_ranks(recipe, plan, ds_config),
        *describe_rows(recipe),
        *describe_missing(recipe),
        sep="\n",
    )
    if arguments.gpu is not None:
        print(plan_on(arguments, recipe))


def plan_on(arguments: argparse.Namespace, recipe: Recipe) -> str:
    """The line on memory and time on the GPUs of --gpu.

    Raises UserError for a run that does not fit, with the cheapest changes that make it fit; not with
    `engine.memory_check: false`.
    """
    shape, _ = find_model(recipe.model.path)
    plan = plan_run(derive_plan_settings(recipe), Cluster(named_gpu(arguments.gpu), arguments.ranks), shape)
    if plan.fits or not recipe.engine.memory_check:
        return describe_plan(plan)

    def reload(extra: Sequence[str]) -> PlanSettings:
        return derive_plan_settings(load_recipe(arguments.recipe, [*arguments.overrides, *extra]))

    raise UserError(describe_refusal(plan, cheapest_ways(plan, reload)))


def describe_kept(recipe: Recipe) -> Iterator[str]:
    """A line on the traces that `data.keep` selects, where their scores are on this machine."""
    if recipe.data.keep is None:
        return
    from vcore_ds.train.selection import read_selection_on_disk  # imports torch: seconds
    from vcore_ds.train.settings import derive_schedule

    selection = read_selection_on_disk(recipe.data.keep)
    if selection is not None:
        steps = derive_schedule(recipe, len(selection.positions)).num_steps
        yield f"Training data: {selection.describe()}; the run takes {steps:,} steps"


def describe_trusted(recipe: Recipe) -> Iterator[str]:
    """A line on training traces that are trusted data too, where both are on this machine and quickly read."""
    data = recipe.data
    if data.probe_path is None:
        return
    from vcore_ds.data.overlap import count_shared_on_disk  # imports torch: seconds

    number = count_shared_on_disk([file.path for file in data.train_files()], data.probe_path)
    if number:
        does = "leaves out" if data.trusted_overlap == "drop" else "trains on"
        yield (
            f"Trusted data: {number:,} of the training traces are in data.probe_path too, which the run {does} "
            f"(data.trusted_overlap: {data.trusted_overlap})"
        )


def describe_rows(recipe: Recipe) -> Iterator[str]:
    """Lines on how the rows of data on this machine are read, or were when their token store was made."""
    for key, path in recipe.data.paths().items():
        if key.startswith(("keep.", "reference")) or not is_readable(path):
            continue
        from vcore_ds.data.prepare import summary  # reads files: not where there are none

        try:
            lines = summary.describe_reading(path)
        except UserError as error:  # the run reports it, too
            lines = [str(error)]
        yield from (f"Data: {line}" for line in lines)


def describe_missing(recipe: Recipe) -> Iterator[str]:
    """A line on data paths that are not on this machine: a typo, or data that only the cluster has."""
    missing = [f"data.{key} {path}" for key, path in recipe.data.paths().items() if not is_readable(path)]
    if missing:
        yield f"Not on this machine, but needed where the recipe runs: {', '.join(missing)}"


def describe_ranks(recipe: Recipe, plan: BatchPlan, ds_config: dict[str, Any]) -> Iterator[str]:
    """Lines on load balance, how to improve it, and the memory of a rank."""
    longest = recipe.data.cutoff_length
    if recipe.parallel.tensor > 1:
        yield (
            f"Tensor parallelism: groups of {recipe.parallel.tensor} ranks, which compute on the same packs. Larger "
            "models and longer packs fit; it is no faster than ZeRO-3 over all ranks (docs/megatron.md)"
        )
    if recipe.parallel.expert > 1:
        yield (
            f"Expert parallelism: groups of {recipe.parallel.expert} ranks, which divide the experts of each layer and "
            "exchange tokens by all-to-all (docs/parallelism.md)"
        )
    utilizations, member = plan.simulate(longest), plan.member
    for part, utilization in utilizations.items():
        yield f"Balance of the {part} batch: {utilization.describe(member)}"
        if utilization.is_low:
            yield f"Warning: {plan.warning(part)}"
    if plan.longest_sequence is not None:
        members = f"{plan.main_degrees[-1]} {member}s" if plan.main_degrees[-1] > 1 else f"one {member}"
        yield f"Longest sequence that fits: {plan.longest_sequence:,} tokens, on {members}"
    memory = plan_memory(derive_plan_settings(recipe), plan, ds_config, utilizations)
    if memory is not None:
        yield describe_memory(memory)
    if utilizations:
        yield (
            f"Assumed: lengths of typical reasoning traces (lognormal, mean {SIMULATED_MEAN:,} tokens, cut at "
            f"{longest:,}) and 8 GPUs per node; a run prints these lines for its data"
        )
    if shape_on_disk(recipe.model.path) is None:
        name = known_model(recipe.model.path) or "Qwen3-32B"
        yield f"Assumed: the layers and heads of {name}, since {recipe.model.path} is not on this machine"
