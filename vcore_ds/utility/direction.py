"""The probe direction: a gradient kept as this rank's ZeRO-3 shards, in the parameter dtype."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from vcore_ds.data.batches import Batch
from vcore_ds.distributed import layout
from vcore_ds.engine.flat_shards import PartitionedParameter, chunks, is_block_of_experts
from vcore_ds.engine.zero3 import Engine, NonFiniteLoss, count_globally, sequences_by_rank
from vcore_ds.method.adam import adam_direction
from vcore_ds.method.baselines import dft_weights
from vcore_ds.method.objective import Normalization, sequence_shares, token_coefficients
from vcore_ds.method.weights import segment_sum, uniform_weights
from vcore_ds.models.dual_tensors import LowRank
from vcore_ds.utility.low_rank import factorize, has_low_rank, squared_norm


@dataclass(frozen=True)
class Probe:
    """Global numbers measured while a direction was taken."""

    loss: float
    """Nats, under the probe's weights."""
    gradient_norm: float
    """2-norm before clipping."""
    energy: float | None = None
    """Share of `|v|^2` that a low-rank direction keeps; None for the whole direction."""

    def as_metrics(self) -> dict[str, float | None]:
        """By the names of metrics.jsonl."""
        return {"probe_loss": self.loss, "probe_grad_norm": self.gradient_norm, "direction_energy": self.energy}


