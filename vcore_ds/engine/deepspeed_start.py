"""Initialization of DeepSpeed: settings before its import, its process groups, the tensor-parallel group.

The package imports this module first, before any that imports deepspeed.
"""

import functools
import logging
import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from vcore_ds.distributed.device import num_local_ranks, uses_gpu

if not uses_gpu():
    # deepspeed reads it when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# zero.Init patches tensor constructors. If transformers imported torch._dynamo lazily afterwards, the import would see
# the patched signatures and fail with a TypeError.
import deepspeed
import torch
import torch._dynamo
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import groups
from torch import Tensor

from vcore_ds.common.imports import without_compiler
from vcore_ds.distributed import layout

with without_compiler():
    # DeepSpeed imports its Muon optimizer whenever an engine starts; import it here, where the compiler is off.
    import deepspeed.runtime.zero.muon.original_muon


DEEPSPEED_WAIT = AllGatherCoalescedHandle.wait  # which `copy_gathered_parameters` replaces; tests compare the two
_GATHER = "_PartitionedParameterCoordinator__all_gather_params"
_DEEPSPEED_GATHER = getattr(PartitionedParameterCoordinator, _GATHER)
DEEPSPEED_PREPARE = DeepSpeedZeroOptimizer_Stage3._prepare_fp32_grad_for_sub_group
DEEPSPEED_CLIP = DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads

_process_group: torch.distributed.ProcessGroup | None = None
"""The default process group for which DeepSpeed was last initialized."""


def start_deepspeed() -> None:
    """Initialize DeepSpeed on the existing process group. A collective; calling it again has no effect."""
    global _process_group
    if _process_group is not torch.distributed.group.WORLD:
        # DeepSpeed keeps the groups of a destroyed process group, from an earlier command in this process.
        groups._release_process_group_references()
        _process_group = torch.distributed.group.WORLD
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.utils.logger.addFilter(_is_relevant)
    if get_accelerator().device_name() == "cpu":
        # It would be compiled for minutes at first use, and is for inference only.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # Counted in every backward, by a program (numactl), which fails where PATH has a folder without permission.
        get_accelerator().device_count = num_local_ranks
    else:
        # In fp64 the norm would convert every gradient, which moves 20 bytes of memory for each parameter instead of 4.
        stage3.get_norm_dtype = lambda: torch.float32
        # Each rank would import torch's compiler, for DeepCompile's passes.
        deepspeed.runtime.engine.is_deepcompile_supported = lambda: False
    AllGatherCoalescedHandle.wait = copy_gathered_parameters
    setattr(PartitionedParameterCoordinator, _GATHER, gather_in_order)
    DeepSpeedZeroOptimizer_Stage3._prepare_fp32_grad_for_sub_group = update_from_buffer
    DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads = clip_in_update
    # For reductions and hierarchical partitioning: DeepSpeed's would have PyTorch's timeout, not the recipe's.
    TorchBackend.new_group = lambda _, ranks: layout.make_group(ranks)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


@functools.wraps(_DEEPSPEED_GATHER)
def gather_in_order(coordinator: Any, params: Iterable[Any], forward: bool) -> None:
    """Start the all-gathers of some parameters. DeepSpeed 0.19.8 passes a set, which iterates in the order of memory
    addresses: ranks would start the all-gathers of experts and of other parameters, on two communicators, in different
    orders, and NCCL may hang."""
    _DEEPSPEED_GATHER(coordinator, sorted(params, key=lambda parameter: parameter.ds_id), forward)


def update_from_buffer(zero: DeepSpeedZeroOptimizer_Stage3, sub_group: int) -> None:
    """Make the reduced gradient of a sub-group that of its master weights, for the update. DeepSpeed 0.19.8
    concatenates the parameters' parts, which follow each other in `grad_partitions_flat_buffer`: 8 bytes of memory
    traffic for each parameter, and a copy."""
    master, buffer = zero.fp32_partitioned_groups_flat[sub_group], zero.grad_partitions_flat_buffer
    start = sum(other.numel() for other in zero.fp32_partitioned_groups_flat[:sub_group])
    gradient = buffer[start : start + master.numel()]
    if gradient.dtype != master.dtype or gradient.data_ptr() != zero.averaged_gradients[sub_group][0].data_ptr():
        DEEPSPEED_PREPARE(zero, sub_group)
        return
    master.grad, zero.averaged_gradients[sub_group] = gradient, None


