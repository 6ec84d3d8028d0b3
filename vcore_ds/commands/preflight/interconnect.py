"""The network between the ranks: form a process group, time an all-reduce, find the interfaces in use."""

import os
import re
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

# Imported before any group exists: as default arguments its functions would keep the group and its threads alive.
import torch.distributed.nn.functional

from vcore_ds.common.errors import first_line
from vcore_ds.distributed.device import uses_gpu
from vcore_ds.distributed.process_group import join_process_group, set_variables_of_one_process

NUM_TIMED = 5  # timed all-reduces, after an untimed one that builds the connections


@contextmanager
def plain_group(timeout_seconds: float) -> Iterator[None]:
    """A gloo group of all ranks in the launcher's environment, or of this process alone, over host memory and TCP.
    Raises ConnectionError, with gloo's message, if the ranks do not connect in time, UserError if the port is taken."""
    set_variables_of_one_process()
    try:
        join_process_group("gloo", timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        raise ConnectionError(repr(first_line(error))) from None
    try:
        yield
    finally:
        # Ends gloo's threads. A thread that still frees tensors while the interpreter shuts down aborts the process,
        # in 1 of 100 runs on busy cores.
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank()


def gather(value: Any) -> list[Any]:
    """All-gather `value` through host memory. A collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def time_all_reduce(num_bytes: int, timeout_seconds: float) -> float:
    """Median seconds of an all-reduce over all ranks: by NCCL with one GPU per rank, else by gloo. Raises TimeoutError:
    NCCL hangs without an error on a network that drops its packets."""
    result: Future[float] = Future()

    def measure() -> None:
        try:
            result.set_result(_measure(num_bytes, timeout_seconds))
        except BaseException as error:  # raised again by `result`, in the waiting thread
            result.set_exception(error)

    # In a thread: building a communicator blocks in C, beyond the reach of torch's timeouts.
    threading.Thread(target=measure, daemon=True).start()
    if not wait([result], timeout_seconds).done:
        raise TimeoutError(f"no all-reduce of {num_bytes} bytes in {timeout_seconds:g} s")
    return result.result()


def _measure(num_bytes: int, timeout_seconds: float) -> float:
    group, device = None, torch.device("cpu")
    if uses_gpu():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl", timeout=timedelta(seconds=timeout_seconds))
    values = torch.ones(num_bytes // 4, device=device)
    seconds = []
    for _ in range(1 + NUM_TIMED):
        dist.barrier()  # over gloo, so that all ranks start together
        started = time.perf_counter()
        dist.all_reduce(values, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    expected = float(dist.get_world_size()) ** (1 + NUM_TIMED)
    # Also detects a network that corrupts data. The sum is finite in fp32 up to millions of ranks.
    if not torch.allclose(values, torch.full_like(values, expected)):
        raise RuntimeError(f"the all-reduce gave {float(values.min()):g} to {float(values.max()):g}, not {expected:g}")
    return statistics.median(seconds[1:])


@contextmanager
def nccl_log() -> Iterator[Path | None]:
    """A log file for NCCL in which it names the network that it chose; None if the user has enabled NCCL's log."""
    before = os.environ.get("NCCL_DEBUG")
    if before not in (None, "WARN", "VERSION"):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="nccl_") as folder:
        path = Path(folder, "log")
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(path))
        yield path
        for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
            del os.environ[name]
        if before is not None:
            os.environ["NCCL_DEBUG"] = before


def parse_nccl_network(log: str) -> str | None:
    """The network in NCCL's log (the line `NET/IB : Using ...` or `NET/Socket : Using ...` of NCCL_DEBUG=INFO), such as
    `IB [0]mlx5_0:1/IB [1]mlx5_1:1/IB`; None if it is missing."""
    match = re.search(r"NET/(\w+)\s*:\s*Using\s+(.+?)(?:\s*;\s*OOB.*)?$", log, re.MULTILINE)
    return f"{match[1]} {match[2].strip()}" if match else None


def find_gloo_network() -> str:
    """Interface and address that gloo binds: GLOO_SOCKET_IFNAME, or the one to which the host's name resolves."""
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        return chosen
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return "loopback only (the host's name does not resolve)"
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return f"{interface} {address}"
    return address


def find_infiniband_ports() -> list[str]:
    """Active InfiniBand ports of this node and their rates, such as `mlx5_0 400 Gb/sec (4X NDR)`."""
    return [
        f"{port.parts[-3]} {(port / 'rate').read_text().strip()}"
        for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
        if "ACTIVE" in (port / "state").read_text() and "InfiniBand" in (port / "link_layer").read_text()
    ]
