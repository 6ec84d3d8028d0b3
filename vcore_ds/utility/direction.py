"""The probe direction: a gradient in the parameter dtype, kept as this rank's ZeRO-3 shards or as low-rank factors."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from vcore_ds.data.batches import Batch
from vcore_ds.distributed import layout
from vcore_ds.engine.flat_shards import (
    PartitionedParameter,
    find_shard_group,
    is_expert_block,
    iterate_chunks,
    unsharded_shape,
)
from vcore_ds.engine.muon import write_muon_direction
from vcore_ds.engine.zero3 import Engine, NonFiniteLoss, describe_sequences
from vcore_ds.method.objective import Normalization, sequence_shares, token_coefficients
from vcore_ds.method.optimizers import adam_direction
from vcore_ds.method.weights import segment_sum, uniform_weights
from vcore_ds.models.dual_tensors import LowRank
from vcore_ds.utility.low_rank import factorize, has_low_rank, squared_norm


@dataclass(frozen=True)
class Probe:
    """Loss and gradient norm of a probe batch, over all ranks."""

    loss: float  # nats, under the probe's weights
    gradient_norm: float  # 2-norm before clipping
    energy: float | None = None  # see `Direction.measure_energy`; None for a full-rank direction

    def as_metrics(self) -> dict[str, float | None]:
        """The values under their names in metrics.jsonl."""
        return {"probe_loss": self.loss, "probe_grad_norm": self.gradient_norm, "direction_energy": self.energy}


class Direction:
    """The probe direction `v`, as this rank's flat shards in the layout of the engine's shards (`buffers`), or as
    low-rank factors.

    One shard in the parameter dtype is all that VCORE keeps between the passes of a step. With a `rank` it keeps the
    factors `Q B` instead, by `rank_passes` passes of subspace iteration, the same on all ranks, and the shards exist
    only while `compute` runs. `norm`: global 2-norm of `v`, for the steps between two probes too; None before the first
    probe. `fp8_tangents`: whether JVP passes multiply the tangents of activations by weights in FP8.

    A JVP pass along shards all-gathers one of the `groups` at a time: the trained parameters of one decoder layer, or
    of one module outside the layers, with the module that owns them. This takes one collective per layer (two with
    expert parallelism) instead of one per weight.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int | None = None,
        rank_passes: int = 1,
        *,
        fp8_tangents: bool = False,
        buffers: list[Tensor] | None = None,
    ):
        """`buffers`: shards of a direction that was computed before, kept even with a `rank`; None for zeros until
        `compute`."""
        self.norm: float | None = None
        self.rank, self.rank_passes, self.fp8_tangents = rank, rank_passes, fp8_tangents
        self.groups: list[tuple[nn.Module, list[PartitionedParameter]]] = _list_gather_groups(engine)
        self._engine = engine
        self._low_rank_seed = 0
        self._keeps_shards = rank is None or buffers is not None
        self._tangents: dict[int, Tensor | LowRank] | None = None
        self.buffers: list[Tensor] = buffers or (self._make_zero_buffers() if rank is None else [])
        if rank is not None and buffers is None:
            self._tangents = self._make_zero_tangents(rank)

    def compute(
        self,
        batches: Sequence[Batch],
        *,
        normalization: Normalization,
        clip: float | None,
        optimizer: Literal["sgd", "adam", "muon"] = "sgd",
        loss_weights: Literal["uniform", "dft"] = "uniform",
        seed: int = 0,
    ) -> Probe:
        """Compute `v` as the update direction of the probe batch `B'` (Algorithm 1, lines 2-3), without dropout. A
        collective. Parameters, optimizer state, schedule, step counters and gradient accumulation do not change.
        `batches`: this rank's micro-batches of the probe, the same number on every rank, idle ranks included; `clip`:
        bound on the global norm of the probe gradient, None for no clipping; `loss_weights`: `uniform` over each
        sequence (the paper), or each token's probability (`dft`); `seed`: of the random sketch of a low-rank direction,
        the same on all ranks.

        `optimizer: sgd` keeps the gradient; `adam` and `muon` multiply it by the transposed Jacobian of that
        optimizer's update, which depends on its moments. Before its first step there are none, and the gradient is
        kept. Raises NonFiniteLoss, on all ranks, naming the probe's sequences; utilities along such a direction would
        be NaN.
        """
        loss = self._backward(batches, normalization, loss_weights)
        norm = self._engine.gradient_norm()
        factor = 1.0 if clip is None or norm <= clip else clip / norm
        if not self._keeps_shards:
            self._tangents, self.buffers = None, self._make_zero_buffers()
        self._store(factor, with_moments=optimizer != "sgd" and self._engine.num_updates > 0)
        self.norm = self._engine.shards.norm(self.buffers)
        loss = self._engine.sum_over_data([loss], batches[0].sequence_parallel)[0]
        if not (math.isfinite(loss) and math.isfinite(norm)):
            quantity = "gradient" if math.isfinite(loss) else "loss"
            sequences = describe_sequences([i for b in batches for i in b.sequence_ids], batches[0].sequence_parallel)
            raise NonFiniteLoss(f"the {quantity} of the probe batch is not finite; it is summed over {sequences}")
        self._low_rank_seed, self._tangents = seed, None
        energy = None if self.rank is None else self.measure_energy()  # which computes the factors
        if not self._keeps_shards:
            self.buffers = []
        return Probe(loss, norm, energy)

    def _backward(self, batches: Sequence[Batch], normalization: Normalization, loss_weights: str) -> float:
        """Accumulate the probe gradient in the engine's shards; return this rank's term of the probe loss."""
        engine, parts = self._engine, []
        counts = engine.count_globally(batches)
        with engine.without_dropout(), engine.accumulation(len(batches)):
            for batch in batches:
                losses = engine.token_losses(batch)
                index = batch.sequence_index().to(losses.device)
                num_tokens = segment_sum(torch.ones_like(losses), index, batch.num_sequences)
                shares = sequence_shares(num_tokens, counts, normalization)
                weights = uniform_weights(index, batch.num_sequences, losses.dtype)
                if loss_weights == "dft":  # probabilities
                    weights = torch.exp(-losses.detach()) * weights
                loss = (token_coefficients(weights, index, shares) * losses).sum()
                engine.backward(loss)
                parts.append(loss.detach().double())
        return float(torch.stack(parts).sum())

    def _store(self, factor: float, with_moments: bool) -> None:
        """Store the engine's gradient, multiplied by `factor` and, with moments, by the transposed Jacobian of the
        optimizer's update."""
        engine, shards = self._engine, self._engine.shards
        gradients, moments, steps = shards.gradients(), [], []
        matrices = engine.matrices if with_moments else {}
        rest = [i for i in range(len(gradients)) if i not in matrices]
        if with_moments:
            steps = engine.adam_steps(rest)
            moments = [shards.optimizer_state(key, rest) for key in ("exp_avg", "exp_avg_sq")]
        for number, i in enumerate(rest):
            vectors = ([vector] for vector in (self.buffers[i], gradients[i], *(moment[number] for moment in moments)))
            for part, gradient, *adam_moments in iterate_chunks(*vectors):
                gradient = gradient.to(engine.device)
                if factor != 1.0:
                    gradient = gradient * factor
                if with_moments:
                    exp_avg, exp_avg_sq = (moment.to(engine.device) for moment in adam_moments)
                    gradient = adam_direction(gradient, exp_avg, exp_avg_sq, steps[number])
                part.copy_(gradient)
        for i, in_group in matrices.items():
            (momentum,) = shards.optimizer_state("momentum_buffer", [i])
            write_muon_direction(
                in_group,
                gradients[i],
                momentum,
                self.buffers[i],
                factor=factor,
                beta=engine.optimizer.param_groups[0]["momentum"],  # the same in all groups
            )

    def _make_zero_buffers(self) -> list[Tensor]:
        return self._engine.shards.zeros(self._engine.trainable[0][1].dtype, self._engine.device)

    def _make_zero_tangents(self, rank: int) -> dict[int, Tensor | LowRank]:
        engine, tangents = self._engine, dict[int, Tensor | LowRank]()
        options: Any = dict(dtype=engine.trainable[0][1].dtype, device=engine.device)
        for _, parameter in engine.trainable:
            shape = unsharded_shape(parameter)
            if has_low_rank(parameter, rank):
                left = torch.zeros(*shape[:-1], rank, **options)
                tangents[id(parameter)] = LowRank(left, torch.zeros(*shape[:-2], rank, shape[-1], **options))
            else:
                tangents[id(parameter)] = torch.zeros(shape, **options)
        return tangents

    def shard(self, parameter: nn.Parameter) -> Tensor:
        """This rank's shard of `v` for `parameter`: a flat view, padded like `parameter.ds_tensor`. Requires kept
        shards."""
        return self._engine.shards.shard(self.buffers, parameter)

    def replicas(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Tensors that are kept for `parameter` instead of its shard, by kind, the same on all ranks that shard the
        parameter; empty if shards are kept."""
        if self._keeps_shards:
            return {}
        tangent = self.low_rank_tangents()[id(parameter)]
        if isinstance(tangent, Tensor):
            return {"direction": tangent}
        return {"direction_left": tangent.left, "direction_right": tangent.right}

    def is_nonzero(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether `v` has an element other than 0 in these parameters. A collective."""
        if self.rank is None:
            return layout.norm_over("job", [self.shard(parameter) for parameter in parameters]) > 0
        tangents = [self.low_rank_tangents()[id(parameter)] for parameter in parameters]
        return layout.norm_over("job", [x if isinstance(x, Tensor) else x.right for x in tangents]) > 0

    @property
    def persistent_bytes(self) -> int:
        """Bytes that the direction holds on this rank between steps."""
        factors = [t for x in (self._tangents or {}).values() for t in ((x,) if isinstance(x, Tensor) else x)]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.buffers, *factors))

    def low_rank_tangents(self) -> dict[int, Tensor | LowRank]:
        """Low-rank factors by `id(parameter)`, and gathered tensors for parameters that are not factorized. If shards
        are kept, the first call after `v` has changed is a collective."""
        assert self.rank is not None
        if self._tangents is None:
            tangents: dict[int, Tensor | LowRank] = {}
            for _, parameters in self.groups:
                matrices = [p for p in parameters if has_low_rank(p, self.rank)]
                others = [p for p in parameters if not has_low_rank(p, self.rank)]
                # Cloned: on one rank these are views of the shards, and would keep all of them alive.
                tangents |= {key: x.clone() for key, x in self.finish_gather(self._start_gather(others)).items()}
                tangents |= factorize(
                    self._engine.shards, self.buffers, matrices, self.rank, self._low_rank_seed, self.rank_passes
                )
            self._tangents = tangents
        return self._tangents

    def with_rank(self, rank: int | None, *, fp8_tangents: bool = False) -> "Direction":
        """Return a direction that shares this one's shards, with another `rank` for JVP passes."""
        assert self._keeps_shards
        other = copy.copy(self)
        other.rank, other.fp8_tangents, other._tangents = rank, fp8_tangents, None
        return other

    def measure_energy(self) -> float:
        """Measure the share of `|v|^2` that the low-rank approximation keeps. Requires kept shards, except within
        `compute`. A collective."""
        tangents, kept, full = self.low_rank_tangents(), [], []
        zero = torch.zeros((), dtype=torch.float64, device=self._engine.device)
        for _, parameter in self._engine.trainable:
            # Factors are replicated over the ranks that shard a parameter, and some parameters over tensor-parallel
            # ranks: one rank counts each.
            is_replica = layout.rank("tensor") > 0 and not getattr(parameter, "tensor_model_parallel", False)
            full.append(zero if is_replica else squared_norm(self.shard(parameter)))
            is_counted = not is_replica and find_shard_group(parameter).rank == 0
            kept.append(squared_norm(tangents[id(parameter)]) if is_counted else zero)
        sums = [torch.stack(parts).sum() for parts in (kept, full)]
        part, total = layout.sum_over("job", torch.stack(sums).tolist())
        return part / total if total > 0 else 1.0

    def start_gather(self, group: int) -> list["ShardGroupGather"]:
        """Start the all-gather of one group; `finish_gather` waits for it. A collective."""
        return self._start_gather(self.groups[group][1])

    def _start_gather(self, parameters: Sequence[PartitionedParameter]) -> list["ShardGroupGather"]:
        gathers = []
        for with_experts in (False, True):
            group = [parameter for parameter in parameters if is_expert_block(parameter) == with_experts]
            if not group:
                continue
            pending, ranks = None, find_shard_group(group[0])
            if ranks.size > 1:
                # Concatenated: with weight decay, matrices and vectors of a layer are in different sub-groups.
                shards = [self.shard(parameter) for parameter in group]
                shard = shards[0] if len(shards) == 1 else torch.cat(shards)
                if with_experts:
                    pending = layout.start_all_gather("expert_shards", shard)
                else:
                    pending = layout.start_all_gather("shards", shard)
            gathers.append(ShardGroupGather(group, pending))
        return gathers

    def finish_gather(self, gathers: Sequence["ShardGroupGather"]) -> dict[int, Tensor]:
        """Wait for a group's all-gathers; return the unsharded tensors by `id(parameter)`."""
        tensors = {}
        for parameters, pending in gathers:
            if pending is None:
                # Views of the shards, whose memory layout is that of the parameters. PyTorch copies a tangent with
                # another layout, and allocates zeros for the rest of the parameter's storage: all parameters.
                flat = [self.shard(parameter) for parameter in parameters]
            else:
                numels = [parameter.ds_tensor.numel() for parameter in parameters]
                flat = [part.reshape(-1) for part in pending.wait().view(-1, sum(numels)).split(numels, 1)]
            for parameter, padded in zip(parameters, flat, strict=True):
                shape = unsharded_shape(parameter)
                tensors[id(parameter)] = padded[: shape.numel()].view(shape)
        return tensors


class ShardGroupGather(NamedTuple):
    """All-gather of the parameters of a gather group that are sharded over the same ranks."""

    parameters: list[PartitionedParameter]
    pending: layout.PendingGather | None  # None if the parameters are not sharded


def _list_gather_groups(engine: Engine) -> list[tuple[nn.Module, list[PartitionedParameter]]]:
    """List modules with the trained parameters that are all-gathered for their forward, in the model's order. Tied
    embeddings belong to the group of the first module; the second one gathers that group again."""
    trainable = {id(parameter): parameter for _, parameter in engine.trainable}
    grouped: set[int] = set()
    groups: list[tuple[nn.Module, list[PartitionedParameter]]] = []

    def add(module: nn.Module, recurse: bool) -> None:
        ids = [id(p) for p in module.parameters(recurse)]
        parameters = [trainable[key] for key in ids if key in trainable and key not in grouped]
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
