"""An engine around DeepSpeed's of ZeRO stage 3 that another trainer owns (transformers, TRL, through accelerate)."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import set_z3_leaf_modules, z3_leaf_module
from peft import PeftModel
from torch import Tensor, nn
from torch.optim import Optimizer

from vcore_ds.common.errors import UserError
from vcore_ds.distributed import layout
from vcore_ds.engine.adam_steps import StepsOfTrainer, read_adam_steps
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.causal_lm import FUNCTIONAL_DROPOUT, TokenLossModel, find_decoder, find_layers


def is_deepspeed(model: nn.Module) -> TypeGuard[DeepSpeedEngine]:
    """Whether `model` is DeepSpeed's engine, which other trainers pass as the model."""
    return isinstance(model, DeepSpeedEngine)


def prepare_zero3(model: nn.Module) -> None:
    """Let DeepSpeed's ZeRO-3 gather each decoder layer of `model` whole, for `VcoreLoss`. Call it before the trainer
    starts DeepSpeed (`trainer.train()`). Without DeepSpeed it changes no result.

    `model`: a causal language model of transformers, or peft's around one.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if layers := find_layers(find_decoder(base)):
        set_z3_leaf_modules(model, list({type(layer): None for layer in layers}))
        if not any(parameter.requires_grad for parameter in base.get_input_embeddings().parameters()):
            # DeepSpeed reduces a layer's gradients with that of its input, or before they exist if the input has none.
            base.enable_input_require_grads()


class ShardedEngine(StepsOfTrainer, Engine):
    """Token losses and gradients of a model that another trainer has sharded; the steps are those of the trainer."""

    def __init__(self, model: TokenLossModel, trainer_engine: DeepSpeedEngine, *, with_moments: bool):
        """`model`: in evaluation mode, around that of `trainer_engine`. `with_moments`: whether directions are matched
        to the trainer's optimizer."""
        self.deepspeed, self.optimizer = trainer_engine, trainer_engine.optimizer
        self._attach(model)
        zero = self.optimizer
        self.replicas = zero.dp_process_group
        self._partial_gradient: Tensor | None = None
        self._steps = []
        if with_moments:
            groups = [zero.optimizer.param_groups[i] for i in zero.sub_group_to_group_id.values()]
            states = [zero.optimizer.state.get(master, {}) for master in zero.fp32_partitioned_groups_flat]
            self._steps = read_adam_steps(zero.optimizer, groups, states)

    def count_most(self, batches: Sequence[Any]) -> int:
        """Largest number of batches on a rank. A collective."""
        return max(layout.gather_objects("job", len(batches)))

    def mean_over_replicas(self, values: Tensor) -> float:
        return self.sum_over_data([float(values.double().mean())])[0] / self.num_summed_ranks

    def _call_model(self, **inputs: Any) -> Any:
        # A hook of DeepSpeed does this before each forward of the trainer's module, which is not called here.
        self.optimizer.parameter_offload.get_param_coordinator().reset_step()
        return super()._call_model(**inputs)

    @contextmanager
    def accumulation(self, num_backwards: int) -> Iterator[None]:
        """As `Engine.accumulation`, with the trainer's activation checkpointing."""
        zero = self.optimizer
        if self._partial_gradient is None and (zero.micro_step_id > 0 or zero._epilogue_ran_this_backward):
            self.shards.gradients()  # waits for reductions
            self._partial_gradient = zero.grad_partitions_flat_buffer.clone()
        config = self.module.base.config.get_text_config()
        # Of attention, which is in evaluation mode, and not of layers.
        has_dropout = any(getattr(config, name, 0) for name in FUNCTIONAL_DROPOUT if name != "attention_dropout")
        layers = [] if has_dropout else self.module.layers
        for layer in layers:
            layer.training = True
        try:
            with super().accumulation(num_backwards):
                yield
        finally:
            for layer in layers:
                layer.training = False

    @contextmanager
    def restoring_deepspeed(self) -> Iterator[None]:
        """A context after which DeepSpeed is as before: its gradient, counters and flags. These passes have their own
        record of the order of modules, by which it prefetches parameters."""
        engine, zero = self.deepspeed, self.optimizer
        module, boundary = engine.module, engine._is_gradient_accumulation_boundary
        fields = {name: getattr(zero, name) for name in ("micro_step_id", "_is_gradient_accumulation_boundary")}
        names = ("averaged_gradients", "norm_for_param_grads")  # the second one only of an offloaded optimizer
        copied = {name: dict(getattr(zero, name)) for name in names if hasattr(zero, name)}
        hooks, offload = dict(vars(zero._backward_hook_state)), zero.parameter_offload
        coordinator = offload.param_coordinator
        if (for_probes := getattr(offload, "_coordinator_of_probes", None)) is None:
            for_probes = offload._coordinator_of_probes = copy.copy(coordinator)
            for_probes._clear_trace_structures()
        offload.param_coordinator = for_probes
        engine.module = self.module
        linear = torch.nn.functional.linear
        torch.nn.functional.linear = torch._C._nn.linear  # not `memory_efficient_linear`, which has no `jvp`
        try:
            yield
        finally:
            torch.nn.functional.linear = linear
            offload.param_coordinator.reset_step()  # waits for prefetched parameters
            offload.param_coordinator, engine.module = coordinator, module
            self._saved_parameters.remove_hooks()
            if self._partial_gradient is not None:
                zero.grad_partitions_flat_buffer.copy_(self._partial_gradient)
            engine._is_gradient_accumulation_boundary = boundary
            for name, value in (fields | copied).items():
                setattr(zero, name, value)
            vars(zero._backward_hook_state).update(hooks)


@contextmanager
def sharded_engine(
    model: TokenLossModel, trainer_engine: DeepSpeedEngine, optimizer: Optimizer | None
) -> Iterator[ShardedEngine]:
    """A context with an engine around another trainer's, which is as before on exit. `model`: see `ShardedEngine`.
    `optimizer`: None for directions that are gradients. A collective. Raises UserError for another stage than 3, or if
    layers are not gathered whole."""
    zero, stage = trainer_engine.optimizer, trainer_engine.zero_optimization_stage()
    if not isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
        raise _refuse("zero_optimization.stage", stage, "3, or DDP for a model that fits on one device")
    if trainer_engine.fp16_enabled():
        raise _refuse("fp16", "true", "bf16 or fp32")
    if zero.offload_param:
        raise _refuse("zero_optimization.offload_param", "a device", "none (the optimizer may be offloaded)")
    split = next((layer for layer in model.layers if not z3_leaf_module(layer)), None)
    if split is not None:
        raise UserError(
            f"model: found a {type(split).__name__} that DeepSpeed gathers in parts; expected whole layers. Call "
            "`vcore_ds.prepare_zero3(model)` before the trainer starts"
        )
    if trainer_engine.sequence_parallel_size > 1:
        found = trainer_engine.sequence_parallel_size
        raise _refuse("sequence_parallel_size", found, "1, or train with a recipe (docs/parallelism.md)")
    with layout.trainer_ranks():
        num_ranks, num_shards = layout.size("job"), zero.dp_process_group.size()
        if num_shards != num_ranks:
            expected = f"{num_ranks}, one on each rank, without tensor or pipeline parallelism"
            raise _refuse("number of shards", num_shards, expected)
        engine = ShardedEngine(model, trainer_engine, with_moments=optimizer is not None)
        with engine.restoring_deepspeed():
            yield engine


def _refuse(key: str, found: object, expected: str) -> UserError:
    return UserError(f"DeepSpeed's {key}: found {found}; expected {expected}")
