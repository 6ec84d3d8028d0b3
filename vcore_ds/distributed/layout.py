"""The ranks of a job on named axes, and every exchange that a step needs, each over an axis that it names.

| axis | ranks along it | of what there is one a rank |
|---|---|---|
| `data` | work on different rows | rows of a batch |
| `sequence` | a sequence-parallel group: parts of the tokens of the same rows | parts of a row |
| `tensor` | a tensor-parallel group: parts of the heads and columns of every layer | parts of a layer |
| `shards` | `data x sequence`, with the same part of every layer | ZeRO-3 shards, and distinct tokens |
| `expert` | an expert-parallel group: neighbours along `shards` | parts of the experts of every mixture layer |
| `expert_shards` | ranks that have the same experts | ZeRO-3 shards of those experts |
| `job` | all of them | processes: stop requests, failures, messages |

How `shards` is divided into `data` and `sequence` is a matter of the pass: each pass over the model has a degree of
sequence parallelism, the number of neighbouring ranks in a group, and whatever is said of one of these two axes is
said for a degree. The size of `tensor` is that of the job. Its groups are neighbouring ranks of the job, so that
they are in one node: each layer exchanges its activations over this axis.

`shards` is also `expert x expert_shards`, a division that has nothing to do with that into `data` and `sequence`: the
ranks of an expert-parallel group have tokens of their own, which they exchange in each mixture layer.

Ranks along `tensor` work on the same rows and hold the same losses, so a sum over `data` or `shards` counts tokens
once, and is the same on each of them.
"""

from collections.abc import Iterable
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
_is_first = False
_timeout = timedelta(0)
_sequence_groups: dict[int, dist.ProcessGroup] = {}
"""This rank's sequence-parallel group, by degree."""


def arrange(tensor: int = 1, expert: int = 1, timeout_minutes: float = 30.0) -> None:
    """Puts the ranks of the process group on their axes. A collective; once a process group.

    Args:
        tensor: ranks of a tensor-parallel group.
        expert: ranks of an expert-parallel group; more than one only where `tensor` is 1.
        timeout_minutes: a collective that takes longer ends the run with an error instead of hanging; of all axes but
            those that span the job, whose group has a limit of its own.

    Raises:
        UserError: one of them does not divide the world size.
    """
    global _is_first, _timeout
    num_ranks = dist.get_world_size()
    check_degrees(num_ranks, tensor, expert)
    _meshes.clear()
    _timeout = timedelta(minutes=timeout_minutes)
    mesh = _make_mesh(torch.arange(num_ranks).view(-1, tensor), ("shards", "tensor"))
    _meshes.update(shards=mesh["shards"], tensor=mesh["tensor"], all=mesh)
    _meshes.update(job=DeviceMesh.from_group(_whole_job(), device().type, mesh_dim_names=("job",)))
    if expert > 1:
        # Experts first: of a tensor that is divided along both, each group member's block of experts is contiguous.
        of_experts = torch.arange(num_ranks).view(-1, expert).t()
        mesh = _make_mesh(of_experts, ("expert", "expert_shards"))
        _meshes.update(expert=mesh["expert"], expert_shards=mesh["expert_shards"])
    _sequence_groups.clear()
    _is_first = dist.get_rank() == 0


def _make_mesh(ranks: Tensor, axes: tuple[Axis, Axis]) -> DeviceMesh:
    """A mesh of all ranks on two axes. Not by `init_device_mesh`, whose groups have PyTorch's own limit of time."""
    groups = [_group_of(rows) for rows in (ranks.t(), ranks)]
    return DeviceMesh.from_group(groups, device().type, mesh=ranks.int(), mesh_dim_names=axes)


def _group_of(rows: Tensor) -> dist.ProcessGroup:
    """This rank's group, of groups with the ranks `rows[i]`. A collective."""
    if len(rows) == 1:
        return _whole_job()  # no further communicator, which NCCL keeps memory for
    own, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=_timeout)
    return own


def copy_of_job() -> dist.ProcessGroup:
    """A further group of all ranks, for collectives that run beside those of `job`. A collective."""
    return dist.new_group(timeout=_timeout)


def _whole_job() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None  # typed as what it is without a process group, too
    return dist.group.WORLD


def check_degrees(num_ranks: int, tensor: int, expert: int) -> None:
    """Raises UserError where the degree of tensor or expert parallelism does not divide the world size."""
    for axis, degree in ("tensor", tensor), ("expert", expert):
        if num_ranks % degree:
            raise UserError(
                f"parallel.{axis}: found {degree} on {num_ranks} ranks; expected a divisor: {axis}-parallel groups "
                "have as many ranks"
            )


def is_arranged() -> bool:
    """Whether the ranks have their places on the axes."""
    return bool(_meshes)


def make_sequence_groups(degrees: Iterable[int]) -> None:
    """Makes the sequence-parallel groups of every degree that a pass may choose. A collective.

    All of them up front, on all ranks in the same order: a group made when a pass first needs it would be made by
    ranks that stand at different places of a step, and hang. NCCL connects a group when it is first used, so a degree
    that no pass chooses costs no memory.

    Args:
        degrees: divisors of the number of `shards`; those that have their groups already are passed over.
    """
    for degree in sorted(set(degrees)):
        if degree == 1 or degree in _sequence_groups:
            continue
        if degree == size("shards"):
            _sequence_groups[degree] = group("shards")
            continue
        # Neighbours along `shards`, for each place along `tensor`.
        _sequence_groups[degree] = _group_of(_meshes["all"].mesh.t().reshape(-1, degree))


