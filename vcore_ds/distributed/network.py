"""Names of nodes, and the network between them."""

import ipaddress
import os
import socket
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:  # commands import this file, and torch only when they need it
    import torch.distributed as dist

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def node_name() -> str:
    """Name of this node: in a SLURM job SLURM's, which need not be the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def choose_gloo_interface(store: "dist.Store", num_local_ranks: int) -> None:
    """Set GLOO_SOCKET_IFNAME, unless it is set, to the interface through which this node and rank 0's reach each other.
    By itself gloo takes that of the host's name, which may be the loopback interface (`127.0.1.1 node1` in /etc/hosts)
    or a network that other nodes cannot reach. A collective; raises RuntimeError if the last rank does not come."""
    ours, first = find_route(os.environ["MASTER_ADDR"])
    num_ranks = int(os.environ["WORLD_SIZE"])
    # The last rank is on another node than rank 0, if there are several.
    if int(os.environ["RANK"]) == num_ranks - 1:
        store.set("address_of_rank_0", first)
    if ipaddress.ip_address(ours).is_loopback and num_local_ranks < num_ranks:
        ours = store.get("address_of_rank_0").decode()  # this node resolves its name to the loopback interface
    if GLOO_INTERFACE not in os.environ and (interface := find_interface(ours)) is not None:
        os.environ[GLOO_INTERFACE] = interface


def find_route(host: str) -> tuple[str, str]:
    """This node's address on the way to `host`, and the address of `host`. Sends nothing. Raises OSError without a
    route."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as connection:
        connection.connect(target)
        return connection.getsockname()[0], str(target[0])


def find_interface(address: str) -> str | None:
    """Name of this node's interface with an address; None without one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None
