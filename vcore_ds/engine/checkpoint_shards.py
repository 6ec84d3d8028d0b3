"""Checkpoints of the engine's shards through torch.distributed.checkpoint, readable at any world size.

Every tensor is stored as one flat tensor, without ZeRO-3's padding. ZeRO-3 gives each rank `ceil(numel / ranks)`
elements, like `torch.chunk` and so `Shard(0)`. Hence the ranks' shards are the shards of a `DTensor`, a view of the
optimizer's tensors, and reading them at another world size needs no conversion, nor at another expert-parallel size:
the stored tensor holds all experts, in which a block of experts is contiguous. Low-rank factors of a direction are
`Replicate()`, and one rank writes each. With tensor parallelism each rank of the group stores separate tensors
(`checkpoint_name`), which can only be read at the same tensor-parallel size.
"""

import platform
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from vcore_ds.common.errors import RunFailed
from vcore_ds.common.paths import free_space
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.distributed.process_group import cpu_group
from vcore_ds.engine.flat_shards import PartitionedParameter, full_shape, is_expert_block
from vcore_ds.engine.zero3 import Engine

T = TypeVar("T")
State: TypeAlias = Mapping[str, DTensor]  # tensors by their names in a checkpoint
Group: TypeAlias = ProcessGroup  # for callers, which do not import torch.distributed


