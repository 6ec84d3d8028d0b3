"""Token utilities of any Hugging Face model in one process, on the batches of other trainers: the passes of a run,
without sharding. Public through `vcore_ds`."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import IGNORED_LABEL, Batch
from vcore_ds.engine.flat_shards import FlatShards, ShardPosition, as_partitioned
from vcore_ds.engine.zero3 import Engine, NonFiniteLoss
from vcore_ds.method import weights as method_weights
from vcore_ds.method.objective import Normalization
from vcore_ds.models.attention import TRAINING_ATTENTION
from vcore_ds.models.causal_lm import TokenLossModel, use_eager_attention
from vcore_ds.models.description import can_replace_attention
from vcore_ds.models.experts import OUR_EXPERTS, uses_our_experts
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import compute_jvp_utilities

_NUM_CHECKED = 32

_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest mean difference, nats, of losses by kernels that round differently; 1e-4 in other dtypes."""

_WRAPPER = "causal_lm."
"""Prefix that `TokenLossModel` adds to the names of a model's parameters."""


@dataclass(frozen=True)
class ProbeDirection:
    """The gradient of the mean loss of probe sequences: positive utility means that learning a token lowers it."""

    gradient: Mapping[str, Tensor]
    """By name of the trained parameter, in its shape; in the dtype of the first trained parameter."""
    loss: float  # nats
    gradient_norm: float  # 2-norm over all trained parameters


def probe_direction(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], *, normalization: Normalization = "sequence"
) -> ProbeDirection:
    """Compute the gradient of the loss over all `batches`, without dropout, in one process.

    It has the parameters that require a gradient. The model and its gradients do not change. Activations are not
    checkpointed, so use small batches.

    `model`: a causal language model of transformers, or peft's around one, on one device. `batches`: each with
    `input_ids` and `labels`, `[b, T]`; labels are not shifted, and -100 for tokens that are not supervised; an
    `attention_mask`, if given, is 1 and then 0 in each row. `normalization`: `sequence` for the mean over sequences of
    the mean over their tokens, `token` for the mean over all tokens. Raises UserError if the model or a batch cannot be
    used, or loss or gradient is inf or NaN.
    """
    probe_batches = [_read_batch(batch) for batch in batches]
    if not probe_batches:
        raise UserError("batches: found none; expected at least one batch of probe sequences")
    with unsharded_engine(model) as engine:
        _check_losses(engine, probe_batches[0])
        direction = Direction(engine)
        try:
            _check_derivatives(engine, probe_batches[0])
            probe = direction.compute(probe_batches, normalization=normalization, clip=None)
        except NonFiniteLoss as error:
            raise UserError(f"batches: {error}") from None
        parameters = dict(engine.trainable)
    pairs = zip(parameters.items(), direction.buffers, strict=True)
    gradient = {name.removeprefix(_WRAPPER): flat.view(parameter.shape) for (name, parameter), flat in pairs}
    return ProbeDirection(gradient, probe.loss, probe.gradient_norm)


def token_utilities(
    model: nn.Module, batch: Mapping[str, Tensor], direction: ProbeDirection | Mapping[str, Tensor]
) -> Tensor:
    """Compute `<v, grad loss>` of each supervised token by one forward-mode (JVP) pass, exact and without dropout.

    `model`, `batch`: as in `probe_direction`; the model does not change. `direction`: `v`, or any vector by names of
    trained parameters; parameters that it lacks do not move. Returns fp32 (fp64 for a model in fp64) `[b, T]`, the
    utility of each token at its position, on the model's device; 0 for tokens that are not supervised. Raises UserError
    if the model, the batch or the direction cannot be used, or a utility is inf or NaN.
    """
    parsed = _read_batch(batch)
    gradient = direction.gradient if isinstance(direction, ProbeDirection) else direction
    with unsharded_engine(model) as engine:
        _check_losses(engine, parsed)
        buffers = _read_direction(engine, gradient)
        (utilities,) = compute_jvp_utilities(engine, Direction(engine, buffers=buffers), [parsed])
    if not bool(torch.isfinite(utilities).all()):
        raise UserError("direction: found a utility that is inf or NaN; expected a finite direction, loss and model")
    return _scatter(utilities, parsed.labels)


