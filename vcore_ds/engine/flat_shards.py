"""This rank's shards as DeepSpeed stores them: a few flat tensors, whatever the number of parameters.

DeepSpeed's `safe_get_local_*` and `safe_set_local_*` handle one parameter at a time, and each call waits for a stream
of the GPU: thousands of waits a step for a large model. Here all gradients, master weights or moments are used at once.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor, nn

from vcore_ds.distributed import layout
from vcore_ds.distributed.device import device
from vcore_ds.engine.partitioned import PartitionedParameter, is_block_of_experts
from vcore_ds.engine.streams import Streams

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
