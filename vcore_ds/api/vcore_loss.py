"""Token utilities and VCORE's loss for any Hugging Face model in one process or its replicas, on the batches of other
trainers: the passes of a run, without sharding."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vcore_ds.common.errors import UserError
from vcore_ds.data.batches import IGNORED_LABEL, Batch, idle_batch
from vcore_ds.distributed import layout
from vcore_ds.engine.sharded import ShardedEngine, is_deepspeed, sharded_engine
from vcore_ds.engine.zero3 import NonFiniteLoss
from vcore_ds.method import weights as method_weights
from vcore_ds.method.objective import Normalization, loss_ratio_alpha
from vcore_ds.models.attention import comparing_masks
from vcore_ds.models.causal_lm import MODEL_PREFIX, use_eager_attention
from vcore_ds.utility.derivative_check import NUM_COMPARED, compare_derivatives
from vcore_ds.utility.direction import Direction
from vcore_ds.utility.estimators import compute_jvp_utilities
from vcore_ds.utility.unsharded import UnshardedEngine, token_loss_model, unsharded_engine

AnyEngine = UnshardedEngine | ShardedEngine

_NUM_CHECKED = 32

_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest mean difference, nats, of losses by kernels that round differently; 1e-4 in other dtypes."""


@dataclass(frozen=True)
class ProbeDirection:
    """The direction in which a step on probe sequences moves: learning a token of positive utility lowers their mean
    loss."""

    gradient: Mapping[str, Tensor]
    """By name of the trained parameter, in its shape; in the dtype of the first trained parameter."""
    loss: float  # nats
    gradient_norm: float  # 2-norm over all trained parameters, before clipping


def probe_direction(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    normalization: Normalization = "sequence",
    optimizer: Optimizer | None = None,
    clip: float | None = None,
) -> ProbeDirection:
    """Compute the gradient of the loss over all `batches`, without dropout, in one process.

    It has the parameters that require a gradient. The model and its gradients do not change. Activations are not
    checkpointed, so use small batches.

    `model`: a causal language model of transformers, or peft's around one, on one device. `batches`: each with
    `input_ids` and `labels`, `[b, T]`; labels are not shifted, and -100 for tokens that are not supervised; an
    `attention_mask`, if given, is 1 and then 0 in each row. `normalization`: `sequence` for the mean over sequences of
    the mean over their tokens, `token` for the mean over all tokens. `optimizer`: torch's AdamW of the model, or Adam
    without coupled weight decay, whose next update's Jacobian the gradient is multiplied by (`probe.direction: adam`),
    and by each group's learning rate, relative to the largest; None, or one that has made no step, for the gradient
    itself. `clip`: upper bound of the gradient's norm, with Adam that of the training, because its
    moments are those of clipped gradients; None for none. Raises UserError if the model, the optimizer or a batch
    cannot be used, or loss or gradient is inf or NaN.
    """
    with unsharded_engine(model, optimizer) as engine:
        probe_batches = [_read_batch(batch) for batch in batches]
        if not probe_batches:
            raise UserError("batches: found none; expected at least one batch of probe sequences")
        _check_losses(engine, probe_batches[0])
        _check_derivatives(engine, probe_batches[0])
        return _compute_direction(engine, probe_batches, normalization=normalization, clip=clip)[0]


def _compute_direction(
    engine: AnyEngine, probe_batches: Sequence[Batch], *, normalization: Normalization, clip: float | None
) -> tuple[ProbeDirection, list[Tensor]]:
    """As `probe_direction`, without checks of the model; also as flat tensors."""
    direction = Direction(engine)
    try:
        rule: Literal["adam", "sgd"] = "adam" if engine.num_updates else "sgd"
        probe = direction.compute(probe_batches, normalization=normalization, clip=clip, optimizer=rule)
    except NonFiniteLoss as error:
        raise UserError(f"batches: {error}") from None
    gradient = {name.removeprefix(MODEL_PREFIX): direction.shard(parameter) for name, parameter in engine.trainable}
    if isinstance(engine, UnshardedEngine):
        shapes = (parameter.shape for _, parameter in engine.trainable)
        gradient = {name: flat.view(shape) for (name, flat), shape in zip(gradient.items(), shapes, strict=True)}
    return ProbeDirection(gradient, probe.loss, probe.gradient_norm), direction.buffers


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
    with unsharded_engine(model) as engine:
        _check_losses(engine, parsed)
        gradient = direction.gradient if isinstance(direction, ProbeDirection) else direction
        return _compute_utilities(engine, parsed, _read_direction(engine, gradient))


