"""Process group: start, ranks, and the few reductions the training step needs."""

import os
import socket
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch

if not torch.cuda.is_available():
    # Read by deepspeed when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

# torch._dynamo is imported here, before any zero.Init: that patches tensor constructors, and if transformers imports
# torch._dynamo lazily afterwards, it meets the patched signatures and dies with a TypeError.
import deepspeed  # noqa: E402
import deepspeed.comm as dist  # noqa: E402
import torch._dynamo  # noqa: F401
from deepspeed.accelerator import get_accelerator  # noqa: E402

from ..errors import UserError  # noqa: E402

Result = TypeVar("Result")


def start_process_group(timeout_minutes: float) -> None:
    """Joins the process group the launcher's environment describes, or makes one of a single process.

    Works under `deepspeed`, `torchrun` and `srun` + `torchrun`, and alone. Does nothing where a group exists.

    Args:
        timeout_minutes: a collective that takes longer ends the run with an error instead of hanging.
    """
    deepspeed.utils.logger.setLevel("WARNING")
    # torch 2.13 renames collectives that DeepSpeed 0.19 calls by their old names, many times a step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    if get_accelerator().device_name() == "cpu":
        # Compiled at first use (minutes) and used for inference only; gloo serves everything here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        share_cores_among_ranks()
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    get_accelerator().set_device(local_rank())
    deepspeed.init_distributed(timeout=timedelta(minutes=timeout_minutes), auto_mpi_discovery=False, verbose=False)


def share_cores_among_ranks() -> None:
    """Gives each CPU rank its share of the cores; the default, all cores for every rank, is several times slower."""
    if "OMP_NUM_THREADS" not in os.environ:
        num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_local_ranks))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def local_rank() -> int:
    """Among the ranks of this node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())


def sum_over_ranks(values: list[float]) -> list[float]:
    """Element-wise sum over all ranks, in fp64. A collective."""
    total = torch.tensor(values, dtype=torch.float64, device=device())
    torch.distributed.all_reduce(total)
    return total.tolist()


def norm_over_ranks(parts: list[torch.Tensor]) -> float:
    """2-norm of a vector of which every rank holds some parts, in fp64. A collective."""
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    return sum_over_ranks([float(torch.stack(norms).square().sum())])[0] ** 0.5


def gather_objects(value: Any) -> list[Any]:
    """`value` of every rank, on every rank. A collective."""
    gathered: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def first_rank_first(work: Callable[[], Result]) -> Result:
    """`work()` on rank 0, then on the first rank of every node, then on all others: what the first has made, later ones
    find, on a file system that all nodes share or on one that they do not. A collective.

    However long it takes, nobody times out: the wait is on gloo, with a limit of its own.

    Raises:
        UserError: on all ranks alike, what it raised on the first rank that raised it.
    """
    waiting = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=7))
    result, turn = None, 0 if rank() == 0 else 1 if local_rank() == 0 else 2
    try:
        for now in range(3):
            message = None
            if now == turn:
                try:
                    result = work()
                except UserError as error:  # the others would wait for a rank that has left
                    message = str(error)
            messages: list[str | None] = [None] * world_size()
            torch.distributed.all_gather_object(messages, message, group=waiting)
            for found in messages:
                if found is not None:
                    raise UserError(found)
    finally:
        torch.distributed.destroy_process_group(waiting)
    return cast(Result, result)


def peak_memory_bytes() -> int:
    """Highest memory this rank has used: allocated on the GPU, or resident on a CPU-only machine."""
    if get_accelerator().device_name() == "cpu":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return get_accelerator().max_memory_allocated()
