"""The device mesh: the ranks of a job on named axes, and all collectives of a step, each over a named axis.

docs/architecture.md ("Ranks") lists the axes. Each pass over the model chooses a sequence-parallel size, which splits
`shards` into `data` and `sequence`; functions of these two axes take it as an argument. `tensor` has one size for the
job. Its groups are adjacent ranks, within a node, because every layer exchanges activations over this axis. Ranks along
`tensor` process the same tokens and have the same losses, so a sum over `data` or `shards` counts each token once, and
is the same on all of them. `shards` is also `expert x expert_shards`, independently of `data` and `sequence`.

Before `arrange`, and after the process group has ended, the process is alone: every axis has one rank.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vcore_ds.common.errors import UserError
from vcore_ds.distributed.device import device

Axis = Literal["data", "sequence", "tensor", "shards", "expert", "expert_shards", "job"]

_meshes: dict[str, DeviceMesh] = {}
_is_first = True
_of_trainer: tuple[dist.ProcessGroup, dict[str, DeviceMesh]] | None = None
"""Another trainer's process group, and its meshes."""
_timeout = timedelta(0)
_sequence_groups: dict[int, dist.ProcessGroup] = {}  # this rank's sequence-parallel group, by size


def arrange(tensor: int = 1, expert: int = 1, timeout_minutes: float = 30.0) -> None:
    """Make the device mesh of the process group. A collective; call it once per process group. `timeout_minutes`: for
    collectives; axes that span the job have the timeout of the process group. Raises UserError if a size does not
    divide the world size."""
    global _is_first, _timeout
    num_ranks = dist.get_world_size()
    check_parallel_sizes(num_ranks, tensor, expert)
    _meshes.clear()
    _timeout = timedelta(minutes=timeout_minutes)
    mesh = _make_mesh(torch.arange(num_ranks).view(-1, tensor), ("shards", "tensor"))
    _meshes.update(shards=mesh["shards"], tensor=mesh["tensor"], all=mesh)
    _meshes.update(job=DeviceMesh.from_group(_world(), device().type, mesh_dim_names=("job",)))
    if expert > 1:
        # `expert` is the outer axis: in a tensor sharded along both, each rank's block of experts is contiguous.
        mesh = _make_mesh(torch.arange(num_ranks).view(-1, expert).t(), ("expert", "expert_shards"))
        _meshes.update(expert=mesh["expert"], expert_shards=mesh["expert_shards"])
    _sequence_groups.clear()
    _is_first = dist.get_rank() == 0


@contextmanager
def trainer_ranks() -> Iterator[None]:
    """A context in which the ranks of another trainer's process group, over which it shards one model, are arranged. A
    collective for a new process group. Outside of it the process is alone, since that trainer may also have
    models that are not sharded."""
    global _of_trainer
    if is_arranged():
        yield
        return
    if _of_trainer is None or _of_trainer[0] is not _world():
        arrange()
        _of_trainer = _world(), dict(_meshes)
    _meshes.update(_of_trainer[1])
    try:
        yield
    finally:
        _meshes.clear()


def _make_mesh(ranks: Tensor, axes: tuple[Axis, Axis]) -> DeviceMesh:
    """Make a mesh of all ranks on two axes. `init_device_mesh` would make groups with PyTorch's default timeout."""
    groups = [_make_group(rows) for rows in (ranks.t(), ranks)]
    return DeviceMesh.from_group(groups, device().type, mesh=ranks.int(), mesh_dim_names=axes)


def _make_group(rows: Tensor) -> dist.ProcessGroup:
    """Make a group of the ranks `rows[i]` for each i; return this rank's. A collective."""
    if len(rows) == 1:
        return _world()  # a further NCCL communicator would take memory
    group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=_timeout)
    return group


