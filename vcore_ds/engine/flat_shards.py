"""This rank's shards as DeepSpeed stores them: a few flat tensors, whatever the number of parameters.

DeepSpeed's `safe_get_local_*` and `safe_set_local_*` handle one parameter at a time, and each call waits for a stream
of the GPU: thousands of waits a step for a large model. Here all gradients, master weights or moments are used at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device

# What ZeRO-3 adds to a parameter, in types.


EXPERT_FAMILY = "autoep_expert"
"""DeepSpeed's mark of parameters that are a rank's block of the experts."""


class PartitionedParameter(nn.Parameter):
    """A parameter with the attributes that DeepSpeed gives it when it divides it. There are no instances: DeepSpeed
    changes those of `nn.Parameter`."""

    ds_numel: int
    """Elements of the whole parameter."""
    ds_shape: torch.Size
    """Of the whole parameter."""
    ds_tensor: Tensor
    """This rank's shard, flat, with its padding."""
    ds_secondary_tensor: Tensor | None
    """The second shard of hierarchical partitioning; None without."""

    ds_zero_placement_family: str
    """`EXPERT_FAMILY`, or another or none."""
    ds_zero_partition_group_name: str
    """By which DeepSpeed finds the groups of experts."""
    ds_zero_partition_process_group: torch.distributed.ProcessGroup
    """The ranks that are to have shards of it, where they are not all."""

    def partition(self) -> None:
        """Releases the whole values, and keeps the shard."""

    def convert_to_zero_parameters(self, param_list: list[nn.Parameter]) -> None:
        """Divides others as this one was."""


def as_partitioned(parameter: nn.Parameter) -> PartitionedParameter:
    """The same parameter, which ZeRO-3 has divided."""
    return cast(PartitionedParameter, parameter)


def is_block_of_experts(parameter: nn.Parameter) -> bool:
    """Whether ZeRO-3 shards a parameter over `expert_shards` instead of `shards`."""
    return getattr(parameter, "ds_zero_placement_family", None) == EXPERT_FAMILY


def shape_of_all(parameter: PartitionedParameter) -> torch.Size:
    """The parameter's shape in the model; of a block of experts, that of all experts."""
    if not is_block_of_experts(parameter):
        return parameter.ds_shape
    num_own, *rest = parameter.ds_shape
    return torch.Size([num_own * layout.size("expert"), *rest])


# Order between the current stream and those on which DeepSpeed gathers parameters and reduces gradients.
#
# With `overlap_comm` DeepSpeed has a stream for each of the two. That of the gathers does not wait for what the
# current stream writes into shards, so a gather could read a shard before, or while, it is written (DeepSpeed issue
# 5545). All waits here are waits of one stream for another, which hold nothing up on the host, unless they say
# otherwise. An accelerator without streams, the CPU, executes everything in the order of the calls and needs none.


class Streams:
    """The streams of one engine."""

    def __init__(self, zero: DeepSpeedZeroOptimizer_Stage3):
        """`zero`: DeepSpeed's optimizer."""
        self._has_streams: bool = not get_accelerator().resolves_data_dependency()
        self._gathers: Any = zero.parameter_offload._DeepSpeedZeRoOffload__allgather_stream
        self._reductions: Any = zero.reduce_and_partition_stream

    def let_gathers_wait(self) -> None:
        """Gathers that start from now on read what has been written until now."""
        if self._has_streams:
            self._gathers.wait_stream(get_accelerator().current_stream())

    def wait_for_gathers(self) -> None:
        """What is written from now on is not seen by gathers that have started."""
        if self._has_streams:
            get_accelerator().current_stream().wait_stream(self._gathers)

    def wait_for_reductions(self) -> None:
        """What is read from now on are reduced gradients."""
        if self._has_streams:
            get_accelerator().current_stream().wait_stream(self._reductions)

    def hold_host_for_reductions(self) -> None:
        """The host waits until reduced gradients are in its memory, for work on the CPU, which no stream orders."""
        if self._has_streams:
            self._reductions.synchronize()


CHUNK_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements that elementwise work processes at a time, so that temporary tensors stay small. A GPU launches kernels for
each chunk, and gets large ones (64 MiB in fp32); on a CPU temporary tensors stay in the cache."""


class Place(NamedTuple):
    """Position of a parameter's shard."""

    sub_group: int
    """Index of the flat tensor."""
    offset: int
    shard_numel: int
    """Elements of the shard, `ceil(numel / ranks)`, the same on every rank of the parameter's axis."""
    numel: int
    """Elements that belong to the parameter; the rest is padding, on the last ranks that hold a part of it."""


