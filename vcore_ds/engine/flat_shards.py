"""This rank's ZeRO-3 shards as DeepSpeed stores them: a few flat tensors for any number of parameters.

DeepSpeed's `safe_get_local_*` and `safe_set_local_*` handle one parameter at a time, and each call synchronises with a
CUDA stream, thousands of times per step for a large model. The flat tensors hold all gradients, master weights or
moments at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device

EXPERT_FAMILY = "autoep_expert"  # DeepSpeed's name for parameters that are a rank's block of the experts


class PartitionedParameter(nn.Parameter):
    """Type of a parameter that ZeRO-3 has sharded. There are no instances: DeepSpeed adds these attributes to
    `nn.Parameter` objects."""

    ds_numel: int  # elements of the unsharded parameter
    ds_shape: torch.Size  # shape of the unsharded parameter
    ds_tensor: Tensor  # this rank's shard, flat, with its padding
    ds_secondary_tensor: Tensor | None  # the second shard, of hierarchical partitioning

    ds_zero_placement_family: str  # `EXPERT_FAMILY` for a block of experts; other parameters may not have the attribute
    ds_zero_partition_group_name: str  # key of the experts' process groups in DeepSpeed
    ds_zero_partition_process_group: torch.distributed.ProcessGroup
    """The ranks over which the experts are sharded; other parameters may not have the attribute."""

    def partition(self) -> None:
        """Release the gathered values and keep the shard."""

    def convert_to_zero_parameters(self, param_list: list[nn.Parameter]) -> None:
        """Shard other parameters like this one."""


def as_partitioned(parameter: nn.Parameter) -> PartitionedParameter:
    """Cast a parameter that ZeRO-3 has sharded to its type."""
    return cast(PartitionedParameter, parameter)


def is_expert_block(parameter: nn.Parameter) -> bool:
    """Whether a parameter is this rank's block of the experts, sharded over `expert_shards` instead of `shards`."""
    return getattr(parameter, "ds_zero_placement_family", None) == EXPERT_FAMILY


class ShardGroup(NamedTuple):
    """The ranks over which a parameter is sharded."""

    axis: Literal["shards", "expert_shards"]
    size: int
    rank: int  # this rank's index among them


def find_shard_group(parameter: nn.Parameter) -> ShardGroup:
    """Find the ranks over which ZeRO-3 shards a parameter."""
    if is_expert_block(parameter):
        return ShardGroup("expert_shards", layout.size("expert_shards"), layout.rank("expert_shards"))
    return ShardGroup("shards", layout.size("shards"), layout.rank("shards"))


def unpadded_shard(parameter: PartitionedParameter) -> Tensor:
    """This rank's shard without its padding, which may be uninitialised: a flat view, empty on the last ranks of a
    small parameter."""
    shard = parameter.ds_tensor.detach().view(-1)
    return shard[: max(0, parameter.ds_numel - find_shard_group(parameter).rank * shard.numel())]


def full_shape(parameter: PartitionedParameter) -> torch.Size:
    """The unsharded parameter's shape, with all experts."""
    if not is_expert_block(parameter):
        return parameter.ds_shape
    num_local, *rest = parameter.ds_shape
    return torch.Size([num_local * layout.size("expert"), *rest])


def unsharded_shape(parameter: nn.Parameter) -> torch.Size:
    """The gathered parameter's shape; `shape` is that of an empty tensor if ZeRO-3 has sharded the parameter."""
    return getattr(parameter, "ds_shape", parameter.shape)