def clip_in_update(zero: DeepSpeedZeroOptimizer_Stage3, sub_group: int, total_norm: Tensor) -> None:
    """Clip a sub-group's gradient to `zero.clip_grad`: PyTorch's fused AdamW divides it by `grad_scale` as it reads it,
    where DeepSpeed reads and writes it before. Other optimizers get it clipped."""
    optimizer = zero.optimizer
    is_fused = type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"]
    if not is_fused or zero.loss_scale != 1.0 or zero.torch_autocast_gradscaler or zero.offload_optimizer:
        DEEPSPEED_CLIP(zero, sub_group, total_norm)
        return
    is_clipped = zero.clip_grad > 0.0
    optimizer.grad_scale = ((total_norm + 1e-6) / zero.clip_grad).clamp(min=1.0).float() if is_clipped else None


def copy_gathered_parameters(handle: AllGatherCoalescedHandle, handle_dependency: bool = True) -> None:
    """Wait for the all-gather of several parameters, and copy each one's shards to one tensor. Replaces DeepSpeed's
    `AllGatherCoalescedHandle.wait`, which cuts out and concatenates shards in Python, with the same values: that takes
    1.5 ms of host time for a layer of Qwen3-32B on 64 ranks, 3.1 on 128 (docs/reports/performance.md). Not for
    quantized all-gathers, which the recipe's checks refuse. `handle_dependency`: False if DeepSpeed keeps the gathered
    buffer alive."""
    if handle.complete:
        return
    handle.allgather_handle.wait()
    first, num_ranks = handle.partitions[0], handle.world_size
    offset, accelerator = first.storage_offset(), get_accelerator()
    for parameter in handle.params:
        numel = parameter.ds_tensor.ds_numel
        if handle.use_secondary_tensor:
            numel *= parameter.ds_secondary_tensor_num_of_groups
        # The ranks' shards follow each other in one tensor; the last ones are padded.
        shards = first.as_strided((num_ranks, numel), (first.numel(), 1), offset)
        padded = torch.empty((num_ranks, numel), dtype=parameter.ds_tensor.dtype, device=first.device).copy_(shards)
        parameter.data = padded.view(-1)[: parameter.ds_numel].view(parameter.ds_shape)
        parameter.ds_status = ZeroParamStatus.AVAILABLE
        offset += numel
    if not accelerator.is_synchronized_device():
        if handle_dependency:
            # All shards share one allocation, which must outlive the copies on this stream.
            first.record_stream(accelerator.current_stream())
        else:
            AllGatherCoalescedHandle.data_buffer.append(handle.partitions)
    handle.complete = True


def _is_relevant(record: logging.LogRecord) -> bool:
    """Whether to show a message of DeepSpeed: not its warning about torch's SGD with ZeRO, which our tests cover."""
    return "untested optimizer" not in record.getMessage()


def find_tensor_axis() -> SimpleNamespace | None:
    """DeepSpeed's interface to the tensor-parallel group (`mpu`); None without tensor parallelism. With it ZeRO-3
    shards over the other axes, and the gradient norm covers all tensor-parallel shards of each layer. Parameters
    without the attribute `tensor_model_parallel` count once."""
    if layout.size("tensor") == 1:
        return None
    return SimpleNamespace(
        get_model_parallel_rank=lambda: layout.rank("tensor"),
        get_model_parallel_world_size=lambda: layout.size("tensor"),
        get_model_parallel_group=lambda: layout.group("tensor"),
        get_data_parallel_rank=lambda: layout.rank("shards"),
        get_data_parallel_world_size=lambda: layout.size("shards"),
        get_data_parallel_group=lambda: layout.group("shards"),
    )