def gibbs_weights(
    utilities: Tensor, labels: Tensor, *, kl_budget: float | None = None, temperature: float | None = None
) -> Tensor:
    """Token weights `q ~ exp(tau * utility)` within each row; the loss of a row is `sum_t q_t loss_t`.

    `utilities`: `[b, T]`, from `token_utilities`. `labels`: `[b, T]`, -100 where a token is not supervised.
    `kl_budget`: `KL(q || uniform)` in nats, for which each row's tau is solved; or `temperature`: tau, 0 for uniform
    weights. Returns `[b, T]`, at the position of each token, with sum 1 over each row; 0 for tokens that are not
    supervised. Raises UserError if shapes differ, a utility is not finite, or not exactly one of budget and temperature
    is given.
    """
    if utilities.shape != labels.shape or labels.dim() != 2:
        shapes = f"{list(utilities.shape)} and {list(labels.shape)}"
        raise UserError(f"utilities, labels: found shapes {shapes}; expected the same [b, T]")
    if (kl_budget is None) == (temperature is None):
        raise UserError("kl_budget, temperature: found both or none; expected one of them, such as kl_budget=0.005")
    if kl_budget is not None and not 0 < kl_budget < math.inf:
        raise UserError(f"kl_budget: found {kl_budget}; expected a positive number")
    if temperature is not None and not 0 <= temperature < math.inf:
        raise UserError(f"temperature: found {temperature}; expected a number of at least 0")
    rows, columns = _supervised(labels.to(utilities.device)).nonzero(as_tuple=True)
    values = utilities[rows, columns]
    if not bool(torch.isfinite(values).all()):
        raise UserError("utilities: found inf or NaN at a supervised token; expected finite numbers")
    if kl_budget is not None:
        result = method_weights.gibbs_weights_for_budget(values, rows, len(labels), kl_budget)
    else:
        assert temperature is not None
        result = method_weights.gibbs_weights(values, rows, len(labels), temperature)
    return _scatter(result.weights, labels)


def _supervised(labels: Tensor) -> Tensor:
    """Mask of supervised tokens, `[b, T]`; the first token of a row is never predicted."""
    supervised = labels != IGNORED_LABEL
    supervised[:, 0] = False
    return supervised


def _scatter(values: Tensor, labels: Tensor) -> Tensor:
    """Scatter `[N]` to the supervised tokens of `[b, T]`, which is 0 elsewhere."""
    result = values.new_zeros(labels.shape)
    result[_supervised(labels.to(values.device))] = values
    return result


def _read_batch(batch: Mapping[str, Tensor]) -> Batch:
    """Convert a batch of right-padded, unpacked sequences. Raises UserError for another one."""
    if missing := {"input_ids", "labels"} - batch.keys():
        raise UserError(f"batch: found no {min(missing)}; expected input_ids and labels, [b, T]")
    # Cloned, since the graph cannot save tensors of torch.inference_mode.
    input_ids, labels = (batch[name].cpu().long().clone() for name in ("input_ids", "labels"))
    if input_ids.dim() != 2 or input_ids.shape != labels.shape:
        shapes = f"{list(input_ids.shape)} and {list(labels.shape)}"
        raise UserError(f"batch: found input_ids and labels of shapes {shapes}; expected the same [b, T]")
    if not bool(_supervised(labels).any()):
        raise UserError("batch: found no supervised token; expected labels other than -100 behind the first token")
    columns = torch.arange(labels.shape[1])
    positions = batch.get("position_ids")
    if positions is not None and not bool((positions.cpu() == columns).all()):
        raise UserError("batch: found position_ids of packed or shifted sequences; expected unpacked ones, from 0")
    lengths = None
    if (mask := batch.get("attention_mask")) is not None:
        counts = mask.cpu().bool().sum(1)
        if mask.shape != labels.shape or not torch.equal(mask.cpu().bool(), columns < counts[:, None]):
            raise UserError(
                "batch: found an attention_mask with other zeros than at the ends of rows; expected padding on the "
                "right (tokenizer.padding_side = 'right')"
            )
        lengths = counts.tolist()
    return Batch(list(range(len(labels))), input_ids, labels, row_lengths=lengths)


