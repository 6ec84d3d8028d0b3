"""Names of nodes, and the network between them. Imports no torch, for the commands."""

import ipaddress
import os
import socket
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch.distributed import Store


def node_name() -> str:
    """Name of this node: in a SLURM job SLURM's, which need not be the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def choose_gloo_interface(store: "Store", num_local_ranks: int) -> None:
    """Set GLOO_SOCKET_IFNAME, unless it is set, to the interface through which this node and rank 0's reach each other.
    By itself gloo takes that of the host's name, which may be the loopback interface (`127.0.1.1 node1` in /etc/hosts)
    or a network that other nodes cannot reach. A collective; raises RuntimeError if the last rank does not come."""
    family, kind, protocol, _, target = socket.getaddrinfo(os.environ["MASTER_ADDR"], 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as connection:
        connection.connect(target)  # sends nothing
        address = connection.getsockname()[0]
    num_ranks = int(os.environ["WORLD_SIZE"])
    if int(os.environ["RANK"]) == num_ranks - 1:  # on another node than rank 0, if there are several
        store.set("address_of_rank_0", str(target[0]))
    if ipaddress.ip_address(address).is_loopback and num_local_ranks < num_ranks:
        address = store.get("address_of_rank_0").decode()  # to this node its own name is the loopback interface
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
