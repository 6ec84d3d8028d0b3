"""`vcore-ds check`: a recipe, resolved and validated, without a GPU."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vcore_ds.commands.arguments import add_recipe, positive
from vcore_ds.config import (
    BatchPlan,
    Recipe,
    deepspeed_config,
    describe_memory,
    dump_recipe,
    load_recipe,
    plan_batch,
    plan_memory,
)
from vcore_ds.files.run_folder import can_resume, check_output_folder
from vcore_ds.planning import QWEN3_32B, SIMULATED_MEAN, shape_on_disk

HELP = "validate a recipe without a GPU"
DESCRIPTION = (
    "Resolve and validate a recipe; print it with all its defaults, and how its batch is spread over the ranks. Needs "
    "no GPU, model or data, and writes nothing: how well the ranks are used is calculated for simulated lengths."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--ranks",
        type=positive,
        default=1,
        metavar="N",
        help="spread the batch over N ranks: the GPUs of the run, over all nodes of 8 (default 1)",
    )


def main(arguments: argparse.Namespace) -> None:
    """Raises UserError for impossible arithmetic, a contradiction with the DeepSpeed JSON, or an output folder that is
    used or cannot be written."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    plan = plan_batch(recipe, arguments.ranks, shape_on_disk(recipe.model.path) or replace(QWEN3_32B, is_assumed=True))
    ds_config = deepspeed_config(recipe, plan)
    can_resume(recipe)
    check_output_folder(recipe)
    print(
        f"{dump_recipe(recipe).rstrip()}\n\nBatch: {plan.describe()}",
        *describe_ranks(recipe, plan, ds_config),
        sep="\n",
    )


def describe_ranks(recipe: Recipe, plan: BatchPlan, ds_config: dict[str, Any]) -> Iterator[str]:
    """Lines on how well the ranks are used, what would use them better, and how much memory each needs."""
    longest = recipe.data.cutoff_length
    if recipe.parallel.tensor > 1:
        yield (
            f"Layers: {recipe.parallel.tensor} ranks share each, so the ranks below are groups of as many. That makes "
            "larger models and longer rows fit; it is no faster than ZeRO-3 over all ranks (docs/megatron.md)"
        )
    found = plan.simulate(longest)
    for part, utilization in found.items():
        yield f"Ranks in the {part} batch: {utilization.describe()}"
        if utilization.is_low:
            yield f"Warning: {plan.warning(part)}"
    if plan.longest_sequence is not None:
        share = f"{plan.main_degrees[-1]} ranks" if plan.main_degrees[-1] > 1 else "one rank"
        yield f"Longest sequence that fits: {plan.longest_sequence:,} tokens, on {share}"
    memory = plan_memory(recipe, plan, ds_config, found)
    if memory is not None:
        yield describe_memory(memory)
    if found:
        yield (
            f"Assumed: lengths as of reasoning traces (lognormal, mean {SIMULATED_MEAN:,} tokens, cut at {longest:,}), "
            "8 GPUs a node; a run says the same of its own data"
        )
    if plan.time_model.shape.is_assumed:
        yield f"Assumed: the layers and heads of Qwen3-32B, since {recipe.model.path} is not on this machine"