def _compute_utilities(engine: AnyEngine, batch: Batch, buffers: list[Tensor]) -> Tensor:
    """As `token_utilities`, along flat tensors, without comparing the model's losses first."""
    (utilities,) = compute_jvp_utilities(engine, Direction(engine, buffers=buffers), [batch])
    if not engine.is_true_everywhere(bool(torch.isfinite(utilities).all())):
        raise UserError("direction: found a utility that is inf or NaN; expected a finite direction, loss and model")
    return _scatter(utilities, batch.labels)


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
    rows, columns = _find_supervised(labels.to(utilities.device)).nonzero(as_tuple=True)
    values = utilities[rows, columns]
    if not bool(torch.isfinite(values).all()):
        raise UserError("utilities: found inf or NaN at a supervised token; expected finite numbers")
    if kl_budget is not None:
        result = method_weights.gibbs_weights_for_budget(values, rows, len(labels), kl_budget)
    else:
        assert temperature is not None
        result = method_weights.gibbs_weights(values, rows, len(labels), temperature)
    return _scatter(result.weights, labels)


class VcoreLoss:
    """VCORE's loss of a batch, by the preset `recommended`: `loss = vcore(model, batch, optimizer)`.

    The loss is a mean over the sequences of the batch, with a graph: use it as the model's own, divided by the number
    of accumulation steps if there are several (alpha is then that of each part). Under DDP pass DDP's module: each rank
    calls with its own batch and part of the probe, of which some ranks may have no supervised token; probe, alpha and
    the mean of the ranks' losses are those of all ranks' sequences.

    Another model or optimizer, fewer steps than before, or other trained parameters are another training, which begins
    with another direction.

    Attributes:
        direction: the probe direction in use; None before the first call.
        uniform_loss: mean cross-entropy of the last batch (of all ranks) in nats, a scalar, to compare methods by.
        alpha: variance-control factor of the last batch, a scalar.
    """

    def __init__(
        self,
        probe_batches: Iterable[Mapping[str, Tensor]] | Callable[[], Iterable[Mapping[str, Tensor]]],
        *,
        kl_budget: float = 0.005,
        alpha_cap: float | None = 1.0,
        clip: float | None = 1.0,
        every: int = 1,
    ):
        """`probe_batches`: as in `probe_direction`, this rank's part of each probe, or a function that draws it.
        `kl_budget`, `alpha_cap`: as `method.kl_budget` and `method.alpha_cap` of a recipe; `clip`, `every`: as
        `probe.clip`, the trainer's gradient clipping, and `probe.every`, in optimizer steps (calls without an
        optimizer)."""
        self._draw_probe = probe_batches if callable(probe_batches) else partial(list, [*probe_batches])
        self._kl_budget, self._alpha_cap, self._clip, self._every = kl_budget, alpha_cap, clip, every
        self._step, self._step_of_direction = 0, 0
        self._training: tuple[weakref.ref[Any], ...] = ()  # model and optimizer, not kept alive
        self.direction: ProbeDirection | None = None
        self._buffers: list[Tensor] = []  # the direction as flat tensors
        self.uniform_loss = self.alpha = torch.tensor(torch.nan)

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor], optimizer: Optimizer | None = None) -> Tensor:
        """Compute the loss `alpha * mean_i sum_t q[i,t] loss[i,t]` (Algorithm 1), a scalar in nats.

        `model`: as in `probe_direction`, or DDP around it, in training mode. `batch`: `input_ids` and `labels`,
        `[b, T]`, perhaps `attention_mask` and `position_ids`, of unpacked sequences that are padded on the right.
        `optimizer`: AdamW of the model, for directions matched to it; None for the gradient itself. Raises UserError
        as `probe_direction` and `token_utilities`.
        """
        parsed = _read_batch(batch, needs_tokens=False)
        with _engine_of(model, optimizer) as engine:
            num_sequences = _count_sequences(engine, [parsed], "batch")
            direction = self._take_direction(engine, optimizer, parsed)
            utilities = _compute_utilities(engine, parsed, direction)
            replicas, num_ranks = engine.replicas, engine.num_summed_ranks
        labels = batch["labels"].to(utilities.device)
        weights = gibbs_weights(utilities, labels, kl_budget=self._kl_budget)[:, 1:]
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids") if key in batch}
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # the dtype of a run's losses
        losses = cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=IGNORED_LABEL)
        num_tokens = _find_supervised(labels).sum(1).clamp_min(1)
        weighted = (weights.to(losses.dtype) * losses).sum() / num_sequences
        means = torch.stack([(losses.detach().sum(1) / num_tokens).sum() / num_sequences, weighted.detach()])
        if replicas is not None:
            layout.sum_replicas(replicas, means)
        self.uniform_loss = means[0]
        self.alpha = loss_ratio_alpha(means[0], means[1], self._alpha_cap).to(losses)
        return self.alpha * weighted * num_ranks  # DDP and DeepSpeed average gradients over ranks

    def _take_direction(self, engine: AnyEngine, optimizer: Optimizer | None, batch: Batch) -> list[Tensor]:
        """Return the direction in use as flat tensors, of a new probe if that is due. A collective. `batch`: this
        rank's, for the checks of another model."""
        model = cast(nn.Module, engine.module.causal_lm)
        step, owner = (self._step + 1, model) if optimizer is None else (engine.num_updates, optimizer)
        direction, training = self.direction, [ref() for ref in self._training]
        names = {name.removeprefix(MODEL_PREFIX) for name, _ in engine.trainable}
        is_same = direction is not None and training == [model, owner] and direction.gradient.keys() == names
        if direction is None or not (is_same and 0 <= step - self._step_of_direction < self._every):
            if training[:1] != [model]:
                _check_losses(engine, batch)
                _check_derivatives(engine, batch)
            probe = [_read_batch(part, needs_tokens=False) for part in self._draw_probe()] or [idle_batch(0)]
            _count_sequences(engine, probe, "probe_batches")
            if isinstance(engine, ShardedEngine):  # every forward is a collective
                probe += [idle_batch(0)] * (engine.count_most(probe) - len(probe))
            direction, self.direction, self._buffers = None, None, []  # two at once would take more memory
            self.direction, self._buffers = _compute_direction(engine, probe, normalization="sequence", clip=self._clip)
            self._step_of_direction, self._training = step, (weakref.ref(model), weakref.ref(owner))
        self._step = step
        return self._buffers


