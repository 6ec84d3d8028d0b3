"""The network between the ranks, before a run depends on it: whether all meet, and how fast they sum."""

import os
import re
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

# Not later: the defaults of its functions would hold the group that is there then, and so keep its threads.
import torch.distributed.nn.functional

from vcore_ds.common.errors import first_line
from vcore_ds.distributed.device import uses_gpu

NUM_TIMED = 5
"""All-reduces that are timed, after one that is not: it builds the connections."""


@contextmanager
def plain_group(timeout_seconds: float) -> Iterator[None]:
    """All ranks of the launcher's environment, or a process alone, in a gloo group: host memory over TCP, needs no GPU.

    Raises ConnectionError, with gloo's words, where the ranks do not find each other in time.
    """
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        raise ConnectionError(repr(first_line(error))) from None
    try:
        yield
    finally:
        # Ends gloo's threads. One that still released the tensors of the last exchange when the interpreter ended would
        # abort the process: 1 of 100 where the cores are busy.
        dist.destroy_process_group()


def rank() -> int:
    """Of this process in the job."""
    return dist.get_rank()


def gather(value: Any) -> list[Any]:
    """`value` of every rank, on every rank. A collective, through host memory."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def all_reduce_seconds(num_bytes: int, timeout_seconds: float) -> float:
    """Median time of an all-reduce of `num_bytes` over all ranks; on GPUs by NCCL, one rank per GPU, else by gloo.

    Raises TimeoutError: NCCL waits for a network that lets nothing through, or starts a hang, without an error.
    """
    result: list[float | BaseException] = []

    def measure() -> None:
        try:
            result.append(_measure(num_bytes, timeout_seconds))
        except BaseException as error:  # raised again below, in the thread that waits
            result.append(error)

    # In a thread: building a communicator blocks in C, where no timeout of torch's reaches.
    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if not result:
        raise TimeoutError(f"no all-reduce of {num_bytes} bytes in {timeout_seconds:g} s")
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _measure(num_bytes: int, timeout_seconds: float) -> float:
    group, device = None, torch.device("cpu")
    if uses_gpu():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl", timeout=timedelta(seconds=timeout_seconds))
    values = torch.ones(num_bytes // 4, device=device)
    seconds = []
    for _ in range(1 + NUM_TIMED):
        dist.barrier()  # the gloo group's: all begin together
        started = time.perf_counter()
        dist.all_reduce(values, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    expected = float(dist.get_world_size()) ** (1 + NUM_TIMED)
    # Finite in fp32 up to millions of ranks. A network that corrupts data is as bad as one that hangs.
    if not torch.allclose(values, torch.full_like(values, expected)):
        raise RuntimeError(f"the all-reduce gave {float(values.min()):g} to {float(values.max()):g}, not {expected:g}")
    return statistics.median(seconds[1:])


@contextmanager
def nccl_log() -> Iterator[Path | None]:
    """A file to which NCCL, started inside, writes which network it chose; None where the user has NCCL's log on."""
    if "NCCL_DEBUG" in os.environ and os.environ["NCCL_DEBUG"] not in ("WARN", "VERSION"):
        yield None
        return
    before = os.environ.get("NCCL_DEBUG")
    with tempfile.TemporaryDirectory(prefix="nccl_") as folder:
        path = Path(folder, "log")
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(path))
        yield path
        for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
            del os.environ[name]
        if before is not None:
            os.environ["NCCL_DEBUG"] = before


def network_of_nccl(log: str) -> str | None:
    """What NCCL says it uses, such as `IB [0]mlx5_0:1/IB [1]mlx5_1:1/IB`; None where the log does not say.

    Source: the line `NET/IB : Using ...` or `NET/Socket : Using ...` of NCCL_DEBUG=INFO.
    """
    found = re.search(r"NET/(\w+)\s*:\s*Using\s+(.+?)(?:\s*;\s*OOB.*)?$", log, re.MULTILINE)
    return f"{found[1]} {found[2].strip()}" if found else None


def network_of_gloo() -> str:
    """Interface and address that gloo binds: GLOO_SOCKET_IFNAME's, or the one that the host's name leads to."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        return chosen
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return "loopback only (the host's own name has no address)"
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return f"{interface} {address}"
    return address


def infiniband_ports() -> list[str]:
    """Active InfiniBand ports of this node with their rate, such as `mlx5_0 400 Gb/sec (4X NDR)`."""
    return [
        f"{port.parts[-3]} {(port / 'rate').read_text().strip()}"
        for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
        if "ACTIVE" in (port / "state").read_text() and "InfiniBand" in (port / "link_layer").read_text()
    ]
