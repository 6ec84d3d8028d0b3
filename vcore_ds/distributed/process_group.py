"""The process group of a run: start, end, and work that ranks do in turn."""

import itertools
import os
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from vcore_ds.common.errors import RunFailed, UserError, first_line
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import local_rank, num_local_ranks, use_local_compile_caches, uses_gpu
from vcore_ds.distributed.network import choose_gloo_interface, node_name

T = TypeVar("T")

_created_group: dist.ProcessGroup | None = None
"""The process group that `start_process_group` created, until it is destroyed."""
_group_numbers = itertools.count()
"""Numbers of the process groups that this job has created, the same on all ranks."""

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
"""Environment variables of a process without a launcher, some of which DeepSpeed reads."""
_variables_before: dict[str, str | None] = {}
"""What `ALONE` has replaced, until the process group is destroyed."""


def start_process_group(timeout_minutes: float, tensor: int = 1, expert: int = 1) -> None:
    """Join the process group of the launcher's environment, or create one of a single process, and make the device
    mesh; keeps an existing group. Also gives each rank its share of the cores, and on GPUs local folders for compiled
    kernels. A collective that takes longer than `timeout_minutes` raises an error instead of hanging. Raises UserError
    if a parallel size does not divide the world size, the port is taken or an environment variable has an invalid
    value, RunFailed if the ranks do not meet."""
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 deprecates, many times a step.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    share_cores_among_ranks()
    if uses_gpu():
        use_local_compile_caches()
        # NCCL 2.26 and newer runs the kernels of all communicators in the order in which the host starts them, the same
        # on all ranks. By default kernels on several streams may wait for each other on two GPUs.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    global _created_group
    is_new = not dist.is_initialized()
    if is_new:
        set_variables_of_one_process()
        # Checked before joining: once rank 0 serves the store, it must not exit while other ranks are joining.
        layout.check_parallel_sizes(int(os.environ["WORLD_SIZE"]), tensor, expert)
        if uses_gpu():
            torch.cuda.set_device(local_rank())
        try:
            join_process_group("nccl" if uses_gpu() else "gloo", timedelta(minutes=timeout_minutes))
        except RuntimeError as error:
            raise RunFailed(
                f"rank {os.environ['RANK']} (node {node_name()}) did not meet the other ranks at MASTER_ADDR "
                f"{os.environ.get('MASTER_ADDR')}, MASTER_PORT {os.environ.get('MASTER_PORT')}: {first_line(error)}. "
                "`vcore-ds preflight RECIPE`, started in the same way, checks the network"
            ) from None
        _created_group = dist.group.WORLD
    # If the group is new, an existing mesh belongs to a destroyed one.
    if is_new or not layout.is_arranged() or (layout.size("tensor"), layout.size("expert")) != (tensor, expert):
        layout.arrange(tensor, expert, timeout_minutes)


def end_process_group() -> None:
    """Wait for all ranks and destroy the process group, unless it existed before `start_process_group`. The last
    collective: NCCL needs all ranks to destroy their communicators at about the same time, and rank 0 may continue
    alone for hours, with an evaluation or a report."""
    global _created_group
    layout.sum_over("job", [0.0])
    if _created_group is not None and _created_group is dist.group.WORLD:
        _created_group = None
        cpu_group.cache_clear()
        _waiting_group.cache_clear()
        dist.destroy_process_group()
        for name, value in _variables_before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        _variables_before.clear()


def share_cores_among_ranks() -> None:
    """Limit each rank's threads to its share of the cores; PyTorch's default, all cores for every rank, is several
    times slower on CPUs. GPU ranks use the threads for an optimizer that is offloaded to the host."""
    chosen = os.environ.get("OMP_NUM_THREADS")
    # torchrun sets 1 by default. CPU ranks keep it, because recorded runs depend on the order of summation.
    is_torchrun_default = uses_gpu() and chosen == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if chosen is None or is_torchrun_default:
        # Counted for the launcher, which may use all of the node's cores even if NUMA binding restricts a rank.
        share = len(os.sched_getaffinity(os.getppid())) // num_local_ranks()
        torch.set_num_threads(max(1, min(share, len(os.sched_getaffinity(0)))))


NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # of srun and mpirun


def set_variables_of_one_process() -> None:
    """Set the environment variables of a launcher where there is none, until `end_process_group`. Raises UserError for
    one of several tasks of srun or mpirun, each of which would compute alone and write the same files."""
    if "RANK" not in os.environ:
        num_tasks = max(int(os.environ.get(name, 1)) for name in NUM_TASKS)
        if num_tasks > 1 and "SLURM_PTY_PORT" not in os.environ:  # not in a shell by `srun --pty`
            raise UserError(
                f"RANK: found none in one of {num_tasks} tasks, expected a launcher's: `sbatch train.slurm "
                "RECIPE`, or one torchrun a node. For separate runs set RANK=0 WORLD_SIZE=1 LOCAL_RANK=0"
            )
        _variables_before.update({name: os.environ.get(name) for name in ALONE})
        os.environ |= ALONE


def join_process_group(backend: str, timeout: timedelta) -> None:
    """Join the process group of the ranks in the launcher's environment. A collective. Raises UserError if rank 0
    cannot serve the store because the port is taken, RuntimeError if the ranks do not meet."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    store: dist.Store = dist.HashStore()  # a single process needs no port
    if num_ranks > 1:
        # A group that joined without a prefix would read the keys of this job's earlier groups.
        store = dist.PrefixStore(f"vcore_ds/{next(_group_numbers)}", _connect_to_launcher_store(timeout))
        store.set_timeout(timeout)
        choose_gloo_interface(store, num_local_ranks())
    dist.init_process_group(backend, timeout=timeout, store=store, rank=int(os.environ["RANK"]), world_size=num_ranks)


@cache
def _connect_to_launcher_store(timeout: timedelta) -> dist.Store:
    """Connect to the store at MASTER_ADDR and MASTER_PORT, where the ranks of a job meet. Without torchrun rank 0
    serves it, so it is kept for the process groups of later calls: other ranks could not tell a new server from the one
    that is ending."""
    try:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    except dist.DistNetworkError as error:
        if (problem := explain_taken_port(error)) is not None:
            raise UserError(problem) from None
        raise
    return store


def explain_taken_port(error: dist.DistNetworkError) -> str | None:
    """Explain that another process listens on the port of the store; None if the error is another one."""
    match = re.search(r"port: (\d+).* EADDRINUSE", str(error))
    return match and (
        f"MASTER_PORT: found {match[1]}, on which another process of this machine listens, such as another job; "
        "expected a free port. Give each job of a machine its own: `--master_port N` of deepspeed and torchrun"
    )


@cache
def cpu_group() -> dist.ProcessGroup:
    """A gloo group of all ranks, for objects in host memory. The first call is a collective."""
    if dist.get_backend() != "gloo":
        return layout.make_group(backend="gloo")
    assert dist.group.WORLD is not None  # for type checkers
    return dist.group.WORLD


@cache
def _waiting_group() -> dist.ProcessGroup:
    """A gloo group of all ranks without a time limit. The first call is a collective: 0.4 s for 16 ranks of a host."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


def run_on_ranks_in_turn(work: Callable[[], T]) -> T:
    """Run `work()` on rank 0, then on the first rank of every node, then on all others, so that later ranks find the
    files of earlier ones, whether nodes share a file system or not. A collective; waiting ranks do not time out.
    Raises the first UserError of `work` on all ranks alike."""
    result, turn = None, 0 if layout.is_first() else 1 if local_rank() == 0 else 2
    for now in range(3):
        message = None
        if now == turn:
            try:
                result = work()
            except UserError as error:  # raised below on all ranks, so that none hangs
                message = str(error)
        messages: list[str | None] = [None] * layout.size("job")
        dist.all_gather_object(messages, message, group=_waiting_group())
        for problem in messages:
            if problem is not None:
                raise UserError(problem)
    return cast(T, result)


def run_on_first_rank(work: Callable[[], T]) -> T | None:
    """Run `work()` on rank 0 while the others wait; they get None. A collective, with the errors of
    `run_on_ranks_in_turn`."""
    return run_on_ranks_in_turn(lambda: work() if layout.is_first() else None)