def make_group(ranks: Iterable[int] | None = None, backend: Literal["gloo"] | None = None) -> dist.ProcessGroup:
    """Make a group of `ranks`, by default all, besides those of the axes: for collectives that run concurrently with
    theirs. A collective of all ranks. `backend`: gloo for objects in host memory; None for that of `job`."""
    return dist.new_group(None if ranks is None else list(ranks), timeout=_timeout, backend=backend)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None  # for type checkers
    return dist.group.WORLD


def check_parallel_sizes(num_ranks: int, tensor: int, expert: int) -> None:
    """Raise UserError if the tensor- or expert-parallel size does not divide the world size."""
    for axis, parallel_size in ("tensor", tensor), ("expert", expert):
        if num_ranks % parallel_size:
            raise UserError(
                f"parallel.{axis}: found {parallel_size} on {num_ranks} ranks; expected a divisor of the number of "
                "ranks"
            )


def is_arranged() -> bool:
    """Whether the device mesh has been made."""
    return bool(_meshes)


def _is_alone() -> bool:
    return not _meshes or not dist.is_initialized()


def make_sequence_groups(sizes: Iterable[int]) -> None:
    """Make the sequence-parallel groups of every size (a divisor of the size of `shards`) that a pass may choose. A
    collective. They are made in advance, on all ranks in the same order: if they were made on first use, ranks at
    different points of a step would hang."""
    for parallel_size in sorted({*sizes} - {1, *_sequence_groups}):
        if parallel_size == size("shards"):
            _sequence_groups[parallel_size] = group("shards")
        else:  # adjacent ranks along `shards`, for each rank along `tensor`
            _sequence_groups[parallel_size] = _make_group(_meshes["all"].mesh.t().reshape(-1, parallel_size))


def connect_groups() -> None:
    """Exchange a number in each group, as a step will. A collective. NCCL connects a group on first use, so this is
    where its memory is taken: before free memory is compared, and not at the first batch that chooses a size."""
    for axis in ("job", "shards", "tensor", "expert_shards"):
        if axis in _meshes:
            sum_over(axis, [0.0])
    number = torch.zeros(1, device=device())
    for parallel_size in sorted(_sequence_groups):
        all_to_all("sequence", number.expand(parallel_size), parallel_size)
    if "expert" in _meshes:
        all_to_all("expert", number.expand(size("expert")))


def mesh(axis: Axis) -> DeviceMesh:
    """The axis as a one-dimensional `DeviceMesh`, for libraries that take one; not `data` or `sequence`."""
    return _meshes[axis]


def group(axis: Axis, sequence_parallel: int = 1) -> dist.ProcessGroup:
    """This rank's process group along an axis; not `data`, and `expert` only with expert parallelism.
    `sequence_parallel`: the size, of at least 2, for `sequence`."""
    return _sequence_groups[sequence_parallel] if axis == "sequence" else _meshes[axis].get_group()


def size(axis: Axis, sequence_parallel: int = 1) -> int:
    """Number of ranks along an axis. `sequence_parallel`: the pass's sequence-parallel size, for `data` and
    `sequence`."""
    if axis == "sequence":
        return sequence_parallel
    if axis == "data":
        return size("shards") // sequence_parallel
    if _is_alone() or (axis == "expert" and axis not in _meshes):
        return 1
    return _meshes[axis].size()


def rank(axis: Axis, sequence_parallel: int = 1) -> int:
    """This rank's index along an axis, from 0; `sequence_parallel` as in `size`."""
    if axis == "sequence":
        return rank("shards") % sequence_parallel
    if axis == "data":
        return rank("shards") // sequence_parallel
    return 0 if _is_alone() else _meshes[axis].get_local_rank()


def is_first() -> bool:
    """Whether this is rank 0, which prints and writes files for the job; valid after the process group's end too."""
    return _is_first


