"""Start ranks that are a node each, all on one GPU or on the CPUs of this machine.

    python -m tests.gpu.node.loopback 4 -m tests.gpu.node.steps

NCCL refuses a second rank on a GPU only if both have the same host id. With an id for each rank they are nodes to it,
which talk by sockets over the loopback interface: real communicators, kernels and streams, at 9 ms a collective.
Ranks are separate processes, so no two have the same memory addresses or hash seeds, as on nodes.
"""

import os
import signal
import subprocess
import sys
import time
from typing import Any

from tests.helpers.commands import free_port

NCCL_VARIABLES = {
    "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0",
    # Half of the time of NCCL's choice, whose kernels of several ranks take turns on the GPU.
    "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple",
}  # fmt: skip

GRACE_SECONDS = 20.0
"""Time for the other ranks to end after one has failed."""


def make_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_HOSTID": f"loopback{rank}"}
    # PyTorch of a build for CPUs ignores those of NCCL.
    return NCCL_VARIABLES | {name: str(value) for name, value in (place | meeting).items()}


def run(num_ranks: int, arguments: list[str]) -> int:
    """Run Python with `arguments` on every rank; returns 0, or the exit code of the rank that failed first."""
    port = free_port()
    ranks = [
        subprocess.Popen([sys.executable, *arguments], env=os.environ | make_variables(rank, num_ranks, port))
        for rank in range(num_ranks)
    ]

    def forward(number: int, _: Any) -> None:
        for rank in ranks:
            rank.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, forward)
    first_failure, deadline = 0, float("inf")
    while None in (codes := [rank.poll() for rank in ranks]):
        if first_failure == 0 and any(codes):
            first_failure = next(code for code in codes if code)
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
    code = first_failure or next((code for code in codes if code), 0)
    return code if code >= 0 else 1  # a signal's number


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
