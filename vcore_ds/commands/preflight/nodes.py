"""What nodes report, and what is wrong with them; no collectives."""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vcore_ds.units import GIB, gib

TEMPORARY_BYTES = 2 * GIB
"""Free space wanted in the temporary folder: compiled kernels, and the files of the processes."""


@dataclass(frozen=True)
class Node:
    """What one node reports."""

    host: str
    packages: dict[str, str]
    commit: str | None
    gpus: tuple[str, ...]
    unreadable: dict[str, str]
    """Key of the recipe: what is wrong with its file on this node."""
    sees_output: bool
    """Whether a file that rank 0 made beside run.output_dir is there on this node."""
    free_output_bytes: int
    free_temporary_bytes: int
    cannot_compile: str | None = None
    """What the node lacks that Triton needs at the first launch of a kernel; None for nothing."""


@dataclass(frozen=True)
class Needed:
    """What every node needs."""

    num_gpus: int
    output_bytes: int
    output_folder: Path
    temporary_bytes: int = TEMPORARY_BYTES
    temporary_folder: Path = Path(tempfile.gettempdir())


def _version(package: str, node: Node) -> str | None:
    return node.packages.get(package)


def find_problems(nodes: Sequence[Node], needed: Needed) -> list[str]:
    """One line each: node, what, found, expected, remedy. What nodes differ in is expected to be as on most of them."""
    problems = []

    def compare(what: str, nodes: Sequence[Node], value_of: Callable[[Node], Any], remedy: str) -> None:
        values = Counter(value_of(node) for node in nodes).most_common()
        for node in nodes if len(values) > 1 else []:
            usual, count = values[0]
            if (value := value_of(node)) != usual:
                found = f"found {value or 'none'}, expected {usual or 'none'} as on {count} of {len(nodes)} nodes"
                problems.append(f"{node.host}: {what}: {found}. {remedy}")

    for name in dict.fromkeys(name for node in nodes for name in node.packages):  # an optional one may be on some
        compare(name, nodes, partial(_version, name), "Use one environment on a shared disk")
    compare("commit", nodes, lambda node: node.commit, "Use one checkout on a shared disk, or the same commit in each")
    problems += [
        f"{node.host}: GPUs: found {len(node.gpus)} that PyTorch can use, expected {needed.num_gpus}. Look at "
        f"nvidia-smi there, and that PyTorch is built for its driver (CUDA {node.packages['CUDA of torch']}); "
        f"leave the node out with sbatch --exclude={node.host}"
        for node in nodes
        if len(node.gpus) != needed.num_gpus
    ]
    with_gpus = [node for node in nodes if node.gpus]
    problems += [
        f"{node.host}: compiling kernels: found {node.cannot_compile}, expected a C compiler and Python's headers, "
        "which Triton needs for the attention of utilities. Install them in the image (apt-get install gcc python3-dev)"
        for node in with_gpus
        if node.cannot_compile is not None
    ]
    compare("kind of GPU", with_gpus, lambda node: " + ".join(sorted(set(node.gpus))), "Ask for one (--constraint)")
    for node in nodes:
        problems += [f"{node.host}: {key}: {problem}" for key, problem in node.unreadable.items()]
        if not node.sees_output:
            problems.append(
                f"{node.host}: run.output_dir: a file made on {nodes[0].host} in {needed.output_folder} is not there, "
                "expected a folder that all nodes share. Set run.output_dir"
            )
        elif node.free_output_bytes < needed.output_bytes:
            problems.append(
                f"{node.host}: free disk: found {_space(node.free_output_bytes)} in {needed.output_folder}, expected "
                f"{_space(needed.output_bytes)}. Free some, set run.output_dir, or lower checkpoint.keep_last"
            )
        if node.free_temporary_bytes < needed.temporary_bytes:
            problems.append(
                f"{node.host}: free disk: found {_space(node.free_temporary_bytes)} in {needed.temporary_folder}, "
                f"expected {_space(needed.temporary_bytes)}. Free some, or set TMPDIR to another disk of the node"
            )
    return problems


def find_split_groups(ranks_of_hosts: Mapping[str, int], tensor: int) -> list[str]:
    """One line for each node on which ranks would share layers with those of another node.

    Args:
        ranks_of_hosts: number of ranks by host.
        tensor: degree of tensor parallelism.
    """
    return [
        f"{host}: parallel.tensor: found {tensor} with {num_ranks} ranks on the node, expected a divisor of them: "
        "tensor-parallel ranks exchange the activations of every layer. Set parallel.tensor, or the ranks of a node"
        for host, num_ranks in ranks_of_hosts.items()
        if num_ranks % tensor
    ]


def describe(nodes: Sequence[Node], needed: Needed) -> str:
    """What rank 0 prints before it says what is wrong."""
    first = nodes[0]
    lines = [
        f"preflight: {len(nodes)} nodes; on {first.host}: commit {first.commit}, "
        + ", ".join(f"{name} {version}" for name, version in first.packages.items()),
        f"  needed: {_space(needed.output_bytes)} in {needed.output_folder}, "
        f"{_space(needed.temporary_bytes)} in {needed.temporary_folder}",
    ]
    for node in nodes:
        gpus = ", ".join(f"{count} x {name}" for name, count in Counter(node.gpus).items()) or "no GPU"
        lines.append(
            f"  {node.host}: {gpus}; free: {_space(node.free_output_bytes)} and {_space(node.free_temporary_bytes)}"
        )
    return "\n".join(lines)


def _space(num_bytes: int) -> str:
    return f"{gib(num_bytes, 1)} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.3g} MiB"
