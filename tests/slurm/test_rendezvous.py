"""The ranks of two nodes meet whatever the nodes' names and interfaces; where they cannot, they say so and end.

The nodes are namespaces (`nodes.py`). `train.sh` runs with a scontrol and an srun that know them; its launchers and
their ranks are forked, since imports take most of their time."""

import argparse
import dataclasses
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from torch.distributed import run

from tests.helpers.commands import REPOSITORY, free_port
from tests.helpers.jobs import ForkedJob
from tests.helpers.setups import TinySetup
from tests.slurm.nodes import Node, enter_node, find_missing_requirement, started_nodes
from vcore_ds.commands import cli, preflight
from vcore_ds.distributed import torchrun

pytestmark = pytest.mark.dist

ADDRESSES = {"gpu-2": "10.2.0.2", "gpu-10": "10.2.0.10"}
"""Of the nodes, in SLURM's order; as text, gpu-10 would be the first."""
OTHER_NETWORK = {"gpu-2": "10.1.0.2/24", "gpu-10": "10.1.0.10/24"}
"""Of interfaces through which the nodes do not reach each other."""


def make_nodes(hosts: str, host_names: Sequence[str] = tuple(ADDRESSES), *, others: bool = False) -> list[Node]:
    """Make nodes with these host names. `hosts`: lines of /etc/hosts, before those of the other node. `others`: whether
    they also have the other network."""
    nodes = []
    for (name, address), host_name in zip(ADDRESSES.items(), host_names, strict=True):
        rest = "".join(f"{there} {other}\n" for other, there in ADDRESSES.items() if other != name)
        own = hosts.format(name=name, address=address, host_name=host_name, other=OTHER_NETWORK[name][:-3])
        interfaces = {"eth1": OTHER_NETWORK[name]} if others else {}
        nodes.append(Node(name, host_name, f"{own}\n{rest}", {**interfaces, "eth0": f"{address}/24"}))
    return nodes


USUAL = "127.0.0.1 localhost\n{address} {name}"
CASES = {
    "own name on 127.0.0.1": make_nodes("127.0.0.1 localhost {name}"),
    "own name on 127.0.1.1, as by Debian": make_nodes("127.0.0.1 localhost\n127.0.1.1 {name}"),
    "other host names, which nobody knows": make_nodes(USUAL, ["host-1", "host-2"]),
    "one host name": make_nodes(USUAL, ["image", "image"]),
    "host name on another network": make_nodes(USUAL + "\n{other} {host_name}", ["host-1", "host-2"], others=True),
    "IPv6 only": [
        Node(name, name, "fd00::2 gpu-2\nfd00::10 gpu-10\n", {"eth0": f"fd00::{name.removeprefix('gpu-')}/64"})
        for name in ADDRESSES
    ],
}
SCONTROL = r"""case "$2" in
hostnames) printf '%s\n' gpu-2 gpu-10;;
node) printf 'NodeName=%s Arch=x86_64\n   NodeAddr=%s NodeHostName=%s Version=24.11\n' "$3" "$3" "$3";;
esac"""
SRUN = """while [[ $1 == -* ]]; do shift; done
SLURM_NODEID=0 SLURMD_NODENAME=gpu-2 "$@" && SLURM_NODEID=1 SLURMD_NODENAME=gpu-10 "$@" """


def list_launchers(folder: Path, *overrides: str) -> list[list[str]]:
    """The arguments of the preflight's launcher on each node."""
    (folder / "bin").mkdir()
    (folder / "launch_scripts").symlink_to(REPOSITORY / "launch_scripts")
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "python": 'echo "$@" >> launchers'}.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": "gpu-[2,10]", "SLURM_JOB_NUM_NODES": "2"}
    variables = os.environ | job | {"SLURM_STEP_ID": "0", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    words = ["bash", REPOSITORY / "launch_scripts" / "train.slurm", "qwen3_8b_math_full", *overrides]
    subprocess.run(words, cwd=folder, env=variables, check=True)
    return [line.split() for line in (folder / "launchers").read_text().splitlines()[: len(ADDRESSES)]]


def launch(arguments: Sequence[str]) -> int:
    """Do what a node's launcher does, on the node of this process's RANK. `arguments`: the processes of the nodes,
    then the launcher's arguments for each node."""
    number, num_nodes = int(os.environ["RANK"]), len(ADDRESSES)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    enter_node(int(arguments[number]))
    os.environ["SLURMD_NODENAME"] = list(ADDRESSES)[number]
    config_from_args = run.config_from_args

    def fork_ranks(parsed: argparse.Namespace) -> tuple:
        config = dataclasses.replace(config_from_args(parsed)[0], start_method="fork")
        return config, become_rank, parsed.training_script_args

    run.config_from_args = fork_ranks
    return torchrun.main(arguments[num_nodes + number].split()[2:])


def become_rank(*arguments: str) -> None:
    preflight.MEET_SECONDS = float(os.environ.get("MEET_SECONDS", preflight.MEET_SECONDS))
    if code := cli.main(arguments):
        cli.end_process(code)  # with 0 torch expects a result of this function


def run_preflight(
    nodes: Sequence[Node], folder: Path, setup: TinySetup, variables: Mapping[str, str]
) -> tuple[int, str]:
    """Exit code and output of the preflight that `train.sh` starts on these nodes."""
    launchers = [" ".join(words) for words in list_launchers(folder, *setup.overrides(folder / "run"))]
    with started_nodes(nodes, folder) as processes:
        arguments = [*map(str, processes), *launchers]
        job = ForkedJob(launch, arguments, folder / "log", num_ranks=len(nodes), rank_0_serves_store=True, **variables)
        with job:
            return job.wait(), job.output


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    missing = find_missing_requirement()
    if missing is not None:
        pytest.skip(f"MEETING OF NODES IS NOT TESTED HERE: {missing}")


@pytest.mark.parametrize("case", CASES)
def test_the_ranks_of_two_nodes_meet(case: str, setup: TinySetup, tmp_path: Path) -> None:
    code, output = run_preflight(CASES[case], tmp_path, setup, {})
    assert code == 0, output
    # Rank 0 is on the node whose log has the progress.
    assert "preflight: 2 nodes; on gpu-2: " in output and "all-reduce of 16 MiB over 2 ranks" in output, output


def test_ranks_that_cannot_meet_say_so_and_end(setup: TinySetup, tmp_path: Path) -> None:
    """gloo itself would go on for minutes after its timeout."""
    nodes = CASES["host name on another network"]
    code, output = run_preflight(nodes, tmp_path, setup, {"GLOO_SOCKET_IFNAME": "eth1", "MEET_SECONDS": "3"})
    assert code == 2 and "Traceback" not in output, output
    assert "found no meeting of all ranks in 3 s" in output and "set GLOO_SOCKET_IFNAME" in output, output
