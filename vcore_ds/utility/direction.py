"""The probe direction: a gradient kept as this rank's ZeRO-3 shards, in the parameter dtype."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from vcore_ds.data import Batch
from vcore_ds.distributed import layout
from vcore_ds.engine import Engine, NonFiniteLoss, count_globally, sequences_by_rank
from vcore_ds.method import adam_direction, segment_sum, sequence_shares, token_coefficients, uniform_weights
from vcore_ds.method.objective import Normalization


@dataclass(frozen=True)
class Probe:
    """What was measured while a direction was taken; global numbers."""

    loss: float
    """Nats, under uniform weights."""
    gradient_norm: float
    """2-norm before clipping."""

    def as_metrics(self) -> dict[str, float]:
        return {"probe_loss": self.loss, "probe_grad_norm": self.gradient_norm}


class Direction:
    """`v`, one flat buffer per gather group: this rank's shards of a vector shaped like the trainable parameters.

    This is all that VCORE keeps between the passes of a step: one shard in the parameter dtype.

    A gather group is what is made whole at a time in forward mode: the trainable parameters of one decoder layer, or of
    one module outside the layers. One collective per layer instead of one per weight.

    Attributes:
        norm: global 2-norm of `v`; None until a probe has written it. Steps between two probes use it again.
    """

    def __init__(self, engine: Engine):
        self.norm: float | None = None
        self.groups: list[tuple[nn.Module, list[nn.Parameter]]] = _gather_groups(engine)
        self.buffers: list[Tensor] = []
        self._engine = engine
        self._shards: dict[int, Tensor] = {}
        for _, parameters in self.groups:
            shard_numels = [parameter.ds_tensor.numel() for parameter in parameters]
            buffer = torch.zeros(sum(shard_numels), dtype=parameters[0].dtype, device=engine.device)
            self.buffers.append(buffer)
            self._shards.update(zip(map(id, parameters), buffer.split(shard_numels), strict=True))

    def take(
        self,
        batches: Sequence[Batch],
        *,
        normalization: Normalization,
        clip: float | None,
        optimizer: Literal["sgd", "adam"] = "sgd",
    ) -> Probe:
        """Becomes the update under uniform weights over the probe batch `B'` (Algorithm 1, lines 2-3). A collective.

        Leaves parameters, optimizer state, schedule and step counters as they are, and the next accumulation unaware.
        Runs without dropout.

        Args:
            batches: this rank's part of the probe batch; as many on every rank, idle ones included.
            clip: bound on the global norm of the probe gradient, None for none.
            optimizer: `sgd` keeps the gradient, `adam` multiplies it by the Jacobian of Adam's update, from the
                optimizer's own shards. Before the optimizer's first step there are none, and `adam` is `sgd`.

        Raises:
            NonFiniteLoss: on all ranks alike, with the probe's sequences: along such a direction every utility is nan.
        """
        engine = self._engine
        loss = self._backward(batches, normalization)
        norm = engine.gradient_norm()
        factor = 1.0 if clip is None or norm <= clip else clip / norm
        num_updates = engine.num_updates if optimizer == "adam" else 0
        for _, parameter in engine.trainable:
            gradient = engine.local_gradient(parameter)
            if factor != 1.0:
                gradient = gradient * factor
            if num_updates > 0:
                gradient = _adam_direction(engine, parameter, gradient, step=num_updates + 1)
            self.shard(parameter)[: gradient.numel()].copy_(gradient)
        self.norm = layout.norm_over("shards", self.buffers)
        loss = layout.sum_over("shards", [loss])[0]
        if not (math.isfinite(loss) and math.isfinite(norm)):
            what = "gradient" if math.isfinite(loss) else "loss"
            sequences = sequences_by_rank([i for batch in batches for i in batch.sequence_ids])
            raise NonFiniteLoss(f"the {what} of the probe batch is not finite; it is summed over {sequences}")
        return Probe(loss, norm)

    def _backward(self, batches: Sequence[Batch], normalization: Normalization) -> float:
        """The probe gradient, in the engine's shards; returns this rank's part of the probe loss."""
        engine, loss_local = self._engine, 0.0
        counts = count_globally(batches)
        with engine.without_dropout(), engine.accumulation(len(batches)):
            for batch in batches:
                losses = engine.token_losses(batch)
                index = batch.sequence_index().to(losses.device)
                num_tokens = segment_sum(torch.ones_like(losses), index, batch.num_sequences)
                shares = sequence_shares(num_tokens, counts, normalization)
                coefficients = token_coefficients(uniform_weights(index, batch.num_sequences), index, shares)
                loss = (coefficients * losses).sum()
                engine.backward(loss)
                loss_local += float(loss.detach())
        return loss_local

    def shard(self, parameter: nn.Parameter) -> Tensor:
        """This rank's shard for `parameter`, flat, padded like `parameter.ds_tensor`; a view."""
        return self._shards[id(parameter)]

    @property
    def persistent_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def start_gather(self, group: int) -> layout.PendingGather:
        """Begins to gather one group from all ranks; `finish_gather` waits for it. A collective."""
        return layout.start_all_gather("shards", self.buffers[group])

    def finish_gather(self, group: int, pending: layout.PendingGather) -> dict[int, Tensor]:
        """The whole tensors of a group by `id(parameter)`."""
        per_rank = pending.wait().view(layout.size("shards"), -1)
        whole, offset = {}, 0
        for parameter in self.groups[group][1]:
            end = offset + parameter.ds_tensor.numel()
            flat = per_rank[:, offset:end].reshape(-1)
            whole[id(parameter)] = flat[: parameter.ds_numel].view(parameter.ds_shape)
            offset = end
        return whole


def _gather_groups(engine: Engine) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """(module whose forward needs the group, its trainable parameters), in the model's order.

    Tied embeddings are listed once; the second module that uses them asks for the same group.
    """
    trainable = {id(parameter) for _, parameter in engine.trainable}
    grouped: set[int] = set()
    groups: list[tuple[nn.Module, list[nn.Parameter]]] = []

    def add(module: nn.Module, recurse: bool) -> None:
        parameters = [p for p in module.parameters(recurse) if id(p) in trainable and id(p) not in grouped]
        if parameters:
            grouped.update(map(id, parameters))
            groups.append((module, parameters))

    layers = engine.module.layers
    in_layers = {id(module) for layer in layers for module in layer.modules()}
    first_layer = id(layers[0]) if layers else None
    for module in engine.module.modules():
        if id(module) == first_layer:
            for layer in layers:
                add(layer, recurse=True)
        if id(module) not in in_layers:
            add(module, recurse=False)
    return groups


def _adam_direction(engine: Engine, parameter: nn.Parameter, gradient: Tensor, step: int) -> Tensor:
    settings = engine.optimizer.param_groups[0]  # betas and eps are the same in all groups
    return adam_direction(
        gradient,
        engine.local_optimizer_state(parameter, "exp_avg"),
        engine.local_optimizer_state(parameter, "exp_avg_sq"),
        step=step,
        betas=settings["betas"],
        eps=settings["eps"],
    )
