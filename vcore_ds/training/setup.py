"""Setup of a job, shared by commands: process group, batch plan, engine and estimator."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vcore_ds.common.errors import UserError
from vcore_ds.config.method_section import MethodConfig
from vcore_ds.config.sections import EngineConfig, ParallelConfig, ProbeConfig, UtilityConfig
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device, num_local_ranks, total_memory_bytes, uses_gpu
from vcore_ds.distributed.process_group import run_on_first_rank, run_on_ranks_in_turn, start_process_group
from vcore_ds.engine.flat_shards import unsharded_gradient_bytes
from vcore_ds.engine.sharded_loading import load_sharded, partition_experts
from vcore_ds.engine.zero3 import Engine, build_optimizer
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.cpu_matmul import use_fast_cpu_matmul
from vcore_ds.models.description import DTYPES, read_model
from vcore_ds.models.dual_tensors import has_fp8_units
from vcore_ds.models.lora import add_lora, load_adapter
from vcore_ds.planning.batch_plan import BatchPlan, plan_batch
from vcore_ds.planning.memory import COALESCING_SHARE
from vcore_ds.planning.passes import CPU, H100
from vcore_ds.planning.settings import ActivationMemory, PlanSettings
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import Estimator, FiniteDifference, ForwardMode, NoUtilities, why_not_fused

if TYPE_CHECKING:
    from vcore_ds.models.megatron.model import ParallelTokenLossModel


def start_ranks(engine: EngineConfig, parallel: ParallelConfig) -> None:
    """Join the process group, see `start_process_group`, with fast matrix multiplications on CPUs. A collective."""
    if not uses_gpu():
        use_fast_cpu_matmul()
    start_process_group(engine.timeout_minutes, parallel.tensor, parallel.expert)


def plan_ranks(settings: PlanSettings) -> BatchPlan:
    """Plan how batches are spread over the ranks of this job, make the groups that this needs, and connect all groups.
    A collective. Raises UserError, on all ranks alike, if a rank cannot read the model's configuration, and RecipeError
    as `plan_batch`."""
    shape = run_on_ranks_in_turn(lambda: read_model(settings.model.path).shape)
    # Rank 0's values: all ranks must plan the same layout, even if nodes differ.
    shape, ranks_per_node = layout.gather_objects("job", (shape, num_local_ranks()))[0]
    plan = plan_batch(
        settings,
        layout.size("job"),
        shape,
        ranks_per_node=ranks_per_node,
        machine=CPU if device().type == "cpu" else H100,
    )
    layout.make_sequence_groups(plan.sequence_parallel_sizes)
    layout.connect_groups()
    return plan


def build_engine(
    settings: PlanSettings, ds_config: dict[str, Any], activations: ActivationMemory | None = None
) -> Engine:
    """Build model, adapters, optimizer and ZeRO-3 engine. `activations`: what the backward need not compute again; None
    for nothing. A collective."""
    # The same on every rank: adapters are initialised before they are sharded.
    torch.manual_seed(settings.seed)
    model = load_model(settings, ds_config)
    partition_experts(model)
    if activations is not None:
        model.store_activations(activations)
    model.train()
    return Engine(
        model,
        build_optimizer(model, settings.optimizer),
        ds_config,
        coalesce_gradient_reduction=should_coalesce(settings, model),
    )


def load_model(settings: PlanSettings, ds_config: dict) -> "TokenLossModel | ParallelTokenLossModel":
    """Load the sharded model, and add the adapters. A collective."""
    model_settings, lora, say = settings.model, settings.lora, partial(print, flush=True)
    dtype = DTYPES[model_settings.precision]
    if model_settings.provider == "megatron":
        from vcore_ds.engine.sharded_loading import load_parallel  # megatron-core takes seconds to import

        return load_parallel(
            model_settings.path,
            ds_config,
            dtype=dtype,
            gradient_checkpointing=bool(model_settings.gradient_checkpointing),
            activation_offload=model_settings.activation_offload,
            say=say,
        )
    base = load_sharded(
        model_settings.path,
        ds_config,
        dtype=dtype,
        attention=model_settings.attention,
        gradient_checkpointing=bool(model_settings.gradient_checkpointing),
        say=say,
    )
    adapted = base if lora is None else add_lora(base, lora)
    if lora is not None and (adapter := lora.adapter) is not None:  # rank 0's: DeepSpeed broadcasts it
        run_on_first_rank(lambda: load_adapter(adapted, Path(adapter)))
    return TokenLossModel(adapted, activation_offload=model_settings.activation_offload)


def should_coalesce(settings: PlanSettings, model: torch.nn.Module) -> bool:
    """Whether to reduce gradients once a step; the same on all ranks, even if their memory differs. A collective."""
    if (coalesce := settings.engine.coalesce_gradient_reduction) != "auto":
        return coalesce
    room = COALESCING_SHARE * min(layout.gather_objects("job", total_memory_bytes()))
    return unsharded_gradient_bytes(p for p in model.parameters() if p.requires_grad) <= room


def build_estimator(
    method: MethodConfig, probe: ProbeConfig, utility: UtilityConfig, engine: Engine, *, batches_per_pass: int = 1
) -> Estimator:
    """Build the estimator of losses and utilities, with a new probe direction. `batches_per_pass`: main micro-batches
    in one gradient-free forward (`BatchPlan.batches_per_utility_pass`)."""
    if not method.uses_utilities:
        return NoUtilities(engine, statistic=method.prediction_statistic, is_anchored=method.is_anchored)
    direction = build_direction(engine, probe, utility)
    if utility.estimator == "jvp":
        # Sequence weights need all utilities before the first backward.
        is_fused = utility.fused is not False and not method.weights_sequences and why_not_fused(engine) is None
        return ForwardMode(engine, direction, batches_per_pass, fused=is_fused)
    assert utility.epsilon is not None  # the recipe's rules
    return FiniteDifference(engine, direction, batches_per_pass, epsilon=utility.epsilon, rounding=utility.rounding)


def build_direction(engine: Engine, probe: ProbeConfig, utility: UtilityConfig) -> Direction:
    """Build a new probe direction. Raises UserError if utilities need FP8 matrix multiplications that this rank's
    device lacks."""
    fp8_tangents = utility.tangent_precision == "fp8"
    if fp8_tangents and not has_fp8_units():
        raise UserError(
            f"utility.tangent_precision: fp8, which {torch.cuda.get_device_name()} cannot multiply with PyTorch "
            f"{torch.__version__}; expected null, or GPUs from Hopper on"
        )
    return Direction(engine, probe.rank, probe.rank_passes, fp8_tangents=fp8_tangents)