def _read_direction(engine: "UnshardedEngine", gradient: Mapping[str, Tensor]) -> list[Tensor]:
    """Flatten a vector by names into the order of the trained parameters."""
    parameters = {name.removeprefix(_WRAPPER): parameter for name, parameter in engine.trainable}
    for name, tensor in gradient.items():
        if name not in parameters:
            raise UserError(f"direction: found {name}; expected trained parameters, such as {next(iter(parameters))}")
        if tensor.shape != (shape := parameters[name].shape):
            raise UserError(f"direction: found {name} of shape {list(tensor.shape)}; expected {list(shape)}")
    vectors = (gradient[name] if name in gradient else torch.zeros_like(p) for name, p in parameters.items())
    return [vector.detach().to(engine.device).flatten() for vector in vectors]


# The checks of `training.start_checks` that need no second sequence, on the first tokens of a batch.


def _check_losses(engine: "UnshardedEngine", batch: Batch) -> None:
    """Compare the losses of the first tokens with those of the model's own forward. Raises UserError if they differ:
    the architecture is not causal, has other positions, or computes its logits in another way."""
    ids = batch.input_ids[:1, :_NUM_CHECKED]
    model: Any = engine.module
    with engine.without_gradient():
        losses = engine.token_losses(Batch([0], ids, ids))
        with use_eager_attention(model.base.config.get_text_config()):
            logits = model.causal_lm(input_ids=ids.to(engine.device), use_cache=False).logits
    expected = cross_entropy(logits[0, :-1].to(losses.dtype), ids[0, 1:].to(engine.device), reduction="none")
    difference = float((losses - expected).abs().mean())
    if not difference <= _TOLERANCE.get(engine.trainable[0][1].dtype, 1e-4) and bool(expected.isfinite().all()):
        raise UserError(
            f"model: found a {type(engine.module.base).__name__}, whose own forward has other losses than a causal "
            f"language model's (by {difference:.2g} nats in the mean); expected a decoder-only model (docs/models.md)"
        )


def _check_derivatives(engine: "UnshardedEngine", batch: Batch) -> None:
    """Compare both modes along the gradient of the first tokens' loss. Raises UserError if they differ, as where an
    architecture's forward disables gradients: forward mode differentiates there."""
    ids = batch.input_ids[:1, :_NUM_CHECKED]
    short, direction = Batch([0], ids, ids), Direction(engine)
    expected = direction.compute([short], normalization="sequence", clip=None).gradient_norm ** 2
    measured = float(compute_jvp_utilities(engine, direction, [short])[0].double().mean())
    if abs(measured - expected) > 0.5 * _TOLERANCE.get(engine.trainable[0][1].dtype, 2e-4) * expected:
        raise UserError(
            f"model: found a {type(engine.module.base).__name__}, of which forward and reverse mode have different "
            f"derivatives ({measured:.6g} and {expected:.6g} along a gradient); expected another model (docs/models.md)"
        )


class UnshardedVectors(FlatShards):
    """Vectors over the trained parameters of one process: one flat tensor per parameter."""

    def __init__(self, trainable: Sequence[nn.Parameter]):
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

    def backward(self, loss: Tensor) -> None:
        loss.backward()


@contextmanager
def unsharded_engine(model: nn.Module) -> Iterator[UnshardedEngine]:
    """A context with an engine around `model` (a causal language model of transformers, or peft's around one, on one
    device), which is restored on exit; autocast is off within it. Raises UserError for another model, one without
    trained parameters, one whose attention has no forward-mode derivative, or in inference mode."""
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
            yield UnshardedEngine(TokenLossModel(model.eval()).eval())
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