class FlatShards:
    """Vectors over all trained parameters, each a list of flat tensors: one for each of DeepSpeed's sub-groups.

    A sub-group holds the shards of consecutive parameters of one optimizer parameter group. All vectors of an engine
    have the same layout, so elementwise operations need no parameter boundaries. Padding is zero in all of them:
    DeepSpeed never writes to that of gradients and moments; that of parameters is uninitialised and cleared here.

    The methods return DeepSpeed's own tensors on the device where they are kept: writing to them changes the engine.

    Attributes:
        num_elements: elements of all trained parameters that are this rank's, without padding.
    """

    def __init__(
        self, zero: DeepSpeedZeroOptimizer_Stage3, streams: Streams, trainable: Sequence[PartitionedParameter]
    ):
        """Args:
        zero: DeepSpeed's optimizer.
        streams: order reads of gradients behind their reduction.
        trainable: the trained parameters.
        """
        self._zero, self._streams = zero, streams
        self._numels: list[int] = zero.fp16_partitioned_groups_flat_numel
        self._places = {}
        for parameter in trainable:
            sub_group, offset, shard_numel = zero.grad_position[zero.get_param_id(parameter)]
            rank = layout.rank("expert_shards") if is_block_of_experts(parameter) else layout.rank("shards")
            left = parameter.ds_numel - rank * shard_numel
            self._places[id(parameter)] = Place(sub_group, offset, shard_numel, max(0, min(shard_numel, left)))
        self._replicated: list[nn.Parameter] = []
        self._counted: list[tuple[int, slice]] | None = None
        if layout.size("tensor") > 1:
            self._replicated = [p for p in trainable if not getattr(p, "tensor_model_parallel", False)]
            if layout.rank("tensor") > 0:
                self._counted = self._spans_of_divided()
        self.num_elements = sum(place.numel for place in self._places.values())
        for vector in (self.parameters(), self.masters()):
            for sub_group, offset, shard_numel, numel in self._places.values():
                vector[sub_group][offset + numel : offset + shard_numel].zero_()
        streams.let_gathers_wait()

    @property
    def optimizer_is_offloaded(self) -> bool:
        """Whether master weights, moments and reduced gradients are in host memory."""
        return self._zero.offload_optimizer

    def parameters(self) -> list[Tensor]:
        """The parameters in their own dtype, from which they are gathered; each `ds_tensor` is a view of this."""
        return list(self._zero.fp16_partitioned_groups_flat)

    def masters(self) -> list[Tensor]:
        """The fp32 parameters that the optimizer updates. Cast to the parameter dtype, they are `parameters()`."""
        return [master.detach() for master in self._zero.fp32_partitioned_groups_flat]

    def gradients(self) -> list[Tensor]:
        """The reduced gradient in fp32, from the end of an accumulation until the optimizer's step."""
        if self.optimizer_is_offloaded:
            self._streams.hold_host_for_reductions()
            return [master.grad for master in self._zero.fp32_partitioned_groups_flat]
        self._streams.wait_for_reductions()
        return list(self._zero.grad_partitions_flat_buffer.split(self._numels))

    def optimizer_state(self, key: str) -> list[Tensor]:
        """A buffer of AdamW (`exp_avg`, `exp_avg_sq`) in fp32, zero before its first step."""
        return [self._zero.optimizer.state[master][key] for master in self._zero.fp32_partitioned_groups_flat]

    def scale_gradient(self, factor: float) -> None:
        """Multiplies the reduced gradient, and the norms of it that DeepSpeed clips with."""
        torch._foreach_mul_(self.gradients(), factor)
        if self.optimizer_is_offloaded:  # the norms were taken during the backward, one for each parameter
            norms = list(self._zero.norm_for_param_grads.values())
            if norms:  # a rank may hold no elements at all
                torch._foreach_mul_(norms, factor)

    def zeros(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """A new vector of zeros, laid out in memory as DeepSpeed lays out the parameters."""
        return list(torch.zeros(sum(self._numels), dtype=dtype, device=device).split(self._numels))

    def numel(self, parameter: nn.Parameter) -> int:
        """Elements of a trained parameter that are this rank's, without padding."""
        return self._places[id(parameter)].numel

    def shard(self, vector: Sequence[Tensor], parameter: nn.Parameter) -> Tensor:
        """A parameter's part of a vector, flat, with padding; a view."""
        place = self._places[id(parameter)]
        return vector[place.sub_group][place.offset : place.offset + place.shard_numel]

    def norm(self, vector: Sequence[Tensor]) -> float:
        """Global L2 norm of a vector; its padding is zero. A collective.

        Of parameters that all ranks of a tensor group have, those of its first rank count.
        """
        if self._counted is not None:
            vector = [vector[sub_group][span] for sub_group, span in self._counted]
        return layout.norm_over("job", [part for (part,) in chunks(vector)])

    def add_up_replicas(self) -> None:
        """Sums the gradients of parameters that all ranks of a tensor group have: each has that of its tokens or heads.
        A collective, once an accumulation."""
        if not self._replicated:
            return
        gradients = self.gradients()
        parts = [self.shard(gradients, parameter) for parameter in self._replicated]
        total = torch.cat(parts).to(device())
        layout.add_over("tensor", total)
        for part, summed in zip(parts, total.split([len(part) for part in parts]), strict=True):
            part.copy_(summed)
        if self.optimizer_is_offloaded:  # the norms were taken during the backward
            for parameter, part in zip(self._replicated, parts, strict=True):
                number = self._zero.get_param_id(parameter)
                if number in self._zero.norm_for_param_grads:
                    self._zero.norm_for_param_grads[number] = part.norm()

    def _spans_of_divided(self) -> list[tuple[int, slice]]:
        """Where the parameters lie of which every rank of a tensor group has a part: sub-group, and elements of it.
        Neighbours are one span."""
        replicated = {id(parameter) for parameter in self._replicated}
        spans: list[tuple[int, slice]] = []
        for key, place in sorted(self._places.items(), key=lambda item: item[1]):
            if key in replicated:
                continue
            end = place.offset + place.shard_numel
            if spans and spans[-1][0] == place.sub_group and spans[-1][1].stop == place.offset:
                spans[-1] = place.sub_group, slice(spans[-1][1].start, end)
            else:
                spans.append((place.sub_group, slice(place.offset, end)))
        return spans


def chunks(*vectors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Corresponding parts of all vectors, of at most `CHUNK_NUMEL` elements, one after the other; views. The size is
    that of the first vector's device."""
    for tensors in zip(*vectors, strict=True):
        size = CHUNK_NUMEL[tensors[0].device.type]
        yield from zip(*(tensor.split(size) for tensor in tensors), strict=True)


# The gradients of several micro-batches before their one reduction, summed in fp32.
#
# PyTorch adds them up in the parameters' dtype, and bf16 rounds the gradients of late micro-batches away. So each
# micro-batch's gradient is moved to an fp32 sum, which is rounded once, for the reduction.


class GradientSum:
    """The sum of one accumulation, over gradients that have not been reduced; empty between two accumulations."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self._parameters = parameters
        self._sums: dict[nn.Parameter, Tensor] = {}

    def take(self) -> None:
        """Moves the gradients to the sum. What stays is zero instead of None: ZeRO-3 has replaced the gathered
        parameters by empty tensors, to which PyTorch would not attach another gradient."""
        found = self._gradients()
        if not found:
            return
        new = [parameter for parameter in found if parameter not in self._sums]
        known = [parameter for parameter in found if parameter in self._sums]
        if known:
            torch._foreach_add_([self._sums[p] for p in known], [found[p] for p in known])
        self._sums |= {parameter: found[parameter].float() for parameter in new}
        torch._foreach_zero_(list(found.values()))

    def give_back(self) -> None:
        """Adds the sum to the gradients, in fp32, and forgets it."""
        if not self._sums:
            return
        found = self._gradients()  # once there, a gradient stays
        sums = [self._sums[parameter] for parameter in found if parameter in self._sums]
        grads = [grad for parameter, grad in found.items() if parameter in self._sums]
        torch._foreach_add_(sums, grads)
        torch._foreach_copy_(grads, sums)
        self._sums = {}

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        return {parameter: parameter.grad for parameter in self._parameters if parameter.grad is not None}


def unsharded_gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """What trained parameters take on each rank until their one reduction: a gradient, and an fp32 sum beside one in
    16 bits."""
    size = 0
    for parameter in parameters:
        numel = getattr(parameter, "ds_numel", parameter.numel())
        size += numel * (4 if parameter.dtype == torch.float32 else parameter.element_size() + 4)
    return size


# A graph that refers to parameters instead of keeping what was gathered of them.
#
# The backward of a product needs its weight, so autograd saves a view of it, and with that the memory into which
# ZeRO-3 gathered the layer. Without activation checkpoints every rank would keep the whole model from the forward to
# the backward. DeepSpeed's `memory_efficient_linear` has a Function of its own against this, which has no forward-
# mode rule.


@dataclass(frozen=True)
class _View:
    """A view of a whole parameter."""

    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]


class SavedParameters:
    """Keeps gathered parameters of `model` out of graphs. ZeRO-3 gathers them again before a module's backward."""

    def __init__(self, model: nn.Module):
        """`model` has ZeRO-3's hooks, which gather parameters: this one has to be younger, to find them whole."""
        self._by_address: dict[int, nn.Parameter] = {}
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._note)

    @contextmanager
    def as_references(self) -> Iterator[None]:
        """The context of a forward. Its backward may be anywhere."""
        self._by_address.clear()  # gathers come to new addresses, so what is noted would grow with every pass
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _note(self, module: nn.Module, _: object) -> None:
        if not torch.is_grad_enabled():  # nothing is saved
            return
        for parameter in module.parameters(recurse=False):
            self._by_address[parameter.data_ptr()] = parameter

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        address = tensor.data_ptr()
        parameter = self._by_address.get(address)
        # A parameter may have been released since it was noted, and an activation may lie there now: only one that is
        # still there is what the tensor is a view of.
        if parameter is None or address != parameter.data_ptr() or tensor.numel() != parameter.numel():
            return tensor
        if tensor.dtype != parameter.dtype or tensor.numel() == 0:
            return tensor
        return _View(parameter, tensor.size(), tensor.stride())

    def _unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return saved.parameter.data.as_strided(saved.size, saved.stride)
