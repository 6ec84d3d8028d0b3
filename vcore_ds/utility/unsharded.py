"""Any Hugging Face model as an engine of one process, without DeepSpeed, for utilities in a notebook or another
trainer."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from vcore_ds.common.errors import UserError
from vcore_ds.distributed import layout
from vcore_ds.engine.adam_steps import StepsOfTrainer, find_groups, read_adam_steps
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

    def parameters(self) -> list[Tensor]:
        return [parameter.data.flatten() for parameter in self._trainable]  # views if contiguous

    def gradients(self) -> list[Tensor]:
        """The gradient in fp32 (fp64 for fp64 parameters) of the last accumulation."""
        return self.sums

    def optimizer_state(self, key: str, sub_groups: Iterable[int] | None = None) -> list[Tensor]:
        """As `FlatShards.optimizer_state`; zeros for parameters that the optimizer has not updated yet."""
        assert self._optimizer is not None
        chosen = self._trainable if sub_groups is None else [self._trainable[i] for i in sub_groups]
        states = [self._optimizer.state.get(parameter, {}) for parameter in chosen]
        pairs = zip(chosen, states, strict=True)
        return [s[key].flatten() if key in s else torch.zeros_like(p).flatten() for p, s in pairs]


class UnshardedEngine(StepsOfTrainer, Engine):
    """Token losses and gradients of an unsharded model: the parts of the interface that `Direction` and `forward_mode`
    use. The steps are those of another trainer."""

    shards: UnshardedVectors

    def __init__(
        self,
        model: TokenLossModel,
        optimizer: Optimizer | None = None,
        replicas: layout.ReplicaGroup | None = None,
    ):
        """`model`: in evaluation mode, without dropout. `optimizer`: of the trainer. `replicas`: ranks with other
        sequences for the same model, over which gradients are summed; None for this process alone."""
        self.module = model
        self.trainable = [(name, as_partitioned(p)) for name, p in model.named_parameters() if p.requires_grad]
        self.shards = UnshardedVectors([parameter for _, parameter in self.trainable], optimizer)
        self.matrices, self.replicas = {}, replicas
        self._steps = []
        if optimizer is not None:
            optimizer, groups = find_groups(optimizer, self.trainable)
            states = [optimizer.state.get(parameter, {}) for _, parameter in self.trainable]
            self._steps = read_adam_steps(optimizer, groups, states)
        self.device = self.trainable[0][1].device
        self._dropouts = []
        self._experts = [module for module in model.modules() if uses_our_experts(module)]

    @property
    def num_summed_ranks(self) -> int:
        return 1 if self.replicas is None else self.replicas.size()

    def sum_over_data(self, values: list[float], sequence_parallel: int = 1) -> list[float]:
        if self.replicas is None:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        layout.sum_replicas(self.replicas, total)
        return total.tolist()

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
        if self.replicas is not None:
            for total in self.shards.sums:
                layout.sum_replicas(self.replicas, total)

    @contextmanager
    def changing_shards(self) -> Iterator[None]:
        """Does nothing: there are no other copies of the parameters."""
        yield

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def mean_over_replicas(self, values: Tensor) -> float:
        return self.sum_over_data([float(values.double().mean())])[0] / self.num_summed_ranks


@contextmanager
def unsharded_engine(
    model: nn.Module, optimizer: Optimizer | None = None, replicas: layout.ReplicaGroup | None = None
) -> Iterator[UnshardedEngine]:
    """A context with an engine around `model`; see `token_loss_model`. `optimizer`, `replicas`: see `UnshardedEngine`.
    Raises UserError for another optimizer too."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise _refuse("parameters that DeepSpeed has sharded", "its engine, as the Trainer gives it to `compute_loss`")
    with token_loss_model(model) as losses:
        yield UnshardedEngine(losses, optimizer, replicas)


@contextmanager
def token_loss_model(model: nn.Module) -> Iterator[TokenLossModel]:
    """A context with a `TokenLossModel` in evaluation mode around `model` (a causal language model of transformers, or
    peft's around one, on one device), which is restored on exit; within it autocast and torch.compile are off. Raises
    UserError for another model, one without trained parameters, or whose attention has no forward-mode derivative, or
    in inference mode."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not (
        isinstance(model, PreTrainedModel | PeftModel)
        and isinstance(base, PreTrainedModel)
        and base.get_output_embeddings() is not None
    ):
        raise _refuse(f"a {type(model).__name__}", "a causal language model, not in DDP, FSDP or a compiled module")
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        raise _refuse(f"{model.active_peft_config.peft_type.value}, which has virtual tokens", "LoRA or other adapters")
    quantizer: Any = getattr(base, "hf_quantizer", None)
    if quantizer is not None:
        raise _refuse(f"quantized weights ({quantizer.quantization_config.quant_method})", "those in 16 bits")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise _refuse("parameters that FSDP has sharded", "DDP, DeepSpeed's ZeRO-3, or a recipe (docs/python.md)")
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
    # Dynamo would run layers that are compiled one by one as they were, without tangents, or crash.
    without_compilation = torch.compiler.set_stance("force_eager")
    with _restoring(model), torch.autocast(trained[0].device.type, enabled=False), without_compilation:
        try:
            config._attn_implementation, config._experts_implementation = TRAINING_ATTENTION, OUR_EXPERTS
            # Accelerate wraps `forward` in autocast, which would round the passes.
            model.forward = vars(model).get("_original_forward", model.forward)  # type: ignore[method-assign]
            yield TokenLossModel(model.eval()).eval()
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