class Streams:
    """Orders DeepSpeed's side streams for all-gathers and gradient reductions with the current stream. With
    `overlap_comm` the gather stream does not wait for the current stream's writes into shards, so an all-gather could
    read a shard before or while it is written (DeepSpeed issue 5545). Only `synchronize_reductions` blocks the host; on
    CPU none has an effect."""

    def __init__(self, zero: DeepSpeedZeroOptimizer_Stage3):
        self._has_streams: bool = not get_accelerator().resolves_data_dependency()
        self._gathers: Any = zero.parameter_offload._DeepSpeedZeRoOffload__allgather_stream
        self._reductions: Any = zero.reduce_and_partition_stream

    def let_gathers_wait(self) -> None:
        """Make the gather stream wait for writes already queued."""
        if self._has_streams:
            self._gathers.wait_stream(get_accelerator().current_stream())

    def wait_for_gathers(self) -> None:
        """Make the current stream wait for in-flight all-gathers."""
        if self._has_streams:
            get_accelerator().current_stream().wait_stream(self._gathers)

    def wait_for_reductions(self) -> None:
        """Make the current stream wait for gradient reductions."""
        if self._has_streams:
            get_accelerator().current_stream().wait_stream(self._reductions)

    def synchronize_reductions(self) -> None:
        """Block the host until reduced gradients are in its memory: work on the CPU is not ordered by streams."""
        if self._has_streams:
            self._reductions.synchronize()


CHUNK_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements per chunk of elementwise operations, which bounds temporary tensors: large on a GPU, which launches kernels
for each chunk (64 MiB in fp32); on a CPU small enough for the cache."""


class ShardPosition(NamedTuple):
    """Position of a parameter's shard in the flat tensors."""

    sub_group: int  # index of the flat tensor
    offset: int
    shard_numel: int
    """Elements of the shard with padding, `ceil(numel / ranks)`, the same on every rank of the parameter's axis."""
    numel: int  # elements without padding, which is on the last ranks