@contextmanager
def _engine_of(model: nn.Module, optimizer: Optimizer | None) -> Iterator[AnyEngine]:
    """A context with an engine around a model, its replicas (DDP) or its shards (DeepSpeed)."""
    if is_deepspeed(model):
        with token_loss_model(model.module) as losses, sharded_engine(losses, model, optimizer) as sharded:
            yield sharded
        return
    replicas: layout.ReplicaGroup | None = None
    if isinstance(model, DistributedDataParallel):
        model, replicas = model.module, cast(layout.ReplicaGroup, model.process_group)
    with unsharded_engine(model, optimizer, replicas) as engine:
        yield engine


def _count_sequences(engine: AnyEngine, batches: Sequence[Batch], name: str) -> int:
    """Count the sequences with supervised tokens of all ranks. A collective. Raises UserError on all of them if there
    are none."""
    num_sequences = engine.count_globally(batches).num_sequences_global
    if num_sequences == 0:
        where = "" if engine.replicas is None else " on any rank"
        expected = "expected labels other than -100 behind the first token"
        raise UserError(f"{name}: found no supervised token{where}; {expected}")
    return num_sequences


def _find_supervised(labels: Tensor) -> Tensor:
    """Mask of supervised tokens, `[b, T]`; the first token of a row is never predicted."""
    supervised = labels != IGNORED_LABEL
    supervised[:, 0] = False
    return supervised


def _scatter(values: Tensor, labels: Tensor) -> Tensor:
    """Scatter `[N]` to the supervised tokens of `[b, T]`, which is 0 elsewhere."""
    result = values.new_zeros(labels.shape)
    result[_find_supervised(labels.to(values.device))] = values
    return result


