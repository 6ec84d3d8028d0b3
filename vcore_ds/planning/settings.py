"""The sections of a recipe that decide the batches, the memory and the seconds of its run."""

from dataclasses import dataclass
from typing import Literal

from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.schema import Recipe
from vcore_ds.config.sections import (
    BatchConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ProbeConfig,
    UtilityConfig,
)
from vcore_ds.planning.model_shape import ModelShape


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
        num_trusted=round(recipe.data.trusted_share * recipe.batch.global_size),
        num_steps=recipe.schedule.num_steps,
        stages_checkpoints=recipe.checkpoint.async_,
        seed=recipe.run.seed,
    )


@dataclass(frozen=True)
class LossMemory:
    """How much memory the token loss may use."""

    block_bytes: int  # bytes of one fp32 `[block, V]` tensor, of which a handful are alive at a time
    # Whether a forward with a gradient keeps `[N, V]` gradients by the logits in half precision for the backward, which
    # would compute them again from the hidden states; on GPUs, where a kernel writes them
    keeps_logit_gradients: bool = False


DEFAULT_LOSS_MEMORY = LossMemory(256 * 2**20)


@dataclass(frozen=True)
class ActivationMemory:
    """What a step stores for its backward although it could compute it again (`planning.fit.choose_activations`)."""

    num_layers: int = 1  # of the decoder
    num_stored: int = 0  # of these, the last ones, layers of a checkpointed model that store all their activations
    stores_attention: bool = False  # whether the checkpointed layers store the output of their attention
    loss: LossMemory = DEFAULT_LOSS_MEMORY

    @property
    def recomputed_share(self) -> float:
        """Share of the layers of a checkpointed model that are recomputed."""
        return 1 - self.num_stored / self.num_layers


@dataclass(frozen=True)
class ZeroSettings:
    """What `zero_optimization` of the DeepSpeed JSON says about memory and time; DeepSpeed's defaults."""

    offloads_parameters: bool = False
    offloads_optimizer: bool = False
    # Ranks that shard the second copy of the parameters (hierarchical partitioning); 1 for no copy
    ranks_of_second_copy: int = 1
    max_live_parameters: int = 10**9
    bucket_numel: int = 5 * 10**8  # elements of the buffer in which gradients are reduced
    prefetch_numel: int = 5 * 10**7  # elements that DeepSpeed all-gathers beside the layer before
    reuse_distance: int = 10**9  # parameters between two uses of a layer within which ZeRO-3 keeps it gathered
    gathers_in_place: bool = False  # `stage3_allgather_sequential`: one all-gather for each parameter, without copies


@dataclass(frozen=True)
class MemorySettings:
    """Settings of a run that determine a rank's memory and time."""

    num_ranks: int  # ranks that shard the model; a tensor-parallel group counts as one
    # Tokens of the largest main micro-batch on a rank: of a pack, or of unpacked sequences with their padding
    main_tokens: int
    probe_tokens: int = 0  # the same for the probe batch; 0 for a method without one
    utility_tokens: int = 0  # the same for a separate gradient-free pass; 0 without one
    tensor: int = 1  # tensor-parallel size. All ranks of a group process the group's micro-batches.
    expert: int = 1  # expert-parallel size. The ranks of a group hold equal shares of every layer's experts.
    expert_load: float = 1.0  # tokens sent to the fullest rank of an expert-parallel group, over the mean
    # Estimator of the utilities; None for a method without them
    estimator: Literal["jvp", "finite_difference"] | None = None
    probe_rank: int | None = None  # rank of the direction's factors; None for the full-rank direction
    rank_passes: int = 1  # passes of subspace iteration that compute the factors
    fp8_tangents: bool = False  # whether tangents of activations and weights are multiplied in FP8
    is_fused: bool = False  # whether the main forward gives the utilities
    number_bytes: int = 2  # bytes of a number: 2 in bf16, 4 in fp32. Adapters are always in fp32.
    # Adapters on all linear layers of the decoder, but not on routers and experts; None to train all parameters
    lora: LoraConfig | None = None
    is_anchored: bool = False  # whether the loss includes the KL divergence from the base model
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    has_muon_direction: bool = False  # whether the direction is Muon's update
    is_checkpointed: bool = False  # whether layers keep only their input, and others what `activations` says
    activations: ActivationMemory = ActivationMemory()
    offloads_checkpoints: bool = False  # whether activations wait in host memory for the backward
    stages_checkpoints: bool = False  # whether a checkpoint is written from a copy in host memory (`checkpoint.async`)
    keeps_direction: bool = False  # whether checkpoints hold the direction, as between two probes
    coalesces_gradients: bool = False  # one reduction a step, from an unsharded gradient
    zero: ZeroSettings = ZeroSettings()
    # Whether attention takes keys and values repeated for every query head: on GPUs in fp32, and before torch 2.12
    repeats_kv_heads: bool = False
    on_gpu: bool = True  # whether ranks compute on GPUs, where a kernel computes the token loss

    def keeps_logit_gradients(self, shape: ModelShape) -> bool:
        """Whether a forward keeps the gradients by the logits: where a kernel computes the loss of plain logits, not
        sharded, in 16 bits, and the head is trained."""
        uses_kernel = self.on_gpu and self.number_bytes == 2 and self.tensor == 1 and shape.has_plain_logits
        return uses_kernel and self.lora is None and self.activations.loss.keeps_logit_gradients
