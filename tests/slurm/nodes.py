"""Nodes with names and networks as on a cluster, as namespaces of this machine in which processes can be started."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

SWITCH = """ip link add switch type bridge && ip link set switch up && {wait}"""
# Without `nodad` an IPv6 address could not be used for a second.
NODE = """hostname {host_name} && mount --bind {hosts} /etc/hosts && ip link set lo up &&
for interface in {interfaces}; do
    ip link add $interface type veth peer name {name}_$interface netns {switch} &&
    nsenter --target {switch} --net ip link set {name}_$interface up && ip link set $interface up || exit
done
nsenter --target {switch} --net ip link set {name}_eth0 master switch &&
for address in {addresses}; do ip address add $address nodad 2>/dev/null || exit; done
{wait}"""
WAIT = "echo up && exec sleep infinity"


class Node(NamedTuple):
    """A node; `name` is SLURM's."""

    name: str
    host_name: str
    hosts: str
    """Its /etc/hosts."""
    addresses: Mapping[str, str]
    """By interface. All nodes reach each other through eth0 only."""


def find_missing_requirement() -> str | None:
    """What this machine lacks for nodes; None if it has all."""
    missing = [name for name in ("ip", "nsenter", "setpriv", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found; apt-get install iproute2 util-linux"
    if os.geteuid() != 0:
        return "namespaces with a network need root"
    needs = "ip link add switch type bridge && ip link add eth0 type veth peer name eth1 && mount --bind /mnt /mnt"
    tried = subprocess.run(["unshare", "--net", "--mount", "bash", "-c", needs], capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode != 0 else None


@contextmanager
def started_nodes(nodes: Sequence[Node], folder: Path) -> Iterator[list[int]]:
    """Start the nodes; yields the id of a process in the namespaces of each."""
    with ExitStack() as stack:

        def start(namespaces: Sequence[str], script: str) -> int:
            words = ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "bash", "-c", script]
            process = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == "up\n", script
            return process.pid

        switch = start(["--net"], SWITCH.format(wait=WAIT))
        started = []
        for node in nodes:
            (folder / f"{node.name}.hosts").write_text(node.hosts)
            addresses = " ".join(f'"{address} dev {interface}"' for interface, address in node.addresses.items())
            script = NODE.format(
                name=node.name, host_name=node.host_name, hosts=folder / f"{node.name}.hosts", switch=switch,
                interfaces=" ".join(node.addresses), addresses=addresses, wait=WAIT,
            )  # fmt: skip
            started.append(start(["--net", "--mount", "--uts"], script))
        yield started


def enter_node(process: int) -> None:
    """Move this process, which must have one thread, into the namespaces of a node."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = os.getcwd()
    for kind in ("net", "uts", "mnt"):
        with open(f"/proc/{process}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"{kind} namespace of a node")
    os.chdir(folder)