def _read_batch(batch: Mapping[str, Tensor], *, needs_tokens: bool = True) -> Batch:
    """Convert a batch of right-padded, unpacked sequences. Raises UserError for another one, and if `needs_tokens` for
    one without supervised tokens."""
    if missing := {"input_ids", "labels"} - batch.keys():
        raise UserError(f"batch: found no {min(missing)}; expected input_ids and labels, [b, T]")
    # Cloned, since the graph cannot save tensors of torch.inference_mode.
    input_ids, labels = (batch[name].cpu().long().clone() for name in ("input_ids", "labels"))
    if input_ids.dim() != 2 or input_ids.shape != labels.shape or input_ids.numel() == 0:
        shapes = f"{list(input_ids.shape)} and {list(labels.shape)}"
        raise UserError(f"batch: found input_ids and labels of shapes {shapes}; expected the same [b, T]")
    if needs_tokens and not bool(_find_supervised(labels).any()):
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


def _read_direction(engine: UnshardedEngine, gradient: Mapping[str, Tensor]) -> list[Tensor]:
    """Flatten a vector by names into the order of the trained parameters."""
    parameters = {name.removeprefix(MODEL_PREFIX): parameter for name, parameter in engine.trainable}
    for name, tensor in gradient.items():
        if name not in parameters:
            raise UserError(f"direction: found {name}; expected trained parameters, such as {next(iter(parameters))}")
        if tensor.shape != (shape := parameters[name].shape):
            raise UserError(f"direction: found {name} of shape {list(tensor.shape)}; expected {list(shape)}")
    vectors = (gradient[name] if name in gradient else torch.zeros_like(p) for name, p in parameters.items())
    return [vector.detach().to(engine.device).flatten() for vector in vectors]


# The checks of `training.start_checks` that need no second sequence, on the first tokens of a batch.


def _take_text(batch: Batch, num_tokens: int) -> Tensor:
    """The first tokens of a batch, `[1, n]`, at least two."""
    ids = batch.input_ids[:1, :num_tokens]
    return ids if ids.shape[1] > 1 else ids.repeat(1, 2)


def _check_losses(engine: AnyEngine, batch: Batch) -> None:
    """Compare the losses of the first tokens with those of the model's own forward. Raises UserError if they differ:
    the architecture is not causal, has other positions, or computes its logits in another way."""
    ids = _take_text(batch, _NUM_CHECKED)
    model: Any = engine.module
    with engine.without_gradient():
        with comparing_masks():
            losses = engine.token_losses(Batch([0], ids, ids))
        with use_eager_attention(model.base.config.get_text_config()):
            logits = model.causal_lm(input_ids=ids.to(engine.device), use_cache=False).logits
    expected = cross_entropy(logits[0, :-1].to(losses.dtype), ids[0, 1:].to(engine.device), reduction="none")
    difference = float((losses - expected).abs().mean())
    is_equal = difference <= _TOLERANCE.get(engine.trainable[0][1].dtype, 1e-4) or not bool(expected.isfinite().all())
    if not engine.is_true_everywhere(is_equal):
        raise UserError(
            f"model: found a {type(engine.module.base).__name__}, whose own forward has other losses than a causal "
            f"language model's (by {difference:.2g} nats in the mean); expected a decoder-only model (docs/models.md)"
        )


def _check_derivatives(engine: AnyEngine, batch: Batch) -> None:
    """Compare both modes on the first tokens (`utility.derivative_check`). Raises UserError if they differ, as where an
    architecture's forward disables gradients: forward mode differentiates there."""
    ids = _take_text(batch, NUM_COMPARED)
    similar = ids[:, 1:] if ids.shape[1] > 2 else ids
    derivatives = compare_derivatives(engine, Batch([0], ids, ids), Batch([0], similar, similar))
    if not derivatives.agree:
        raise UserError(
            f"model: found a {type(engine.module.base).__name__}, of which forward and reverse mode disagree: "
            f"{derivatives}, expected a difference of at most {derivatives.tolerance:g} of it. Choose another model "
            "(docs/models.md)"
        )
