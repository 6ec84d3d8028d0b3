"""The probe direction: a gradient kept as this rank's ZeRO-3 shards, in the parameter dtype."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ..data import Batch
from ..method import (
    GlobalCounts,
    adam_direction,
    segment_sum,
    sequence_shares,
    token_coefficients,
    uniform_weights,
)
from ..method.objective import Normalization
from . import distributed
from .zero3 import Engine


class Direction:
    """`v`, one flat buffer per gather group: this rank's shards of a vector shaped like the trainable parameters.

    This is all that VCORE keeps between the passes of a step: one shard in the parameter dtype.

    A gather group is what is made whole at a time in forward mode: the trainable parameters of one decoder layer, or of
    one module outside the layers. One collective per layer instead of one per weight.

    Attributes:
        norm: global 2-norm of `v`; None until a probe has written it. Steps between two probes use it again.
        displacement: `epsilon * norm` that `epsilon: auto` has found, kept from step to step: the distance at which
            rounding and curvature balance hardly changes, while the gradient's norm does.
    """

    def __init__(self, engine: Engine):
        self.norm: float | None = None
        self.displacement: float | None = None
        self.groups: list[tuple[nn.Module, list[nn.Parameter]]] = _gather_groups(engine)
        self.buffers: list[Tensor] = []
        self._shards: dict[int, Tensor] = {}
        for _, parameters in self.groups:
            shard_numels = [parameter.ds_tensor.numel() for parameter in parameters]
            buffer = torch.zeros(sum(shard_numels), dtype=parameters[0].dtype, device=engine.device)
            self.buffers.append(buffer)
            self._shards.update(zip(map(id, parameters), buffer.split(shard_numels), strict=True))

    def shard(self, parameter: nn.Parameter) -> Tensor:
        """This rank's shard for `parameter`, flat, padded like `parameter.ds_tensor`; a view."""
        return self._shards[id(parameter)]

    @property
    def persistent_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def start_gather(self, group: int) -> tuple[Tensor, torch.distributed.Work]:
        """Begins to gather one group from all ranks; `finish_gather` waits for it. A collective."""
        buffer = self.buffers[group]
        gathered = buffer.new_empty(distributed.world_size() * buffer.numel())
        return gathered, torch.distributed.all_gather_into_tensor(gathered, buffer, async_op=True)

    def finish_gather(self, group: int, gathered: Tensor, work: torch.distributed.Work) -> dict[int, Tensor]:
        """The whole tensors of a group by `id(parameter)`."""
        work.wait()
        per_rank = gathered.view(distributed.world_size(), -1)
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


def count_globally(batches: Sequence[Batch], *, kept_only: bool = False) -> GlobalCounts:
    """Sequences and supervised tokens of a global batch (or of its tokens that are kept), over all ranks, before any
    backward. A collective."""
    num_tokens = torch.cat([b.num_kept_tokens() if kept_only else b.num_supervised_tokens() for b in batches])
    sequences, tokens = distributed.sum_over_ranks([float((num_tokens > 0).sum()), float(num_tokens.sum())])
    return GlobalCounts(num_sequences_global=int(sequences), num_supervised_tokens_global=int(tokens))


def probe_direction(
    engine: Engine,
    batches: Sequence[Batch],
    direction: Direction,
    *,
    normalization: Normalization,
    clip: float | None,
    optimizer: Literal["sgd", "adam"] = "sgd",
) -> tuple[float, float]:
    """Writes the update under uniform weights over the probe batch `B'` into `direction` (Algorithm 1, lines 2-3).

    Leaves parameters, optimizer state, schedule and step counters as they are, and the next accumulation unaware.
    Runs without dropout.

    Args:
        batches: this rank's part of the probe batch; as many on every rank, idle ones included.
        clip: bound on the global norm of the probe gradient, None for none.
        optimizer: `sgd` keeps the gradient, `adam` multiplies it by the Jacobian of Adam's update, from the
            optimizer's own shards. Before the optimizer's first step there are none, and `adam` is `sgd`.

    Returns:
        The probe loss (nats) and the norm of its gradient before clipping, both global.
    """
    counts = count_globally(batches)
    loss_local = 0.0
    with engine.without_dropout(), engine.accumulation(len(batches)):
        for batch in batches:
            losses = engine.token_losses(batch)
            index = batch.sequence_index().to(losses.device)
            n_i = segment_sum(torch.ones_like(losses), index, batch.num_sequences)
            coefficients = token_coefficients(
                uniform_weights(index, batch.num_sequences), index, sequence_shares(n_i, counts, normalization)
            )
            loss = (coefficients * losses).sum()
            engine.backward(loss)
            loss_local += float(loss.detach())
    norm = engine.gradient_norm()
    factor = 1.0 if clip is None or norm <= clip else clip / norm
    num_updates = engine.num_updates if optimizer == "adam" else 0
    for _, parameter in engine.trainable:
        gradient = engine.local_gradient(parameter)
        if factor != 1.0:
            gradient = gradient * factor
        if num_updates > 0:
            gradient = _adam_direction(engine, parameter, gradient, step=num_updates + 1)
        direction.shard(parameter)[: gradient.numel()].copy_(gradient)
    direction.norm = distributed.norm_over_ranks(direction.buffers)
    return distributed.sum_over_ranks([loss_local])[0], norm


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
