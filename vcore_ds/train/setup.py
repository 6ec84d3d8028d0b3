"""What commands share: from a recipe the ranks' batches, the engine and the estimator."""

from functools import partial
from typing import TYPE_CHECKING

import torch

from vcore_ds.config.schema import Recipe
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device, num_local_ranks, total_memory_bytes
from vcore_ds.distributed.process_group import first_rank_first, start_process_group
from vcore_ds.engine.flat_shards import unsharded_gradient_bytes
from vcore_ds.engine.loading import load_sharded
from vcore_ds.engine.parallel_weights import partition_experts
from vcore_ds.engine.zero3 import Engine, build_optimizer
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.configuration import read_model_shape
from vcore_ds.models.loading import DTYPES
from vcore_ds.models.lora import add_lora
from vcore_ds.planning.batch_plan import BatchPlan, plan_batch
from vcore_ds.planning.run_plan import COALESCING_SHARE
from vcore_ds.planning.time_model import CPU, H100
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import Estimator, ForwardMode, NoUtilities, why_not_fused
from vcore_ds.utility.finite_difference import FiniteDifference

if TYPE_CHECKING:
    from vcore_ds.models.megatron.model import ParallelTokenLossModel


def start_ranks(recipe: Recipe) -> None:
    """Joins the process group with the recipe's degrees and time limit. A collective.

    Raises:
        UserError: as `start_process_group` does.
    """
    start_process_group(recipe.engine.timeout_minutes, recipe.parallel.tensor, recipe.parallel.expert)


def plan_ranks(recipe: Recipe) -> BatchPlan:
    """How the recipe's batches are spread over the ranks of this job, with the groups that this needs. A collective.

    Raises UserError where a rank cannot read the model's configuration, and RecipeError as `plan_batch` does, on all
    ranks alike.
    """
    shape = first_rank_first(lambda: read_model_shape(recipe.model.path))
    # The first rank's: where nodes differ, all ranks still have to come to the same spread.
    shape, ranks_per_node = layout.gather_objects("job", (shape, num_local_ranks()))[0]
    plan = plan_batch(
        recipe,
        layout.size("job"),
        shape,
        ranks_per_node=ranks_per_node,
        machine=CPU if device().type == "cpu" else H100,
    )
    layout.make_sequence_groups(plan.degrees)
    return plan


def build_engine(recipe: Recipe, ds_config: dict) -> Engine:
    """Model, adapters, optimizer and ZeRO-3, from the recipe. A collective."""
    # The same on every rank: adapters are initialised before they are sharded.
    torch.manual_seed(recipe.run.seed)
    model = load_model(recipe, ds_config)
    partition_experts(model)
    model.train()
    return Engine(
        model,
        build_optimizer(model, recipe.optimizer),
        ds_config,
        coalesce_gradient_reduction=coalesces(recipe, model),
    )


def load_model(recipe: Recipe, ds_config: dict) -> "TokenLossModel | ParallelTokenLossModel":
    """The model that gives token losses, sharded, with the recipe's adapters. A collective."""
    of_model, lora, say = recipe.model, recipe.lora, partial(print, flush=True)
    if of_model.provider == "megatron":
        from vcore_ds.engine.parallel_weights import load_parallel  # here alone: megatron-core takes seconds to import

        model = load_parallel(
            of_model.path,
            ds_config,
            dtype=_dtype(recipe),
            gradient_checkpointing=of_model.gradient_checkpointing,
            activation_offload=of_model.activation_offload,
            say=say,
        )
        if lora is not None:
            model.add_lora(of_model.path, lora)
        return model
    base = load_sharded(
        of_model.path,
        ds_config,
        dtype=_dtype(recipe),
        attention=of_model.attention,
        gradient_checkpointing=of_model.gradient_checkpointing,
        say=say,
    )
    return TokenLossModel(
        base if lora is None else add_lora(base, lora), activation_offload=of_model.activation_offload
    )


def _dtype(recipe: Recipe) -> torch.dtype:
    return DTYPES[recipe.model.precision]


def coalesces(recipe: Recipe, model: torch.nn.Module) -> bool:
    """Whether gradients are reduced once a step. A collective: ranks whose memory differs come to the same answer."""
    if recipe.engine.coalesce_gradient_reduction != "auto":
        return recipe.engine.coalesce_gradient_reduction
    room = COALESCING_SHARE * min(layout.gather_objects("job", total_memory_bytes()))
    return unsharded_gradient_bytes(p for p in model.parameters() if p.requires_grad) <= room


def build_estimator(recipe: Recipe, engine: Engine, *, batches_per_pass: int = 1) -> Estimator:
    """What gives the step losses and utilities, with a probe direction of its own.

    Args:
        batches_per_pass: main micro-batches in one gradient-free forward (`BatchPlan.batches_per_utility_pass`).
    """
    if not recipe.method.uses_utilities:
        return NoUtilities(engine)
    direction = Direction(engine, recipe.probe.rank)
    if recipe.utility.estimator == "jvp":
        is_fused = recipe.utility.fused is not False and why_separate(recipe, engine) is None
        return ForwardMode(engine, direction, batches_per_pass, fused=is_fused)
    assert recipe.utility.epsilon is not None  # the recipe's rules
    return FiniteDifference(
        engine, direction, batches_per_pass, epsilon=recipe.utility.epsilon, rounding=recipe.utility.rounding
    )


def why_separate(recipe: Recipe, engine: Engine) -> str | None:
    """Why the utilities of `jvp` take a forward of their own; None where the main forward can give them."""
    if recipe.method.weights_sequences:
        return "the weights of whole sequences need all utilities before the first backward"
    return why_not_fused(engine)