def sum_over(axis: Axis, values: list[float], sequence_parallel: int = 1) -> list[float]:
    """Element-wise sum over the ranks of an axis, in fp64, the same on all of them. A collective. Over `data`, the
    ranks of a sequence-parallel group have the same values, which count once."""
    if _is_alone():
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device())
    if axis == "data":
        if rank("sequence", sequence_parallel) != 0:
            total.zero_()  # not times 0: values may be inf
        axis = "shards"
    dist.all_reduce(total, group=group(axis))
    return total.tolist()


def norm_over(axis: Axis, parts: list[Tensor]) -> float:
    """2-norm in fp64 of a vector that is distributed over the ranks of an axis. A collective."""
    norms = torch._foreach_norm(parts, dtype=torch.float64)  # a few kernels for any number of parts
    return sum_over(axis, [float(torch.stack(norms).square().sum())])[0] ** 0.5


def gather_objects(axis: Axis, value: Any, duplicate: dist.ProcessGroup | None = None) -> list[Any]:
    """All-gather a Python object over an axis. A collective. `duplicate`: a duplicate of the axis's group, for calls
    from another thread than the main one."""
    if _is_alone():
        return [value]
    gathered: list[Any] = [None] * size(axis)
    dist.all_gather_object(gathered, value, group=duplicate or group(axis))
    return gathered


ReplicaGroup = dist.ProcessGroup
"""The ranks on which another trainer (DDP) has replicas of a model."""


def sum_replicas(group: ReplicaGroup, tensor: Tensor) -> None:
    """Sum in place over another trainer's replicas. A collective."""
    dist.all_reduce(tensor, group=group)


@dataclass(frozen=True)
class PendingGather:
    """An all-gather in flight."""

    _gathered: Tensor
    _work: dist.Work

    def wait(self) -> Tensor:
        """Wait for the all-gather; return the concatenated parts of all ranks."""
        self._work.wait()
        return self._gathered


def start_all_gather(axis: Axis, part: Tensor) -> PendingGather:
    """Start an all-gather of flat parts of equal length over an axis. A collective."""
    gathered = part.new_empty(size(axis) * part.numel())
    return PendingGather(gathered, dist.all_gather_into_tensor(gathered, part, group=group(axis), async_op=True))


def all_to_all(axis: Literal["sequence", "expert"], sent: Tensor, sequence_parallel: int = 1) -> Tensor:
    """All-to-all: send `sent[j]` to the j-th rank of the group; `[j]` of the result is from that rank. A collective."""
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group(axis, sequence_parallel))
    return received


def exchange_rows(axis: Axis, sent: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
    """All-to-all of uneven splits: send `num_sent[j]` consecutive rows to the j-th rank of the group; the result holds
    `num_received[j]` rows from each, in order. A collective, also for ranks without rows."""
    received = sent.new_empty(sum(num_received), *sent.shape[1:])
    dist.all_to_all_single(received, sent.contiguous(), num_received, num_sent, group=group(axis))
    return received


def all_gather(axis: Literal["sequence", "tensor", "expert"], part: Tensor, sequence_parallel: int = 1) -> Tensor:
    """All-gather parts of equal shape over an axis: `[...]` to `[ranks, ...]`. A collective."""
    ranks = group(axis, sequence_parallel)
    gathered = part.new_empty(ranks.size() * part.numel())
    dist.all_gather_into_tensor(gathered, part.flatten(), group=ranks)
    return gathered.view(ranks.size(), *part.shape)


def reduce_scatter(axis: Literal["tensor"], parts: Tensor) -> Tensor:
    """Reduce-scatter over an axis: `[ranks, ...]` to `[...]`, the sum of all ranks' parts for this rank. A
    collective."""
    summed = parts.new_empty(parts[0].numel())
    dist.reduce_scatter_tensor(summed, parts.flatten(), group=group(axis))
    return summed.view(parts.shape[1:])


def add_over(axis: Literal["tensor", "shards", "expert_shards"], tensor: Tensor) -> None:
    """All-reduce a tensor in place by summation over an axis. A collective."""
    dist.all_reduce(tensor, group=group(axis))