def mesh(axis: Axis) -> DeviceMesh:
    """The axis as torch's own one-dimensional mesh, for libraries that take one; not `data` or `sequence`."""
    return _meshes[axis]


def group(axis: Axis) -> dist.ProcessGroup:
    """This rank's group along an axis, not `data` or `sequence`; along those of experts where they are divided."""
    return _meshes[axis].get_group()


def size(axis: Axis, sequence_parallel: int = 1) -> int:
    """Number of ranks along an axis.

    Args:
        sequence_parallel: degree of the pass, for `data` and `sequence`.
    """
    if axis == "sequence":
        return sequence_parallel
    if axis == "expert" and axis not in _meshes:
        return 1
    return size("shards") // sequence_parallel if axis == "data" else _meshes[axis].size()


def rank(axis: Axis, sequence_parallel: int = 1) -> int:
    """This rank's place along an axis, from 0; `sequence_parallel` as in `size`."""
    if axis == "sequence":
        return rank("shards") % sequence_parallel
    return rank("shards") // sequence_parallel if axis == "data" else _meshes[axis].get_local_rank()


def is_first() -> bool:
    """Whether this rank speaks and writes for the job; also after the process group has ended."""
    return _is_first


def sum_over(axis: Axis, values: list[float], sequence_parallel: int = 1) -> list[float]:
    """Element-wise sum over the ranks of an axis, in fp64, the same on every rank of it. A collective.

    Over `data` the ranks of a sequence-parallel group hold the same values, and one of them counts.
    """
    total = torch.tensor(values, dtype=torch.float64, device=device())
    if axis == "data":
        if rank("sequence", sequence_parallel) != 0:
            total.zero_()  # not times 0: values may be inf
        axis = "shards"
    dist.all_reduce(total, group=group(axis))
    return total.tolist()


def norm_over(axis: Axis, parts: list[Tensor]) -> float:
    """2-norm of a vector of which every rank of an axis holds some parts, in fp64. A collective."""
    norms = torch._foreach_norm(parts, dtype=torch.float64)  # a few kernels, whatever the number of parts
    return sum_over(axis, [float(torch.stack(norms).square().sum())])[0] ** 0.5


def gather_objects(axis: Axis, value: Any) -> list[Any]:
    """`value` of every rank of an axis, on each of them. A collective."""
    gathered: list[Any] = [None] * size(axis)
    dist.all_gather_object(gathered, value, group=group(axis))
    return gathered


@dataclass(frozen=True)
class PendingGather:
    """A gather that runs while this rank computes."""

    _gathered: Tensor
    _work: dist.Work

    def wait(self) -> Tensor:
        """The parts of all ranks, one after the other, flat."""
        self._work.wait()
        return self._gathered


def start_all_gather(axis: Axis, part: Tensor) -> PendingGather:
    """Begins to gather equally long flat parts from the ranks of an axis. A collective."""
    gathered = part.new_empty(size(axis) * part.numel())
    return PendingGather(gathered, dist.all_gather_into_tensor(gathered, part, group=group(axis), async_op=True))


def all_to_all(axis: Literal["sequence", "expert"], sent: Tensor, sequence_parallel: int = 1) -> Tensor:
    """`sent[j]` goes to the j-th rank of this rank's group; the result holds at `[j]` what that rank sent here. A
    collective."""
    among = _sequence_groups[sequence_parallel] if axis == "sequence" else group(axis)
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=among)
    return received


def exchange_rows(axis: Literal["expert"], sent: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
    """The first `num_sent[0]` rows go to the first rank of this rank's group, and so on; the result holds the
    `num_received[0]` rows of that rank, then those of the next. A collective, also of ranks that have no rows."""
    received = sent.new_empty(sum(num_received), *sent.shape[1:])
    dist.all_to_all_single(received, sent.contiguous(), num_received, num_sent, group=group(axis))
    return received


def all_gather(axis: Literal["sequence", "tensor", "expert"], part: Tensor, sequence_parallel: int = 1) -> Tensor:
    """The equally shaped parts of the ranks of this rank's group, `[ranks, ...]`. A collective."""
    among = _sequence_groups[sequence_parallel] if axis == "sequence" else group(axis)
    gathered = part.new_empty(among.size() * part.numel())
    dist.all_gather_into_tensor(gathered, part.flatten(), group=among)
    return gathered.view(among.size(), *part.shape)


def reduce_scatter(axis: Literal["tensor"], parts: Tensor) -> Tensor:
    """The sum over the ranks of an axis of what each has for this rank: `[ranks, ...]` to `[...]`. A collective."""
    summed = parts.new_empty(parts[0].numel())
    dist.reduce_scatter_tensor(summed, parts.flatten(), group=group(axis))
    return summed.view(parts.shape[1:])


def add_over(axis: Literal["tensor", "shards", "expert_shards"], tensor: Tensor) -> None:
    """Replaces a tensor by its sum over the ranks of an axis, the same on each of them. A collective."""
    dist.all_reduce(tensor, group=group(axis))
