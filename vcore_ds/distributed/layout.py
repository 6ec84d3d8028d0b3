"""The ranks of a job on named axes, and every reduction that a step needs, each over an axis that it names.

| axis | ranks along it | of what there is one a rank |
|---|---|---|
| `data` | work on different rows | rows of a batch |
| `sequence` | share a row, each with a part of its tokens | parts of a row |
| `tensor` | share a layer, each with a part of its heads and columns | parts of a layer |
| `shards` | `data x sequence` | ZeRO-3 shards, and distinct tokens: sums over tokens and norms of shards |
| `job` | all of them | processes: stop requests, failures, messages |

`sequence` and `tensor` have size 1: a row and a layer are whole on every rank.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vcore_ds.distributed.device import device

Axis = Literal["data", "sequence", "tensor", "shards", "job"]

_meshes: dict[str, DeviceMesh] = {}


def arrange() -> None:
    """Puts the ranks of the process group on their axes. A collective; once a process."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(), 1, 1), mesh_dim_names=("data", "sequence", "tensor"))
    _meshes.update(data=mesh["data"], sequence=mesh["sequence"], tensor=mesh["tensor"])
    # torch reuses the job's own group for an axis that spans it, so no further communicator is made.
    _meshes["shards"] = mesh["data", "sequence"]._flatten("shards")
    _meshes["job"] = mesh._flatten("job")


def is_arranged() -> bool:
    return bool(_meshes)


def mesh(axis: Axis) -> DeviceMesh:
    """The axis as torch's own one-dimensional mesh, for libraries that take one."""
    return _meshes[axis]


def group(axis: Axis) -> dist.ProcessGroup:
    """This rank's group along an axis."""
    return _meshes[axis].get_group()


def size(axis: Axis) -> int:
    """Number of ranks along an axis."""
    return _meshes[axis].size()


def rank(axis: Axis) -> int:
    """This rank's place along an axis, from 0."""
    return _meshes[axis].get_local_rank()


def is_first() -> bool:
    """Whether this rank speaks and writes for the job."""
    return rank("job") == 0


def sum_over(axis: Axis, values: list[float]) -> list[float]:
    """Element-wise sum over the ranks of an axis, in fp64. A collective."""
    total = torch.tensor(values, dtype=torch.float64, device=device())
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