class FlatShards:
    """Vectors over all trained parameters. Each is a list of flat tensors, one per sub-group of DeepSpeed, which holds
    the shards of consecutive parameters of one optimizer parameter group. All vectors have the same layout, so
    elementwise operations need no parameter boundaries; padding is zero in all of them.

    The methods return DeepSpeed's tensors, on the device where they are stored: writing to them changes the engine.
    `num_elements`: number of elements of all trained parameters on this rank, without padding."""

    def __init__(
        self, zero: DeepSpeedZeroOptimizer_Stage3, streams: Streams, trainable: Sequence[PartitionedParameter]
    ):
        """`zero`: DeepSpeed's optimizer; `streams` order reads of gradients after their reduction."""
        self._zero, self._streams = zero, streams
        self._numels: list[int] = zero.fp16_partitioned_groups_flat_numel
        self._positions = {}
        for parameter in trainable:
            sub_group, offset, shard_numel = zero.grad_position[zero.get_param_id(parameter)]
            numel = unpadded_shard(parameter).numel()
            self._positions[id(parameter)] = ShardPosition(sub_group, offset, shard_numel, numel)
        self._replicated: list[nn.Parameter] = []
        self._counted_spans: list[tuple[int, slice]] | None = None
        if layout.size("tensor") > 1:
            self._replicated = [p for p in trainable if not getattr(p, "tensor_model_parallel", False)]
            if layout.rank("tensor") > 0:
                self._counted_spans = self._find_tensor_parallel_spans()
        self.num_elements = sum(position.numel for position in self._positions.values())
        for vector in (self.parameters(), self.masters()):
            for sub_group, offset, shard_numel, numel in self._positions.values():
                vector[sub_group][offset + numel : offset + shard_numel].zero_()
        streams.let_gathers_wait()

    @property
    def optimizer_is_offloaded(self) -> bool:
        """Whether master weights, moments and reduced gradients are in host memory."""
        return self._zero.offload_optimizer

    def parameters(self) -> list[Tensor]:
        """The parameters in their dtype, from which ZeRO-3 all-gathers; each `ds_tensor` is a view of this."""
        return list(self._zero.fp16_partitioned_groups_flat)

    def masters(self) -> list[Tensor]:
        """The fp32 parameters that the optimizer updates. Cast to the parameter dtype, they are `parameters()`."""
        return [master.detach() for master in self._zero.fp32_partitioned_groups_flat]

    def gradients(self) -> list[Tensor]:
        """The reduced gradient in fp32, from the end of an accumulation until the optimizer's step."""
        if self.optimizer_is_offloaded:
            self._streams.synchronize_reductions()
            return [master.grad for master in self._zero.fp32_partitioned_groups_flat]
        self._streams.wait_for_reductions()
        return list(self._zero.grad_partitions_flat_buffer.split(self._numels))

    def optimizer_state(self, key: str, sub_groups: Iterable[int] | None = None) -> list[Tensor]:
        """A buffer of AdamW (`exp_avg`, `exp_avg_sq`) or Muon (`momentum_buffer`) in fp32, zero before the first step.
        `sub_groups`: indices of the flat tensors that have it; None for all."""
        masters = self._zero.fp32_partitioned_groups_flat
        chosen = range(len(masters)) if sub_groups is None else sub_groups
        return [self._zero.optimizer.state[masters[i]][key] for i in chosen]

    def scale_gradient(self, factor: float) -> None:
        torch._foreach_mul_(self.gradients(), factor)
        # Offloaded: DeepSpeed computed each parameter's norm during the backward; a rank without elements has none.
        if self.optimizer_is_offloaded and (norms := list(self._zero.norm_for_param_grads.values())):
            torch._foreach_mul_(norms, factor)

    def zeros(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """A new vector of zeros, contiguous in memory like DeepSpeed's parameters."""
        return list(torch.zeros(sum(self._numels), dtype=dtype, device=device).split(self._numels))

    def numel(self, parameter: nn.Parameter) -> int:
        """Number of elements of a trained parameter on this rank, without padding."""
        return self._positions[id(parameter)].numel

    def position(self, parameter: nn.Parameter) -> ShardPosition:
        """Position of a trained parameter's shard in every vector."""
        return self._positions[id(parameter)]

    def shard(self, vector: Sequence[Tensor], parameter: nn.Parameter) -> Tensor:
        """A parameter's shard of a vector: a flat view, with padding."""
        position = self._positions[id(parameter)]
        return vector[position.sub_group][position.offset : position.offset + position.shard_numel]

    def norm(self, vector: Sequence[Tensor]) -> float:
        """Global L2 norm of a vector; parameters that are replicated in a tensor-parallel group count once. A
        collective."""
        if self._counted_spans is not None:
            vector = [vector[sub_group][span] for sub_group, span in self._counted_spans]
        return layout.norm_over("job", [part for (part,) in iterate_chunks(vector)])

    def dot(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
        """Global inner product of two vectors, which counts elements as `norm` does. A collective."""
        if self._counted_spans is not None:
            left, right = ([vector[i][span] for i, span in self._counted_spans] for vector in (left, right))
        parts = (float(a.double() @ b.to(a.device).double()) for a, b in iterate_chunks(left, right))
        return layout.sum_over("job", [sum(parts)])[0]

    def sum_replicated_gradients(self) -> None:
        """Sum the gradients of replicated parameters over the tensor-parallel group, whose ranks have those of their
        tokens or heads. A collective, once per accumulation."""
        if not self._replicated:
            return
        gradients = self.gradients()
        parts = [self.shard(gradients, parameter) for parameter in self._replicated]
        total = torch.cat(parts).to(device())
        layout.add_over("tensor", total)
        for part, summed in zip(parts, total.split([len(part) for part in parts]), strict=True):
            part.copy_(summed)
        if self.optimizer_is_offloaded:  # DeepSpeed computed the norms during the backward
            for parameter, part in zip(self._replicated, parts, strict=True):
                number = self._zero.get_param_id(parameter)
                if number in self._zero.norm_for_param_grads:
                    self._zero.norm_for_param_grads[number] = part.norm()

    def _find_tensor_parallel_spans(self) -> list[tuple[int, slice]]:
        """Find the sub-groups of tensor-parallel parameters and their spans in them; adjacent spans are merged."""
        replicated = {id(parameter) for parameter in self._replicated}
        spans: list[tuple[int, slice]] = []
        for key, position in sorted(self._positions.items(), key=lambda item: item[1]):
            if key in replicated:
                continue
            end = position.offset + position.shard_numel
            if spans and spans[-1][0] == position.sub_group and spans[-1][1].stop == position.offset:
                spans[-1] = position.sub_group, slice(spans[-1][1].start, end)
            else:
                spans.append((position.sub_group, slice(position.offset, end)))
        return spans


def iterate_chunks(*vectors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Iterate over corresponding views of all vectors, each of at most `CHUNK_NUMEL` elements."""
    for tensors in zip(*vectors, strict=True):
        size = CHUNK_NUMEL[tensors[0].device.type]
        yield from zip(*(tensor.split(size) for tensor in tensors), strict=True)


class GradientSum:
    """The fp32 sum of unreduced gradients over the micro-batches of one accumulation; empty between accumulations.
    PyTorch accumulates in the parameters' dtype, and bf16 rounds away the gradients of late micro-batches; this sum is
    rounded once, for the reduction."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = parameters
        self._sums: dict[nn.Parameter, Tensor] = {}

    def add(self) -> None:
        """Move the gradients to the sum. They become zero instead of None: ZeRO-3 has replaced the gathered parameters
        by empty tensors, to which PyTorch would not attach a new gradient."""
        grads = self._gradients()
        if not grads:
            return
        existing = [parameter for parameter in grads if parameter in self._sums]
        if existing:
            torch._foreach_add_([self._sums[p] for p in existing], [grads[p] for p in existing])
        self._sums |= {parameter: grad.float() for parameter, grad in grads.items() if parameter not in self._sums}
        torch._foreach_zero_(list(grads.values()))

    def write_back(self) -> None:
        """Add the sum to the gradients, in fp32, and clear it."""
        if not self._sums:
            return
        pairs = [(self._sums[p], grad) for p, grad in self._gradients().items() if p in self._sums]
        sums, grads = [total for total, _ in pairs], [grad for _, grad in pairs]
        torch._foreach_add_(sums, grads)
        torch._foreach_copy_(grads, sums)
        self._sums = {}

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        return {parameter: parameter.grad for parameter in self._parameters if parameter.grad is not None}


def unsharded_gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes per rank of unreduced gradients: the gradient, and for 16-bit parameters the fp32 sum."""
    size = 0
    for parameter in parameters:
        numel = getattr(parameter, "ds_numel", parameter.numel())
        size += numel * (4 if parameter.dtype == torch.float32 else parameter.element_size() + 4)
    return size


class SavedParameters:
    """Keeps gathered parameters out of graphs; ZeRO-3 gathers them again before a module's backward. Autograd saves a
    view of the weight of a matrix multiplication, and with it the gathered layer: without activation checkpointing
    every rank would hold the full model. DeepSpeed's `memory_efficient_linear` avoids this with an autograd Function,
    which has no `jvp`."""

    def __init__(self, model: nn.Module):
        """`model` must have ZeRO-3's hooks already: these hooks must run after those that gather parameters."""
        self._by_address: dict[int, nn.Parameter] = {}
        owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
        self._hooks = [module.register_forward_pre_hook(self._note) for module in owners]

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def as_references(self) -> Iterator[None]:
        """A context for a forward; its backward may be outside."""
        self._by_address.clear()  # all-gathers use new addresses, so this would grow with every pass
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _note(self, module: nn.Module, _: object) -> None:
        if not torch.is_grad_enabled():  # nothing is saved
            return
        for parameter in module.parameters(recurse=False):
            self._by_address[parameter.data_ptr()] = parameter

    def _pack(self, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        address = tensor.data_ptr()
        parameter = self._by_address.get(address)
        # Checked, since the parameter may have been released, and an activation may be at its address now.
        if parameter is None or address != parameter.data_ptr() or tensor.numel() != parameter.numel():
            return tensor
        if tensor.dtype != parameter.dtype or tensor.numel() == 0:
            return tensor
        size, stride = tensor.size(), tensor.stride()
        return lambda: parameter.data.as_strided(size, stride)

    @staticmethod
    def _unpack(saved: Tensor | Callable[[], Tensor]) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved()