class ShardedVector(Protocol):
    """A vector over the trained parameters, in ZeRO-3 shards or replicated factors."""

    def shard(self, parameter: nn.Parameter) -> Tensor:
        """This rank's shard for `parameter`, flat, padded like `parameter.ds_tensor`."""
        ...

    def replicas(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Contiguous tensors to store instead of the shard, by the prefix of their names, the same on all ranks that
        shard the parameter; empty to store the shard."""
        ...


class CheckpointFailed(RunFailed):
    """A checkpoint could not be written or read; the message names rank, host, path and cause. Raised on all ranks
    alike."""


def run_on_all_ranks(folder: Path, action: Callable[[], T], group: Group | None = None) -> list[T]:
    """Run `action` and return the results of all ranks. A collective. An error on one rank is raised on all of them:
    otherwise the others would hang in the next collective. `group`: a duplicate of the group of all ranks, for calls
    from another thread than the main one."""
    outcome: tuple[T | None, str | None]
    try:
        outcome = (action(), None)
    except Exception as error:
        outcome = (None, f"{folder}: {type(error).__name__}: {error} ({free_space(folder)})")
    gathered = layout.gather_objects("job", (*outcome, platform.node()), group)
    ranks = enumerate(gathered)
    failed = [f"rank {rank} on host {host}: {problem}" for rank, (_, problem, host) in ranks if problem is not None]
    if failed:
        raise CheckpointFailed("; ".join(failed))
    return [result for result, _, _ in gathered]


def write_state(tensors: State, folder: Path, group: Group | None = None) -> None:
    """Write this rank's shards of the state (from `state_tensors` or `Stager.stage`) to one file in `folder`, and flush
    it. A collective. `group`: as in `run_on_all_ranks`. Raises CheckpointFailed on all ranks alike."""
    writer = _Writer(folder, single_file_per_rank=True, sync_files=True)
    _run_dcp(folder, lambda: dcp.save(dict(tensors), storage_writer=writer, process_group=group or cpu_group()), group)


STAGER_IS_REUSABLE = torch.__version__ >= "2.13"
"""Whether a `DefaultStager` copies more than once: earlier ones close their inner stager after a copy, and the next
raises KeyError."""


class Stager:
    """Copies the state to host memory, so that later steps do not change what is written. Each copy reuses the memory
    of the previous one, if torch allows it; that one must have been written by then."""

    def __init__(self) -> None:
        self._stager: DefaultStager | None = None

    def stage(self, engine: Engine, direction: ShardedVector | None) -> State:
        """Copy `state_tensors`. Synchronises with the device."""
        if self._stager is None or not STAGER_IS_REUSABLE:
            on_gpu = device().type == "cuda"
            # Offloaded tensors are copied too: the optimizer updates them in place.
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=on_gpu,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=on_gpu,  # it waits for all copies at the end
                )
            )
        views = _local_tensors(engine, direction)
        staged = self._stager.stage({name: local.tensor for name, local in views.items()})
        assert isinstance(staged, dict)  # not a future, which only async staging returns
        return {name: local._replace(tensor=staged[name]).as_dtensor() for name, local in views.items()}


class _Writer(dcp.FileSystemWriter):
    """A writer that raises the first cause of an error: on a full disk `torch.save` fails again while it closes its
    archive, and only says "unexpected pos 704 vs 598"."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException = error
            while cause.__context__ is not None:
                cause = cause.__context__
            raise cause from None


def read_state(engine: Engine, direction: ShardedVector | None, folder: Path, num_updates: int) -> None:
    """Load the state that `write_state` wrote, at any world size, into a new engine. A collective. `num_updates`: the
    checkpoint's `engine.num_updates`. Raises CheckpointFailed on all ranks alike."""
    tensors = state_tensors(engine, direction)
    reader = dcp.FileSystemReader(folder)
    _run_dcp(folder, lambda: dcp.load(tensors, storage_reader=reader, process_group=cpu_group()))
    for state in engine.optimizer.optimizer.state.values():
        if "step" in state:
            state["step"].fill_(num_updates)
    with engine.changing_shards():
        for _, parameter in engine.trainable:
            for key in (None, *_list_buffer_names(engine, parameter)):
                _read_padded_shard(engine, parameter, key)[engine.shards.numel(parameter) :].zero_()
            parameter.ds_tensor.data.view(-1).copy_(_read_padded_shard(engine, parameter, None))


def count_local_bytes(tensors: State) -> int:
    """Count the bytes that `write_state` writes on this rank."""
    local = [tensor.to_local() for tensor in tensors.values() if _is_first_replica(tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def state_tensors(engine: Engine, direction: ShardedVector | None) -> dict[str, DTensor]:
    """Views of all tensors that a step changes, by their names in the checkpoint. `direction`: None unless later steps
    need the current direction."""
    return {name: local.as_dtensor() for name, local in _local_tensors(engine, direction).items()}


class _LocalTensor(NamedTuple):
    """This rank's shard or replica of a tensor in the checkpoint."""

    parameter: PartitionedParameter
    tensor: Tensor  # flat, without padding
    is_replica: bool = False  # whether all ranks that shard the parameter have the same tensor

    def as_dtensor(self) -> DTensor:
        num_blocks = layout.size("expert") if is_expert_block(self.parameter) else 1
        numel = num_blocks * self.tensor.numel() if self.is_replica else full_shape(self.parameter).numel()
        mesh = _make_mesh(layout.group("shards"), self.tensor.device.type, num_blocks)
        placements = [Shard(0)] * (mesh.ndim - 1) + [Replicate() if self.is_replica else Shard(0)]
        shape = torch.Size([numel])
        return DTensor.from_local(self.tensor, mesh, placements, run_check=False, shape=shape, stride=(1,))


def _is_first_replica(tensor: DTensor) -> bool:
    """Whether no lower rank has the same shard or replica of the tensor."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # every rank is in the mesh
    return all(i == 0 for i, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())


def _local_tensors(engine: Engine, direction: ShardedVector | None) -> dict[str, _LocalTensor]:
    """Name in the checkpoint -> this rank's shard or replica, as views."""
    tensors = {}
    for name, parameter in engine.trainable:
        name = checkpoint_name(name, layout.rank("tensor"), layout.size("tensor"))
        padded = {"master": _read_padded_shard(engine, parameter, None)}
        padded |= {key: _read_padded_shard(engine, parameter, key) for key in _list_buffer_names(engine, parameter)}
        if direction is not None:
            replicas = direction.replicas(parameter)
            for kind, replica in replicas.items():
                tensors[f"{kind}.{name}"] = _LocalTensor(parameter, replica.detach().view(-1), is_replica=True)
            if not replicas:
                padded["direction"] = direction.shard(parameter)
        for kind, shard in padded.items():
            tensors[f"{kind}.{name}"] = _LocalTensor(parameter, shard.detach()[: engine.shards.numel(parameter)])
    return tensors


def checkpoint_name(name: str, tensor_rank: int, tensor: int) -> str:
    """A parameter's name in a checkpoint, without the prefix for the kind of tensor (`master.`)."""
    return name if tensor == 1 else f"{name}@{tensor_rank}"


def _read_padded_shard(engine: Engine, parameter: nn.Parameter, key: str | None) -> Tensor:
    """The optimizer's shard of the fp32 parameter (key None) or of a buffer: flat, padded, on its device;
    `safe_get_local_fp32_param` would copy it to the accelerator, where an offloaded state does not fit."""
    shard, _ = engine.optimizer._get_fp32_opt_state_partition(
        parameter, release_swap_buffers=False, optim_state_key=key
    )
    return shard.detach()


def _list_buffer_names(engine: Engine, parameter: nn.Parameter) -> list[str]:
    """Names of the optimizer's tensors with the parameter's shape, such as `exp_avg`; none for SGD."""
    group, _, _ = engine.optimizer.grad_position[engine.optimizer.get_param_id(parameter)]
    flat = engine.optimizer.fp32_partitioned_groups_flat[group]
    state = engine.optimizer.optimizer.state.get(flat, {})
    return sorted(key for key, value in state.items() if isinstance(value, Tensor) and value.shape == flat.shape)


def _run_dcp(folder: Path, action: Callable[[], object], group: Group | None = None) -> None:
    """Call torch.distributed.checkpoint. Its exception holds the errors of all ranks; here each rank raises its own, so
    that the message can name rank and host."""
    failure: list[CheckpointException] = []

    def run() -> None:
        try:
            action()
        except CheckpointException as error:
            failure.append(error)
            if layout.rank("job") in error.failures:
                cause = error.failures[layout.rank("job")][0]
                raise RuntimeError(f"{type(cause).__name__}: {cause}") from cause

    run_on_all_ranks(folder, run, group)
    if failure:
        raise CheckpointFailed(f"{folder}: {failure[0]}")


@cache
def _make_mesh(shards: ProcessGroup, device_type: str, num_blocks: int) -> DeviceMesh:
    """Mesh of the ranks that hold shards, in one dimension, or in two with blocks of experts. It only determines each
    rank's slice; nothing is communicated over it."""
    if num_blocks == 1:
        return DeviceMesh.from_group(shards, device_type)
    ranks = torch.arange(layout.size("shards")).view(-1, num_blocks).t()
    return DeviceMesh.from_group(
        [layout.group("expert"), layout.group("expert_shards")],
        device_type,
        mesh=ranks,
        mesh_dim_names=("expert", "expert_shards"),
    )
