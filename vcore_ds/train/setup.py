"""What commands share: from a recipe its engine, estimator, number of steps, and the settings of each step."""

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from vcore_ds.config.schema import Recipe
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device, total_memory_bytes
from vcore_ds.distributed.launcher import num_local_ranks
from vcore_ds.distributed.process_group import first_rank_first
from vcore_ds.engine.gradient_sum import unsharded_gradient_bytes
from vcore_ds.engine.loading import load_sharded
from vcore_ds.engine.optimizer import build_optimizer
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.configuration import check_forward_mode, model_shape, read_config
from vcore_ds.models.folder_check import check_model_folder
from vcore_ds.models.loading import DTYPES
from vcore_ds.models.lora import add_lora
from vcore_ds.planning.batch_plan import BatchPlan, num_trusted, plan_batch
from vcore_ds.planning.run_plan import COALESCING_SHARE
from vcore_ds.planning.time_model import CPU, H100
from vcore_ds.random_streams import Stream, torch_seed
from vcore_ds.train.weighting import has_batch_scope
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import Estimator, ForwardMode, NoUtilities, why_not_fused
from vcore_ds.utility.finite_difference import FiniteDifference

if TYPE_CHECKING:
    from vcore_ds.models.megatron.model import ParallelTokenLossModel

MEASURE_NOISE_EVERY = 100
"""Optimizer steps between two measurements of a finite difference's noise (and searches for `epsilon: auto`)."""


def check_model(recipe: Recipe) -> None:
    """Raises UserError where the model's folder cannot serve the recipe; cheap, no weights are read."""
    check_model_folder(recipe.model.path)
    if recipe.model.provider == "megatron":
        from vcore_ds.models.megatron.adapters import adapted_layers
        from vcore_ds.models.megatron.configuration import transformer_config

        config = read_config(recipe.model.path)
        transformer_config(recipe.model.path, config, tensor=recipe.parallel.tensor, dtype=_dtype(recipe))
        if recipe.lora is not None:
            adapted_layers(recipe.model.path, config, recipe.lora)
    if recipe.method.name == "vcore" and recipe.utility.estimator == "jvp":
        check_forward_mode(recipe.model.path)


def plan_ranks(recipe: Recipe) -> BatchPlan:
    """How the recipe's batches are spread over the ranks of this job, with the groups that this needs. A collective.

    Raises UserError where a rank cannot read the model's configuration, and RecipeError as `plan_batch` does, on all
    ranks alike.
    """
    shape = first_rank_first(lambda: model_shape(recipe.model.path))
    # The first rank's: where nodes differ, all ranks still have to come to the same spread.
    shape, ranks_per_node = layout.gather_objects("job", (shape, num_local_ranks()))[0]
    plan = plan_batch(
        recipe,
        layout.size("job"),
        shape,
        ranks_per_node=ranks_per_node,
        machine=CPU if device().type == "cpu" else H100,
    )
    layout.make_sequence_groups(plan.degrees, recipe.engine.timeout_minutes)
    return plan


def build_engine(recipe: Recipe, ds_config: dict) -> Engine:
    """Model, adapters, optimizer and ZeRO-3, from the recipe. A collective."""
    # The same on every rank: adapters are initialised before they are sharded.
    torch.manual_seed(recipe.run.seed)
    model: TokenLossModel | ParallelTokenLossModel
    model = _load_parallel(recipe, ds_config) if recipe.model.provider == "megatron" else _load(recipe, ds_config)
    model.train()
    return Engine(
        model,
        build_optimizer(model, recipe.optimizer),
        ds_config,
        coalesce_gradient_reduction=coalesces(recipe, model),
    )


def _load(recipe: Recipe, ds_config: dict) -> TokenLossModel:
    base = load_sharded(
        recipe.model.path,
        ds_config,
        dtype=_dtype(recipe),
        attention=recipe.model.attention,
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        say=partial(print, flush=True),
    )
    causal_lm = base if recipe.lora is None else add_lora(base, recipe.lora)
    return TokenLossModel(causal_lm, activation_offload=recipe.model.activation_offload)


def _load_parallel(recipe: Recipe, ds_config: dict) -> "ParallelTokenLossModel":
    from vcore_ds.engine.parallel_weights import load_parallel  # here alone: megatron-core takes seconds to import

    model = load_parallel(
        recipe.model.path,
        ds_config,
        dtype=_dtype(recipe),
        gradient_checkpointing=recipe.model.gradient_checkpointing,
        activation_offload=recipe.model.activation_offload,
        say=partial(print, flush=True),
    )
    if recipe.lora is not None:
        model.add_lora(recipe.model.path, recipe.lora)
    return model


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
    if recipe.method.name != "vcore":
        return NoUtilities(engine)
    direction = Direction(engine)
    if recipe.utility.estimator == "jvp":
        is_fused = recipe.utility.fused is not False and why_separate(recipe, engine) is None
        return ForwardMode(engine, direction, batches_per_pass, fused=is_fused)
    assert recipe.utility.epsilon is not None  # the recipe's rules
    return FiniteDifference(
        engine, direction, batches_per_pass, epsilon=recipe.utility.epsilon, rounding=recipe.utility.rounding
    )


def why_separate(recipe: Recipe, engine: Engine) -> str | None:
    """Why the utilities of `jvp` take a forward of their own; None where the main forward can give them."""
    if has_batch_scope(recipe.method):
        return "the weights of whole sequences need all utilities before the first backward"
    return why_not_fused(engine)


def count_steps(recipe: Recipe, num_sequences: int) -> int:
    """Optimizer steps of the run; an epoch that ends within a step is rounded up to whole steps."""
    if recipe.schedule.num_steps is not None:
        return recipe.schedule.num_steps
    assert recipe.schedule.num_epochs is not None  # the recipe's rules
    per_step = recipe.batch.global_size - num_trusted(recipe)
    return max(1, math.ceil(recipe.schedule.num_epochs * num_sequences / per_step))


def learning_rate_at(recipe: Recipe, k: int, num_steps: int) -> float:
    """Learning rate of optimizer step k, from 0: linear warm-up that reaches the peak, then half a cosine to 0 (or
    constant)."""
    peak = recipe.optimizer.learning_rate
    num_warmup_steps = math.ceil(recipe.schedule.warmup_ratio * num_steps)
    if k < num_warmup_steps:
        return peak * (k + 1) / num_warmup_steps
    if recipe.schedule.kind == "constant":
        return peak
    progress = (k - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def measures_noise(recipe: Recipe, k: int) -> bool:
    """Whether optimizer step k, from 0, measures its finite difference's noise."""
    uses_difference = recipe.method.name == "vcore" and recipe.utility.estimator == "finite_difference"
    return uses_difference and k % MEASURE_NOISE_EVERY == 0


def step_seed(recipe: Recipe, k: int) -> int:
    """Seed of all that optimizer step k, from 0, draws at random. A function of run and step, so that resuming needs no
    generator's state."""
    return torch_seed(Stream.STOCHASTIC_ROUNDING, recipe.run.seed, k)