class Direction:
    """The probe direction `v`: this rank's shards of it, flat, with the layout of the engine's shards.

    This is all that VCORE keeps between the passes of a step: one shard in the parameter dtype.

    Forward mode gathers one group at a time: the trained parameters of one decoder layer, or of one module outside the
    layers. That takes one collective per layer instead of one per weight, two where experts are divided.

    Attributes:
        buffers: the vector, see `FlatShards`.
        groups: the gather groups, each with the module that owns its parameters.
        rank: of the matrices `Q B` that stand for the vector in a JVP pass; None for the vector itself.
        norm: global 2-norm of `v`, kept for the steps between two probes; None before the first one.
    """

    def __init__(self, engine: Engine, rank: int | None = None):
        self.norm: float | None = None
        self.rank = rank
        self._low_rank_seed = 0
        self._tangents: dict[int, Tensor | LowRank] | None = None
        self.groups: list[tuple[nn.Module, list[PartitionedParameter]]] = _gather_groups(engine)
        self.buffers: list[Tensor] = engine.shards.zeros(engine.trainable[0][1].dtype, engine.device)
        self._engine = engine

    def take(
        self,
        batches: Sequence[Batch],
        *,
        normalization: Normalization,
        clip: float | None,
        optimizer: Literal["sgd", "adam"] = "sgd",
        loss_weights: Literal["uniform", "dft"] = "uniform",
        seed: int = 0,
    ) -> Probe:
        """Takes the update over the probe batch `B'` (Algorithm 1, lines 2-3). A collective.

        Parameters, optimizer state, schedule, step counters and the next accumulation are not affected. Dropout is off.

        Args:
            batches: this rank's part of the probe batch; as many on every rank, idle ones included.
            clip: bound on the global norm of the probe gradient; None for no clipping.
            optimizer: `sgd` keeps the gradient; `adam` multiplies it by the Jacobian of Adam's update, which depends
                on the optimizer's moments. Before the optimizer's first step there are none, and `adam` is `sgd`.
            loss_weights: `uniform` over each sequence (the paper), or each token's probability (`dft`).
            seed: of a low-rank direction's random start; the same on all ranks.

        Raises:
            NonFiniteLoss: on all ranks alike, naming the probe's sequences; along such a direction utilities are nan.
        """
        loss = self._backward(batches, normalization, loss_weights)
        norm = self._engine.gradient_norm()
        factor = 1.0 if clip is None or norm <= clip else clip / norm
        self._store(factor, with_adam=optimizer == "adam" and self._engine.num_updates > 0)
        self.norm = self._engine.shards.norm(self.buffers)
        loss = layout.sum_over("data", [loss], batches[0].sequence_parallel)[0]
        if not (math.isfinite(loss) and math.isfinite(norm)):
            what = "gradient" if math.isfinite(loss) else "loss"
            sequences = sequences_by_rank([i for b in batches for i in b.sequence_ids], batches[0].sequence_parallel)
            raise NonFiniteLoss(f"the {what} of the probe batch is not finite; it is summed over {sequences}")
        self._low_rank_seed, self._tangents = seed, None
        return Probe(loss, norm, None if self.rank is None else self._share_kept())

    def _backward(self, batches: Sequence[Batch], normalization: Normalization, loss_weights: str) -> float:
        """Leaves the probe gradient in the engine's shards; returns this rank's part of the probe loss."""
        engine, parts = self._engine, []
        counts = count_globally(batches)
        with engine.without_dropout(), engine.accumulation(len(batches)):
            for batch in batches:
                losses = engine.token_losses(batch)
                index = batch.sequence_index().to(losses.device)
                num_tokens = segment_sum(torch.ones_like(losses), index, batch.num_sequences)
                shares = sequence_shares(num_tokens, counts, normalization)
                weights = uniform_weights(index, batch.num_sequences)
                if loss_weights == "dft":
                    weights = dft_weights(losses, index, batch.num_sequences)
                coefficients = token_coefficients(weights, index, shares)
                loss = (coefficients * losses).sum()
                engine.backward(loss)
                parts.append(loss.detach().double())
        return float(torch.stack(parts).sum())

    def _store(self, factor: float, with_adam: bool) -> None:
        """Makes the vector the engine's gradient, times `factor` and, with Adam, times the Jacobian of its update."""
        engine, shards, moments = self._engine, self._engine.shards, []
        if with_adam:
            step, settings = engine.num_updates + 1, engine.optimizer.param_groups[0]  # the same in all groups
            moments = [shards.optimizer_state(key) for key in ("exp_avg", "exp_avg_sq")]
        for part, gradient, *of_gradient in chunks(self.buffers, shards.gradients(), *moments):
            gradient = gradient.to(engine.device)
            if factor != 1.0:
                gradient = gradient * factor
            if with_adam:
                exp_avg, exp_avg_sq = (moment.to(engine.device) for moment in of_gradient)
                gradient = adam_direction(
                    gradient, exp_avg, exp_avg_sq, step=step, betas=settings["betas"], eps=settings["eps"]
                )
            part.copy_(gradient)

    def shard(self, parameter: nn.Parameter) -> Tensor:
        """This rank's shard for `parameter`, flat, padded like `parameter.ds_tensor`; a view."""
        return self._engine.shards.shard(self.buffers, parameter)

    @property
    def persistent_bytes(self) -> int:
        """On this rank, between steps."""
        factors = [t for x in (self._tangents or {}).values() for t in ((x,) if isinstance(x, Tensor) else x)]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.buffers, *factors))

    def state(self) -> dict[str, float | None]:
        """Numbers that a resumed run needs beside the vector. The factors are not stored: the seed gives them again."""
        return {"norm": self.norm, "low_rank_seed": None if self.rank is None else self._low_rank_seed}

    def load_state(self, state: Mapping[str, float | None]) -> None:
        """Takes what `state` gave; the vector is read with the checkpoint's tensors."""
        self.norm = state["norm"]
        self._low_rank_seed, self._tangents = int(state.get("low_rank_seed") or 0), None

    def low_rank_tangents(self) -> dict[int, Tensor | LowRank]:
        """The whole approximation by `id(parameter)`: factors, and what is not factorized whole. The first call after
        the vector has changed is a collective."""
        assert self.rank is not None
        if self._tangents is None:
            tangents: dict[int, Tensor | LowRank] = {}
            for _, parameters in self.groups:
                matrices = [p for p in parameters if has_low_rank(p, self.rank)]
                others = [p for p in parameters if not has_low_rank(p, self.rank)]
                tangents |= self.finish_gather(self._start_gather(others))
                tangents |= factorize(self._engine.shards, self.buffers, matrices, self.rank, self._low_rank_seed)
            self._tangents = tangents
        return self._tangents

    def _share_kept(self) -> float:
        """Share of the squared norm that the approximation keeps. A collective."""
        tangents, kept = self.low_rank_tangents(), 0.0
        for _, parameter in self._engine.trainable:
            # What several ranks have alike counts once.
            place = layout.rank("expert_shards") if is_block_of_experts(parameter) else layout.rank("shards")
            is_replica = layout.rank("tensor") > 0 and not getattr(parameter, "tensor_model_parallel", False)
            if place == 0 and not is_replica:
                kept += squared_norm(tangents[id(parameter)])
        total = layout.sum_over("job", [kept])[0]
        return total / self.norm**2 if self.norm else 1.0

    def start_gather(self, group: int) -> list["PartialGather"]:
        """Starts to gather one group from all ranks; `finish_gather` waits for it. A collective."""
        return self._start_gather(self.groups[group][1])

    def _start_gather(self, parameters: Sequence[PartitionedParameter]) -> list["PartialGather"]:
        blocks = [parameter for parameter in parameters if is_block_of_experts(parameter)]
        others = [parameter for parameter in parameters if not is_block_of_experts(parameter)]
        started = []
        if others:
            is_whole = layout.size("shards") == 1
            pending = None if is_whole else layout.start_all_gather("shards", self._joined(others))
            started.append(PartialGather(others, pending))
        if blocks:
            is_whole = layout.size("expert_shards") == 1
            pending = None if is_whole else layout.start_all_gather("expert_shards", self._joined(blocks))
            started.append(PartialGather(blocks, pending))
        return started

    def finish_gather(self, started: Sequence["PartialGather"]) -> dict[int, Tensor]:
        """The whole tensors of a group by `id(parameter)`."""
        whole = {}
        for parameters, pending in started:
            if pending is None:
                # Views of the vector, which lies in memory as the parameters do. Of a tangent that lies there in
                # another way PyTorch makes a copy, with zeros for all that the parameter's memory holds beside it: all
                # parameters.
                flat = [self.shard(parameter) for parameter in parameters]
            else:
                numels = [parameter.ds_tensor.numel() for parameter in parameters]
                flat = [part.reshape(-1) for part in pending.wait().view(-1, sum(numels)).split(numels, 1)]
            for parameter, of_all in zip(parameters, flat, strict=True):
                whole[id(parameter)] = of_all[: parameter.ds_numel].view(parameter.ds_shape)
        return whole

    def _joined(self, parameters: Sequence[PartitionedParameter]) -> Tensor:
        # With weight decay, matrices and vectors of a layer lie in different sub-groups.
        shards = [self.shard(parameter) for parameter in parameters]
        return shards[0] if len(shards) == 1 else torch.cat(shards)


class PartialGather(NamedTuple):
    """A gather of those of a group's parameters that are sharded over the same ranks."""

    parameters: list[PartitionedParameter]
    pending: layout.PendingGather | None
    """None where this rank has all of them."""


def _gather_groups(engine: Engine) -> list[tuple[nn.Module, list[PartitionedParameter]]]:
    """Modules whose forward needs a group, each with the group's trained parameters, in the model's order.

    Tied embeddings are in one group; the second module that uses them asks for the same one.
    """
    trainable = {id(parameter): parameter for _, parameter in engine.trainable}
    grouped: set[int] = set()
    groups: list[tuple[nn.Module, list[PartitionedParameter]]] = []

    def add(module: nn.Module, recurse: bool) -> None:
        own = [id(p) for p in module.parameters(recurse)]
        parameters = [trainable[number] for number in own if number in trainable and number not in grouped]
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
