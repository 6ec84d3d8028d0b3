"""The part of a recipe that decides the batches, the memory and the seconds of its run."""

from dataclasses import dataclass
from typing import Literal

from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import BatchConfig, LoraConfig, ModelConfig, ParallelConfig, ProbeConfig


@dataclass(frozen=True)
class PlanSettings:
    """Everything that plans, the memory estimate and the DeepSpeed configuration read of a recipe."""

    model: ModelConfig
    lora: LoraConfig | None
    parallel: ParallelConfig
    batch: BatchConfig
    probe: ProbeConfig
    cutoff_length: int
    """Tokens of the longest sequence."""
    num_trusted: int
    """Sequences of each global batch that are drawn from data.probe_path."""
    num_steps: int | None
    """Optimizer steps of the run; None where they depend on the data."""
    estimator: Literal["jvp", "finite_difference"] | None
    """None for methods without utilities."""
    is_fused: bool
    """Whether the main forward gives the utilities too."""
    fp8_tangents: bool
    """`utility.tangent_precision: fp8`"""
    utility_micro_batch_size: int | None
    """Sequences per rank in one gradient-free forward; None for as in the main batch."""
    alpha_of_micro_batch: bool
    """Whether sequences that share a micro-batch change each other's alpha."""
    runs_reference: bool
    """Whether every step runs the model without its adapters: iw_sft with adapters, and asft."""
    is_anchored: bool
    """Whether the loss has the divergence from the base model: asft."""
    optimizer: Literal["adamw", "sgd", "muon"]
    stages_checkpoints: bool
    """`checkpoint.async`"""
    gradient_clipping: float | None
    coalesce_gradient_reduction: Literal["auto"] | bool
    checkpoint_minutes: float | None
    """`checkpoint.every_minutes`"""
    deepspeed_config: str
    """File of the DeepSpeed JSON, or the name of a shipped one."""


def derive_plan_settings(recipe: Recipe) -> PlanSettings:
    """Derive the settings of a recipe."""
    method, utility, lora = recipe.method, recipe.utility, recipe.lora
    estimator = utility.estimator if method.uses_utilities else None
    return PlanSettings(
        model=recipe.model,
        lora=lora,
        parallel=recipe.parallel,
        batch=recipe.batch,
        probe=recipe.probe,
        cutoff_length=recipe.data.cutoff_length,
        num_trusted=count_trusted(recipe),
        num_steps=recipe.schedule.num_steps,
        estimator=estimator,
        is_fused=(
            estimator == "jvp"
            and utility.fused is not False
            and not method.weights_sequences
            and recipe.model.attention == "auto"
            and (lora is None or lora.dropout == 0.0)
        ),
        fp8_tangents=utility.tangent_precision == "fp8",
        utility_micro_batch_size=utility.micro_batch_size_per_rank,
        alpha_of_micro_batch=method.alpha_scope == "micro_batch",
        runs_reference=(method.reads_reference or method.is_anchored) and lora is not None,
        is_anchored=method.is_anchored,
        optimizer=recipe.optimizer.name,
        stages_checkpoints=recipe.checkpoint.async_,
        gradient_clipping=recipe.optimizer.gradient_clipping,
        coalesce_gradient_reduction=recipe.engine.coalesce_gradient_reduction,
        checkpoint_minutes=recipe.checkpoint.every_minutes,
        deepspeed_config=recipe.engine.deepspeed_config,
    )


def count_trusted(recipe: Recipe) -> int:
    """Count the sequences of each global batch that are drawn from data.probe_path."""
    return round(recipe.data.trusted_share * recipe.batch.global_size)
