"""The process group of a run: how a rank joins it, and turns that the ranks take."""

import os
import socket
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from vcore_ds.common.errors import UserError
from vcore_ds.distributed import layout
from vcore_ds.distributed.cpu_matmul import use_fast_cpu_products
from vcore_ds.distributed.device import local_rank, num_local_ranks, uses_gpu

Result = TypeVar("Result")

_made_here: dist.ProcessGroup | None = None
"""The process group that `start_process_group` has made, until its end."""


def start_process_group(timeout_minutes: float, tensor: int = 1, expert: int = 1) -> None:
    """Joins the process group that the launcher's environment describes, or makes one of a single process, and puts the
    ranks on their axes. Each rank has its share of the cores, and on CPUs fast products.

    Works under `deepspeed`, `torchrun` and `srun` + `torchrun`, and alone. Keeps a group that exists.

    Args:
        timeout_minutes: a collective that takes longer ends the run with an error instead of hanging.
        tensor: degree of tensor parallelism, a divisor of all ranks.
        expert: degree of expert parallelism, the same.

    Raises:
        UserError: one of them is no divisor, or an environment variable has a value that means nothing.
    """
    # torch 2.13 renames collectives that DeepSpeed 0.19 calls by their old names, many times a step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    share_cores_among_ranks()
    if not uses_gpu():
        use_fast_cpu_products()
    global _made_here
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
        num_ranks = int(os.environ["WORLD_SIZE"])
        # Now: once rank 0 serves the store, it must not leave while others are still joining.
        layout.check_degrees(num_ranks, tensor, expert)
        if uses_gpu():
            torch.cuda.set_device(local_rank())
        dist.init_process_group(
            "nccl" if uses_gpu() else "gloo",
            timeout=timedelta(minutes=timeout_minutes),
            # Alone there is nobody to meet at a port, which could be taken when a process starts its second group.
            store=dist.HashStore() if num_ranks == 1 else None,
            rank=int(os.environ["RANK"]),
            world_size=num_ranks,
        )
        _made_here = dist.group.WORLD
        # Again: the layout of a group that has ended names groups that are gone.
        layout.arrange(tensor, expert, timeout_minutes)
    elif not layout.is_arranged() or (layout.size("tensor"), layout.size("expert")) != (tensor, expert):
        layout.arrange(tensor, expert, timeout_minutes)


def end_process_group() -> None:
    """Waits for all ranks and ends the process group; keeps one that `start_process_group` has found. A collective, the
    last one.

    NCCL wants its communicators destroyed by all ranks at about the same time, and PyTorch warns of those that are left
    at a process's exit. That is no such time: rank 0 may go on alone for hours, with an evaluation or a report.
    """
    global _made_here
    layout.sum_over("job", [0.0])
    if _made_here is not None and _made_here is dist.group.WORLD:
        _made_here = None
        cpu_group.cache_clear()
        dist.destroy_process_group()


def share_cores_among_ranks() -> None:
    """Gives each rank its share of the cores; the default, all cores for every rank, is several times slower on CPUs.
    Of a rank on a GPU, an optimizer that is offloaded to the host uses them."""
    chosen = os.environ.get("OMP_NUM_THREADS")
    # torchrun writes 1 where the user has chosen nothing. CPU ranks keep it: a recorded run has sums in its order.
    is_torchruns = uses_gpu() and chosen == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if chosen is None or is_torchruns:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_local_ranks()))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@cache
def cpu_group() -> dist.ProcessGroup:
    """All ranks of the job on gloo, for what is exchanged as pickled objects in host memory. A collective at first."""
    if dist.get_backend() != "gloo":
        return dist.new_group(backend="gloo")
    assert dist.group.WORLD is not None  # as there is a backend
    return dist.group.WORLD


def first_rank_first(work: Callable[[], Result]) -> Result:
    """`work()` on rank 0, then on the first rank of every node, then on all others: what the first has made, later ones
    find, on a file system that all nodes share or on one that they do not. A collective.

    However long it takes, nobody times out: the wait is on gloo, with a limit of its own.

    Raises:
        UserError: on all ranks alike, what it raised on the first rank that raised it.
    """
    waiting = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    result, turn = None, 0 if layout.is_first() else 1 if local_rank() == 0 else 2
    try:
        for now in range(3):
            message = None
            if now == turn:
                try:
                    result = work()
                except UserError as error:  # the others would wait for a rank that has left
                    message = str(error)
            messages: list[str | None] = [None] * layout.size("job")
            dist.all_gather_object(messages, message, group=waiting)
            for found in messages:
                if found is not None:
                    raise UserError(found)
    finally:
        dist.destroy_process_group(waiting)
    return cast(Result, result)


def on_first_rank(work: Callable[[], Result]) -> Result | None:
    """`work()` on rank 0, for which the others wait; None on them. A collective with the errors of
    `first_rank_first`."""
    return first_rank_first(lambda: work() if layout.is_first() else None)
