"""The sections of a recipe that decide the batches, the memory and the seconds of its run."""

from dataclasses import dataclass
from typing import Literal

from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import (
    BatchConfig,
    EngineConfig,
    LoraConfig,
    MethodConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ProbeConfig,
    UtilityConfig,
)


@dataclass(frozen=True)
class PlanSettings:
    """Everything that plans, the memory estimate, the DeepSpeed configuration and the engine read of a recipe."""

    method: MethodConfig
    utility: UtilityConfig
    probe: ProbeConfig
    model: ModelConfig
    parallel: ParallelConfig
    lora: LoraConfig | None
    batch: BatchConfig
    optimizer: OptimizerConfig
    engine: EngineConfig
    cutoff_length: int  # tokens of the longest sequence
    num_trusted: int  # sequences of each global batch that are drawn from data.probe_path
    num_steps: int | None  # optimizer steps of the run; None where they depend on the data
    stages_checkpoints: bool  # `checkpoint.async`
    seed: int  # `run.seed`, by which adapters are drawn

    @property
    def estimator(self) -> Literal["jvp", "finite_difference"] | None:
        """None for methods without utilities."""
        return self.utility.estimator if self.method.uses_utilities else None

    @property
    def is_fused(self) -> bool:
        """Whether the main forward gives the utilities too."""
        return (
            self.estimator == "jvp"
            and self.utility.fused is not False
            and not self.method.weights_sequences
            and self.model.attention == "auto"
            and (self.lora is None or self.lora.dropout == 0.0)
        )

    @property
    def runs_reference(self) -> bool:
        """Whether every step runs the model without its adapters: iw_sft with adapters, and asft."""
        return (self.method.reads_reference or self.method.is_anchored) and self.lora is not None


def derive_plan_settings(recipe: Recipe) -> PlanSettings:
    """Take the sections of a recipe."""
    return PlanSettings(
        recipe.method,
        recipe.utility,
        recipe.probe,
        recipe.model,
        recipe.parallel,
        recipe.lora,
        recipe.batch,
        recipe.optimizer,
        recipe.engine,
        cutoff_length=recipe.data.cutoff_length,
        num_trusted=count_trusted(recipe),
        num_steps=recipe.schedule.num_steps,
        stages_checkpoints=recipe.checkpoint.async_,
        seed=recipe.run.seed,
    )


def count_trusted(recipe: Recipe) -> int:
    """Count the sequences of each global batch that are drawn from data.probe_path."""
    return round(recipe.data.trusted_share * recipe.batch.global_size)
