"""Any Hugging Face model as an engine of one process, without DeepSpeed, for utilities in a notebook or another
trainer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
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

    def __init__(self, trainable: Sequence[nn.Parameter]):
        self._numels = [parameter.numel() for parameter in trainable]
        self._positions = {
            id(parameter): ShardPosition(i, 0, numel, numel)
            for i, (parameter, numel) in enumerate(zip(trainable, self._numels, strict=True))
        }
        self._counted_spans = None
        self._gradients: list[Tensor] = []

    def gradients(self) -> list[Tensor]:
        """The gradient in fp32 (fp64 for fp64 parameters) of the last accumulation."""
        return self._gradients


class UnshardedEngine(Engine):
    """Token losses and gradients of an unsharded model without an optimizer: the parts of the interface that
    `Direction`, with `optimizer="sgd"`, and `forward_mode` use."""

    shards: UnshardedVectors

    def __init__(self, model: TokenLossModel):
        """`model`: in evaluation mode, without dropout."""
        self.module = model
        self.trainable = [(name, as_partitioned(p)) for name, p in model.named_parameters() if p.requires_grad]
        self.shards = UnshardedVectors([parameter for _, parameter in self.trainable])
        self.device = self.trainable[0][1].device
        self._dropouts = []
        self._experts = [module for module in model.modules() if uses_our_experts(module)]

    def _call_model(self, **inputs: object) -> Tensor:
        return self.module(**inputs)

    @contextmanager
    def accumulation(self, num_backwards: int) -> Iterator[None]:
        """A context for the `backward` calls of one gradient, which is summed in fp32. The parameters' `grad` does not
        change."""
        parameters = [parameter for _, parameter in self.trainable]
        before = [parameter.grad for parameter in parameters]
        sums = [
            torch.zeros(p.numel(), dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
            for p in parameters
        ]

        def add(total: Tensor, parameter: Tensor) -> None:
            assert parameter.grad is not None  # the hook runs once it is written
            total.add_(parameter.grad.flatten())
            parameter.grad = None

        for parameter in parameters:
            parameter.grad = None
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(add, total))
            for parameter, total in zip(parameters, sums, strict=True)
        ]
        try:
            with torch.enable_grad():
                yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        self.shards._gradients = sums

    def backward(self, loss: Tensor) -> None:
        loss.backward()


@contextmanager
def unsharded_engine(model: nn.Module) -> Iterator[UnshardedEngine]:
    """A context with an engine around `model` (a causal language model of transformers, or peft's around one, on one
    device), which is restored on exit; autocast is off within it. Raises UserError for another model, one without
    trained parameters, one whose attention has no forward-mode derivative, or in inference mode."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if (
        not isinstance(model, PreTrainedModel | PeftModel)
        or not isinstance(base, PreTrainedModel)
        or base.get_output_embeddings() is None
    ):
        raise UserError(
            f"model: found a {type(model).__name__}; expected a causal language model of transformers, or peft's model "
            "around one. Unwrap it from DDP, FSDP or a compiled module first"
        )
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        raise UserError(
            f"model: found {model.active_peft_config.peft_type.value}, whose virtual tokens are not supported; "
            "expected adapters of layers, such as LoRA"
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UserError("model: found no parameter that requires a gradient; expected those that training would change")
    if torch.is_inference_mode_enabled() or any(parameter.is_inference() for parameter in model.parameters()):
        raise UserError(
            "model: found torch.inference_mode, which forbids gradients; expected a model that was loaded, and a call, "
            "outside of it"
        )
    if len(devices := {str(parameter.device) for parameter in model.parameters()}) > 1 or "meta" in devices:
        raise UserError(
            f"model: found parameters on {', '.join(sorted(devices))}; expected one device. For models that one device "
            "cannot hold, `vcore-ds score` shards parameters over ranks"
        )
    if not can_replace_attention(base.config):
        raise UserError(
            f"model: found a {type(base).__name__}, whose attention cannot be replaced by one with a forward-mode "
            "derivative; expected another architecture (docs/models.md)"
        )
    config = base.config.get_text_config()
    attention, experts = config._attn_implementation, config._experts_implementation
    with _restoring(model), torch.autocast(trained[0].device.type, enabled=False):
        try:
            config._attn_implementation, config._experts_implementation = TRAINING_ATTENTION, OUR_EXPERTS
            yield UnshardedEngine(TokenLossModel(model.eval()).eval())
        finally:
            config._attn_implementation, config._experts_implementation = attention, experts


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
