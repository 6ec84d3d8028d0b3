"""Muon under ZeRO-3: unsharded matrices are orthogonalized, each rank a different one.

Momentum and master weights stay in the flat shards. In each round every rank receives the shards of one matrix in the
parameters' dtype, in which it computes, and returns the shards of the result. So each matrix is orthogonalized once,
and a rank holds one at a time in addition to the shards.

Why not DeepSpeed's Muon (0.19.8): docs/decisions/engine.md.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vcore_ds.common.errors import UserError
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.engine.flat_shards import (
    FlatShards,
    PartitionedParameter,
    find_shard_group,
    iterate_chunks,
    unsharded_shape,
)
from vcore_ds.method.optimizers import blend_momentum, muon_direction, muon_update


class ShardedMatrix(NamedTuple):
    """A matrix in a flat tensor of shards."""

    axis: layout.Axis  # the ranks over which it is sharded
    shape: torch.Size  # rows and columns
    numels: list[int]  # elements on each of these ranks
    rank: int
    offset: int  # of this rank's elements in the flat tensor

    @property
    def local(self) -> slice:
        """This rank's elements of the flat tensor."""
        return slice(self.offset, self.offset + self.numels[self.rank])


class Muon(torch.optim.AdamW):
    """Muon for parameter groups with `muon: True`, AdamW for the others, with one learning rate and decoupled weight
    decay. `matrices` (by flat master tensor, the matrices in it) and `dtype` (of the exchanged matrices) are set once
    the parameters are sharded."""

    def __init__(self, groups: list[dict[str, Any]], **settings: Any):
        """`settings`: those of `torch.optim.AdamW`."""
        super().__init__(groups, fused=True, **settings)
        self.matrices: dict[Tensor, list[ShardedMatrix]] = {}
        self.dtype = torch.float32

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure is taken
        """Update the flat tensors in the groups, all Muon's or all AdamW's: DeepSpeed passes one at a time."""
        masters = [(master, group) for group in self.param_groups if group["muon"] for master in group["params"]]
        for master, group in masters:
            self._update(master, group)
        if not masters:
            super().step(closure)

    def _update(self, master: Tensor, group: dict[str, Any]) -> None:
        state, gradient, beta = self.state[master], cast(Tensor, master.grad), group["momentum"]
        state["step"] += 1
        # The result overwrites the gradient, which is not read after the update.
        for momentum, part in iterate_chunks([state["momentum_buffer"]], [gradient]):
            blend = blend_momentum(part, momentum, beta)
            momentum.lerp_(part, 1 - beta)
            part.copy_(blend)
        transform_matrices(self.matrices[master], lambda span: [gradient[span]], muon_update, gradient, self.dtype)
        master.mul_(1 - group["lr"] * group["weight_decay"]).sub_(gradient, alpha=group["lr"])


def transform_matrices(
    matrices: Sequence[ShardedMatrix],
    read: Callable[[slice], Sequence[Tensor]],
    transform: Callable[..., Tensor],
    output: Tensor,
    dtype: torch.dtype,
) -> None:
    """Apply `transform`, which returns a matrix of the shape and dtype of its arguments, to unsharded matrices, and
    write the shards of its results to `output`, a flat tensor. A collective.

    The `matrices` are of one flat tensor, sharded over the same ranks, the same on all ranks. `read` returns shards of
    the arguments of `transform`, from a span of this rank's flat tensors, which may be `output`. `dtype`: of the
    matrices that are exchanged and passed to `transform`.
    """
    if not matrices:
        return
    axis, rank, size = matrices[0].axis, matrices[0].rank, len(matrices[0].numels)
    ordered = sorted(matrices, key=lambda matrix: -matrix.shape.numel())  # the ranks of a round have equal work
    for start in range(0, len(ordered), size):
        current = ordered[start : start + size]
        local = [matrix.numels[rank] for matrix in current] + [0] * (size - len(current))
        mine = current[rank] if rank < len(current) else None
        numels = [0] * size if mine is None else mine.numels
        arguments = zip(*(read(matrix.local) for matrix in current), strict=True)
        received = [
            _exchange(axis, torch.cat([part.to(device(), dtype) for part in parts]), local, numels)
            for parts in arguments
        ]
        result = received[0]
        if mine is not None:
            result = transform(*(argument.view(mine.shape) for argument in received)).reshape(-1)
        results = _exchange(axis, result, numels, local).split(local)
        for matrix, part in zip(current, results, strict=False):
            output[matrix.local] = part


def _exchange(axis: layout.Axis, sent: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
    return sent if len(num_sent) == 1 else layout.exchange_rows(axis, sent, num_sent, num_received)


def write_muon_direction(
    matrices: Sequence[ShardedMatrix], gradient: Tensor, momentum: Tensor, output: Tensor, *, factor: float, beta: float
) -> None:
    """Write the probe direction of the matrices in a flat tensor (`muon_direction`). A collective. `factor`: the
    gradient's factor from clipping; `beta`: the momentum's decay rate."""

    def read(span: slice) -> tuple[Tensor, Tensor]:
        clipped = gradient[span] * factor
        return blend_momentum(clipped, momentum[span], beta), clipped

    transform_matrices(matrices, read, lambda blend, g: muon_direction(blend, g, beta), output, output.dtype)


def find_hidden_matrices(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Find the trained parameters that Muon updates: weight matrices of the decoder layers, and stacks of them, as for
    experts. Embeddings, the output embedding, norms, biases and convolutions are AdamW's. Raises UserError if there are
    none."""
    matrices: set[int] = set()
    for layer in layers:
        for module in layer.modules():
            for name, parameter in module.named_parameters(recurse=False):
                shape = unsharded_shape(parameter)
                is_weight = len(shape) == 3 or (len(shape) == 2 and name.endswith("weight"))
                if is_weight and min(shape[-2:]) > 1 and "bias" not in name and not isinstance(module, nn.Embedding):
                    matrices.add(id(parameter))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) in matrices]
    if not trained:
        raise UserError(
            "optimizer.name: found muon with a model without trained matrices in known decoder layers; expected adamw"
        )
    return trained


def find_matrices(shards: FlatShards, parameters: Iterable[PartitionedParameter]) -> dict[int, list[ShardedMatrix]]:
    """Find the matrices in each flat tensor, by the index of its sub-group; those of a stack one by one."""
    matrices: dict[int, list[ShardedMatrix]] = {}
    for parameter in parameters:
        axis, num_ranks, rank = find_shard_group(parameter)
        position, shape = shards.position(parameter), parameter.ds_shape[-2:]
        step, length = position.shard_numel, shape.numel()
        for start in range(0, parameter.ds_numel, length):
            bounds = [min(max(i * step, start), start + length) for i in range(num_ranks + 1)]
            numels = [end - begin for begin, end in itertools.pairwise(bounds)]
            offset = position.offset + bounds[rank] - rank * step
            matrices.setdefault(position.sub_group, []).append(ShardedMatrix(axis, shape, numels, rank, offset))
    return matrices
