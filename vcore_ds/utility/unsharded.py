"""Any Hugging Face model as an engine of one process, without DeepSpeed, for utilities in a notebook or another
trainer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from vcore_ds.common.errors import UserError
from vcore_ds.engine.flat_shards import FlatShards, ShardPosition, as_partitioned
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.attention import TRAINING_ATTENTION
from vcore_ds.models.causal_lm import TokenLossModel
from vcore_ds.models.description import can_replace_attention
from vcore_ds.models.experts import OUR_EXPERTS, uses_our_experts


class UnshardedVectors(FlatShards):
    """Vectors over the trained parameters of one process: one flat tensor per parameter."""

    def __init__(self, trainable: Sequence[nn.Parameter], optimizer: Optimizer | None):
        self._trainable, self._optimizer = trainable, optimizer
        self._numels = [parameter.numel() for parameter in trainable]
        self._positions = {
            id(parameter): ShardPosition(i, 0, parameter.numel(), parameter.numel())
            for i, parameter in enumerate(trainable)
        }
        self._counted_spans = None
        self.sums: list[Tensor] = []

    def gradients(self) -> list[Tensor]:
        """The gradient in fp32 (fp64 for fp64 parameters) of the last accumulation."""
        return self.sums

    def optimizer_state(self, key: str, sub_groups: Iterable[int] | None = None) -> list[Tensor]:
        assert self._optimizer is not None
        chosen = self._trainable if sub_groups is None else [self._trainable[i] for i in sub_groups]
        return [self._optimizer.state[parameter][key].flatten() for parameter in chosen]


class UnshardedEngine(Engine):
    """Token losses and gradients of an unsharded model: the parts of the interface that `Direction` and `forward_mode`
    use. The steps are those of another trainer."""

    shards: UnshardedVectors

    def __init__(
        self, model: TokenLossModel, optimizer: Optimizer | None = None, average: Callable[[Tensor], None] | None = None
    ):
        """`model`: in evaluation mode, without dropout. `optimizer`: of the trainer. `average`: averages a gradient
        over replicas of the model, in place."""
        self.module = model
        self.trainable = [(name, as_partitioned(p)) for name, p in model.named_parameters() if p.requires_grad]
        self.shards = UnshardedVectors([parameter for _, parameter in self.trainable], optimizer)
        self.matrices, self.average, self._num_updates = {}, average, 0
        if optimizer is not None:
            self.optimizer = optimizer
            self._num_updates = _count_updates(optimizer, [parameter for _, parameter in self.trainable])
        self.device = self.trainable[0][1].device
        self._dropouts = []
        self._experts = [module for module in model.modules() if uses_our_experts(module)]

    @property
    def num_updates(self) -> int:
        return self._num_updates

    def _call_model(self, **inputs: object) -> Tensor:
        return self.module(**inputs)

    @contextmanager
    def accumulation(self, num_backwards: int) -> Iterator[None]:
        """A context for the `backward` calls of one gradient, which is summed in fp32. The parameters' `grad` does not
        change."""
        parameters = [parameter for _, parameter in self.trainable]
        before = [parameter.grad for parameter in parameters]
        dtypes = [torch.promote_types(parameter.dtype, torch.float32) for parameter in parameters]
        self.shards.sums = [
            torch.zeros(p.numel(), dtype=dtype, device=p.device) for p, dtype in zip(parameters, dtypes, strict=True)
        ]

        def move_gradient(total: Tensor, parameter: Tensor) -> None:
            assert parameter.grad is not None  # the hook runs once it is written
            total.add_(parameter.grad.flatten())
            parameter.grad = None

        hooks = []
        for parameter, total in zip(parameters, self.shards.sums, strict=True):
            parameter.grad = None
            hooks.append(parameter.register_post_accumulate_grad_hook(partial(move_gradient, total)))
        try:
            with torch.enable_grad():
                yield
        finally:
            for hook, parameter, gradient in zip(hooks, parameters, before, strict=True):
                hook.remove()
                parameter.grad = gradient
        if self.average is not None:
            for total in self.shards.sums:
                self.average(total)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def mean_over_replicas(self, values: Tensor) -> float:
        mean = values.double().mean()
        if self.average is not None:
            self.average(mean)
        return float(mean)


def _count_updates(optimizer: Optimizer, trained: Sequence[nn.Parameter]) -> int:
    """Number of steps that the optimizer has made. Raises UserError for another one than Adam or AdamW."""
    settings = [(group.get("betas"), group.get("eps")) for group in optimizer.param_groups]
    states = [optimizer.state.get(parameter, {}) for parameter in trained]
    is_new = not any(states)
    has_moments = is_new or all({"step", "exp_avg", "exp_avg_sq"} <= state.keys() for state in states)
    if None in settings[0] or any(setting != settings[0] for setting in settings) or not has_moments:
        raise UserError(
            f"optimizer: found {type(optimizer).__name__}; expected AdamW, with the same betas and eps for all trained "
            "parameters, and moments of each once it has made a step"
        )
    return 0 if is_new else int(states[0]["step"])


@contextmanager
def unsharded_engine(
    model: nn.Module, optimizer: Optimizer | None = None, average: Callable[[Tensor], None] | None = None
) -> Iterator[UnshardedEngine]:
    """A context with an engine around `model` (a causal language model of transformers, or peft's around one, on one
    device), which is restored on exit; autocast is off within it. `optimizer`, `average`: see `UnshardedEngine`. Raises
    UserError for another model or optimizer, a model without trained parameters, or whose attention has no forward-mode
    derivative, or in inference mode."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not (
        isinstance(model, PreTrainedModel | PeftModel)
        and isinstance(base, PreTrainedModel)
        and base.get_output_embeddings() is not None
    ):
        raise _refuse(f"a {type(model).__name__}", "a causal language model, not in DDP, FSDP or a compiled module")
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        raise _refuse(f"{model.active_peft_config.peft_type.value}, which has virtual tokens", "LoRA or other adapters")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise _refuse("no parameter that requires a gradient", "those that training would change")
    if torch.is_inference_mode_enabled() or any(parameter.is_inference() for parameter in model.parameters()):
        raise _refuse("torch.inference_mode, which forbids gradients", "a model loaded, and a call, outside of it")
    if len(devices := {str(parameter.device) for parameter in model.parameters()}) > 1 or "meta" in devices:
        raise _refuse(f"parameters on {', '.join(sorted(devices))}", "one device (`vcore-ds score` shards a model)")
    if not can_replace_attention(base.config):
        raise _refuse(f"a {type(base).__name__}", "an attention that can be replaced (docs/models.md)")
    config = base.config.get_text_config()
    attention, experts = config._attn_implementation, config._experts_implementation
    with _restoring(model), torch.autocast(trained[0].device.type, enabled=False):
        try:
            config._attn_implementation, config._experts_implementation = TRAINING_ATTENTION, OUR_EXPERTS
            # Accelerate wraps `forward` in autocast, which would round the passes.
            model.forward = vars(model).get("_original_forward", model.forward)  # type: ignore[method-assign]
            yield UnshardedEngine(TokenLossModel(model.eval()).eval(), optimizer, average)
        finally:
            config._attn_implementation, config._experts_implementation = attention, experts


def _refuse(found: str, expected: str) -> UserError:
    return UserError(f"model: found {found}; expected {expected}")


@contextmanager
def _restoring(model: nn.Module) -> Iterator[None]:
    """A context after which the model has its classes, attributes, submodules and buffers of before."""
    before = [(m, type(m), [dict(part) for part in (m.__dict__, m._modules, m._buffers)]) for m in model.modules()]
    try:
        yield
    finally:
        for module, kind, saved in before:
            module.__class__ = kind
            parts: tuple[dict[str, Any], ...] = (module.__dict__, module._modules, module._buffers)
            for part, values in zip(parts, saved, strict=True):
                part.clear()
                part.update(values)
