"""What commands share: from a recipe its engine, estimator, number of steps, and the settings of each step."""

import math
import os

import torch

from vcore_ds.config import BatchPlan, Recipe, plan_batch
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.distributed.process_group import first_rank_first
from vcore_ds.engine import Engine, build_optimizer, sharded_loading
from vcore_ds.models import (
    TokenLossModel,
    add_lora,
    check_forward_mode,
    check_model_folder,
    load_causal_lm,
    model_shape,
)
from vcore_ds.planning import CPU, H100
from vcore_ds.random_streams import Stream, torch_seed
from vcore_ds.utility import Direction, Estimator, FiniteDifference, ForwardMode, NoUtilities, why_not_fused

MEASURE_NOISE_EVERY = 100
"""Optimizer steps between two measurements of a finite difference's noise (and searches for `epsilon: auto`)."""


def check_model(recipe: Recipe) -> None:
    """Raises UserError where the model's folder cannot serve the recipe; cheap, no weights are read."""
    check_model_folder(recipe.model.path)
    if recipe.method.name == "vcore" and recipe.utility.estimator == "jvp":
        check_forward_mode(recipe.model.path)


def plan_ranks(recipe: Recipe) -> BatchPlan:
    """How the recipe's batches are spread over the ranks of this job, with the groups that this needs. A collective.

    Raises UserError where a rank cannot read the model's configuration, and RecipeError as `plan_batch` does, on all
    ranks alike.
    """
    shape = first_rank_first(lambda: model_shape(recipe.model.path))
    here = shape, int(os.environ.get("LOCAL_WORLD_SIZE", layout.size("job")))
    # Of the first rank: where nodes differ, all ranks still have to come to the same spread.
    shape, ranks_per_node = layout.gather_objects("job", here)[0]
    plan = plan_batch(
        recipe,
        layout.size("shards"),
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
    with sharded_loading(ds_config):
        causal_lm = load_causal_lm(
            recipe.model.path,
            dtype=torch.bfloat16 if recipe.model.precision == "bf16" else torch.float32,
            attention=recipe.model.attention,
            gradient_checkpointing=recipe.model.gradient_checkpointing,
        )
    if recipe.lora is not None:
        causal_lm = add_lora(causal_lm, recipe.lora)
    model = TokenLossModel(causal_lm, activation_offload=recipe.model.activation_offload)
    model.train()
    return Engine(
        model,
        build_optimizer(model, recipe.optimizer),
        ds_config,
        coalesce_gradient_reduction=recipe.engine.coalesce_gradient_reduction,
    )


def build_estimator(recipe: Recipe, engine: Engine, *, batches_per_pass: int = 1) -> Estimator:
    """What gives the step losses and utilities, with a probe direction of its own.

    Args:
        batches_per_pass: main micro-batches in one gradient-free forward (`BatchPlan.batches_per_utility_pass`).
    """
    if recipe.method.name != "vcore":
        return NoUtilities(engine)
    direction = Direction(engine)
    if recipe.utility.estimator == "jvp":
        is_fused = recipe.utility.fused is not False and why_not_fused(engine) is None
        return ForwardMode(engine, direction, batches_per_pass, fused=is_fused)
    assert recipe.utility.epsilon is not None  # the recipe's rules
    return FiniteDifference(
        engine, direction, batches_per_pass, epsilon=recipe.utility.epsilon, rounding=recipe.utility.rounding
    )


def count_steps(recipe: Recipe, num_sequences: int) -> int:
    """Optimizer steps of the run; an epoch that ends within a step is rounded up to whole steps."""
    if recipe.schedule.num_steps is not None:
        return recipe.schedule.num_steps
    assert recipe.schedule.num_epochs is not None  # the recipe's rules
    return max(1, math.ceil(recipe.schedule.num_epochs * num_sequences / recipe.batch.global_size))


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


def describe_engine(recipe: Recipe, engine: Engine, direction: Direction | None) -> str:
    """Two or three lines for the start of a run: model, method, and what the method keeps in memory."""
    num_all = sum(parameter.ds_numel for parameter in engine.module.parameters())
    num_trainable = sum(parameter.ds_numel for _, parameter in engine.trainable)
    kind = f"LoRA rank {recipe.lora.rank}" if recipe.lora is not None else "full-parameter"
    lines = [
        f"Model: {recipe.model.path}: {num_all:,} parameters, {num_trainable:,} trained ({kind}), "
        f"{recipe.model.precision}, ZeRO-3 over {layout.size('shards')} rank(s) on {engine.device.type}"
    ]
    if direction is None:
        return "\n".join([*lines, f"Method: {recipe.method.name}, normalization {recipe.method.normalization}"])
    strength = (
        f"kl_budget {recipe.method.kl_budget:g} nats"
        if recipe.method.kl_budget is not None
        else f"temperature {recipe.method.temperature:g}"
    )
    epsilon = f", epsilon {recipe.utility.epsilon}" if recipe.utility.epsilon is not None else ""
    lines.append(
        f"Method: vcore, {strength}, alpha {recipe.method.alpha}, utilities by {recipe.utility.estimator}{epsilon} "
        f"along the {recipe.probe.direction} direction, which keeps {direction.persistent_bytes / 2**20:.1f} MiB a rank"
    )
    if recipe.utility.estimator == "jvp" and recipe.utility.fused is not False:
        why_not = why_not_fused(engine)
        lines.append(
            "Utilities come from the main forward itself"
            if why_not is None
            else f"Utilities take a forward of their own, since {why_not}"
        )
    if recipe.utility.estimator == "finite_difference" and engine.has_dropout:
        lines.append(
            "LoRA dropout is on, so the training forward cannot serve as l(theta): "
            "finite differences take one more forward a step"
        )
    return "\n".join(lines)
