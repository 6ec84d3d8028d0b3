"""Inspect and compare the nodes of a run for `vcore-ds preflight`, with one process per rank of the run."""

import os
import shutil
import socket
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vcore_ds.commands.preflight import interconnect
from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.paths import can_be_hub_id, is_readable
from vcore_ds.common.text import GIB, gib
from vcore_ds.config.schema import Recipe
from vcore_ds.distributed.device import uses_gpu
from vcore_ds.distributed.unused_gpus import run_nvidia_smi
from vcore_ds.training.run_folder import describe_environment

TEMPORARY_BYTES = 2 * GIB
"""Required free space in the temporary folder, for compiled kernels and files of the processes."""


@dataclass(frozen=True)
class Node:
    """The report of one node."""

    host: str
    packages: dict[str, str]
    commit: str | None
    gpus: tuple[str, ...]
    unreadable: dict[str, str]  # key of the recipe -> problem with its file on this node
    sees_output: bool  # whether the node sees a file that rank 0 made next to run.output_dir
    free_output_bytes: int
    free_temporary_bytes: int
    cannot_compile: str | None = None
    """Problem that keeps Triton from launching its first kernel on the node; None if there is none."""
    machine: Mapping[str, str | None] = field(default_factory=dict)  # names of `REMEDIES` -> what this node has
    unused_gpus: str | None = None
    """Why PyTorch cannot use the node's GPUs, and what to do; None if it can, or if there are none."""


REMEDIES = {
    "NVIDIA driver": "Install one version on all nodes",
    "NCCL": "Use one environment on a shared disk; look for an LD_PRELOAD or a system library of another version there",
    "InfiniBand": "Look for ports that are down (ibstat)",
    "clocks and power limits": "Set them as elsewhere (nvidia-smi -rgc, -pl): all ranks wait for the slowest GPU",
    "hardware slowdown of GPUs": "Look at temperatures and power there (nvidia-smi -q -d PERFORMANCE)",
}
"""Facts compared between nodes, with the advice where one differs."""


@dataclass(frozen=True)
class Requirements:
    """Requirements of a run on each node."""

    num_gpus: int
    output_bytes: int | None  # None for a model of unknown size
    output_folder: Path
    temporary_bytes: int = TEMPORARY_BYTES
    temporary_folder: Path = Path(tempfile.gettempdir())


def find_problems(nodes: Sequence[Node], needed: Requirements) -> list[str]:
    """A line per problem: node, what, found, expected, remedy. Where nodes differ, the majority is expected."""
    problems = []

    def compare(what: str, nodes: Sequence[Node], values: Sequence[str | None], remedy: str) -> None:
        for node, value in zip(nodes, values, strict=True):
            usual, count = Counter(values).most_common(1)[0]
            if value != usual:
                found = f"found {value or 'none'}, expected {usual or 'none'} as on {count} of {len(nodes)} nodes"
                problems.append(f"{node.host}: {what}: {found}. {remedy}")

    for name in dict.fromkeys(name for node in nodes for name in node.packages):
        compare(name, nodes, [node.packages.get(name) for node in nodes], "Use one environment on a shared disk")
    for name, remedy in REMEDIES.items():
        compare(name, nodes, [node.machine.get(name) for node in nodes], remedy)
    commits = [node.commit for node in nodes]
    compare("commit", nodes, commits, "Use one checkout on a shared disk, or the same commit in each")
    with_gpus = [node for node in nodes if node.gpus]
    kinds = [" + ".join(sorted(set(node.gpus))) for node in with_gpus]
    compare("kind of GPU", with_gpus, kinds, "Request one kind (--constraint)")
    return problems + [
        f"{node.host}: {problem}" for node in nodes for problem in _find_node_problems(node, needed, nodes[0].host)
    ]


def _find_node_problems(node: Node, needed: Requirements, first_host: str) -> Iterator[str]:
    if node.unused_gpus is not None:
        yield node.unused_gpus
    elif len(node.gpus) != needed.num_gpus:
        yield (
            f"GPUs: found {len(node.gpus)} that PyTorch can use, expected {needed.num_gpus}. Check nvidia-smi there, "
            f"or leave the node out with sbatch --exclude={node.host}"
        )
    if node.gpus and node.cannot_compile is not None:
        yield (
            f"compiling kernels: found {node.cannot_compile}, expected a C compiler and Python's headers, which Triton "
            "needs for attention in JVP passes. Install them in the image (apt-get install gcc python3-dev)"
        )
    yield from (f"{key}: {problem}" for key, problem in node.unreadable.items())
    if not node.sees_output:
        yield (
            f"run.output_dir: found no file that {first_host} made in {needed.output_folder}, expected a folder that "
            "all nodes share. Set run.output_dir"
        )
    elif needed.output_bytes is not None and node.free_output_bytes < needed.output_bytes:
        yield (
            f"free disk: found {_space(node.free_output_bytes)} in {needed.output_folder}, expected "
            f"{_space(needed.output_bytes)}. Free some, set run.output_dir, or lower checkpoint.keep_last"
        )
    if node.free_temporary_bytes < needed.temporary_bytes:
        yield (
            f"free disk: found {_space(node.free_temporary_bytes)} in {needed.temporary_folder}, expected "
            f"{_space(needed.temporary_bytes)}. Free some, or set TMPDIR to another disk of the node"
        )


def find_split_groups(ranks_of_hosts: Mapping[str, int], tensor: int) -> list[str]:
    """A line for each node with a tensor-parallel group (of `tensor` ranks) that extends to another node.
    `ranks_of_hosts`: host -> number of ranks."""
    return [
        f"{host}: parallel.tensor: found {tensor} with {num_ranks} ranks on the node, expected a divisor of them: "
        "tensor-parallel ranks exchange the activations of every layer. Set parallel.tensor, or the ranks of a node"
        for host, num_ranks in ranks_of_hosts.items()
        if num_ranks % tensor
    ]


def describe(nodes: Sequence[Node], needed: Requirements) -> str:
    first = nodes[0]
    packages = ", ".join(f"{name} {version}" for name, version in first.packages.items())
    temporary = _space(needed.temporary_bytes)
    output = "an unknown size" if needed.output_bytes is None else _space(needed.output_bytes)
    lines = [
        f"preflight: {len(nodes)} nodes; on {first.host}: commit {first.commit}, {packages}",
        f"  needed: {output} in {needed.output_folder}, {temporary} in {needed.temporary_folder}",
    ]
    for node in nodes:
        gpus = ", ".join(f"{count} x {name}" for name, count in Counter(node.gpus).items()) or "no GPU"
        free = f"{_space(node.free_output_bytes)} and {_space(node.free_temporary_bytes)}"
        lines.append(f"  {node.host}: {gpus}; free: {free}")
    return "\n".join(lines)


def _space(num_bytes: int) -> str:
    return f"{gib(num_bytes, 1)} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.3g} MiB"


MEET_SECONDS = 120.0
"""Timeout to form the process group, and of the all-reduce; both take seconds on a working network."""
SHARED_FOLDER_SECONDS = 10.0
"""Timeout until the other nodes see a new file. Its name is new, so no node has cached its absence."""
ALL_REDUCE_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}


def preflight(recipe: Recipe) -> None:
    """Compare all nodes and time an all-reduce. Every rank calls it; rank 0 prints. Raises UserError on rank 0, with
    every problem: node, found, expected, remedy. The other ranks exit with the same code."""
    host = socket.gethostname()
    try:
        with interconnect.plain_group(MEET_SECONDS):
            _preflight(recipe, host)
    except ConnectionError as error:
        raise UserError(
            f"preflight: {host}: found {error} on {interconnect.find_gloo_network()}, expected all ranks to reach each "
            "other over TCP. Set GLOO_SOCKET_IFNAME to the interface of the network between the nodes (`ip -br "
            "address`)"
        ) from None


def _preflight(recipe: Recipe, host: str) -> None:
    is_first = interconnect.rank() == 0
    output = Path(recipe.run.output_dir).absolute()
    folder = next(parent for parent in (output, *output.parents) if parent.is_dir())
    mark = interconnect.gather(_make_mark(folder) if is_first else None)[0]
    if isinstance(mark, str):
        problem = f"{host}: found {mark}, expected a folder that can be written. Set run.output_dir"
        _refuse("there is no place for the run", [problem], is_first)
    is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
    nodes = [node for node in interconnect.gather(inspect(recipe, folder, mark) if is_first_of_node else None) if node]
    if is_first:
        mark.unlink(missing_ok=True)

    num_bytes = interconnect.gather(compute_output_bytes(recipe) if is_first else None)[0]
    # One GPU per rank; none if no node has any, unless SLURM has allocated some.
    needs_gpu = any(node.gpus for node in nodes) or "SLURM_GPUS_ON_NODE" in os.environ
    ranks_of_hosts = Counter(interconnect.gather(host))
    needed = Requirements(max(ranks_of_hosts.values()) if needs_gpu else 0, num_bytes, folder)
    if is_first:
        print(describe(nodes, needed), flush=True)
    problems = [*find_problems(nodes, needed), *find_split_groups(ranks_of_hosts, recipe.parallel.tensor)]
    _refuse("the nodes are not ready for this run", problems, is_first)
    _time_all_reduce(host, is_first, needs_gpu)


def _refuse(what: str, problems: Sequence[str], is_first: bool) -> None:
    """End all ranks if there are problems, which are the same on all ranks; rank 0 prints them."""
    if problems and is_first:
        raise UserError("\n  ".join([f"preflight: {what}:", *problems]))
    if problems:
        time.sleep(3.0)  # the launcher kills all ranks once one exits; give rank 0 time to print
        sys.exit(UserError.EXIT_CODE)


def inspect(recipe: Recipe, output_folder: Path, mark: Path) -> Node:
    """Report on this node; `mark` is the file that rank 0 has made in the output folder."""
    facts, gpus, unused_gpus = describe_environment(world_size=1), (), None
    try:
        gpus = tuple(facts["devices"]) if uses_gpu() else ()
    except UserError as error:  # a line of the report, beside those of other nodes
        unused_gpus = str(error)
    versions = {"python": facts["python"], **facts["packages"], "CUDA of torch": str(torch.version.cuda)}
    return Node(
        host=socket.gethostname(),
        packages=versions,
        commit=facts["git_commit"],
        gpus=gpus,
        unreadable=find_unreadable(recipe),
        sees_output=_appears(mark),
        free_output_bytes=shutil.disk_usage(output_folder).free if output_folder.exists() else 0,
        free_temporary_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
        cannot_compile=find_missing_compiler() if recipe.method.uses_utilities else None,
        machine=describe_machine(),
        unused_gpus=unused_gpus,
    )


def describe_machine() -> dict[str, str | None]:
    """This node's values for `REMEDIES`; None for what it does not have or tell."""
    nccl = None if torch.version.cuda is None else ".".join(map(str, torch.cuda.nccl.version()))
    ports = Counter(port.partition(" ")[2] for port in interconnect.find_infiniband_ports())
    values = (
        query_gpus("driver_version"),
        nccl,
        ", ".join(f"{count} x {rate}" for rate, count in ports.items()) or None,
        query_gpus("clocks.max.sm,power.limit"),
        query_gpus("clocks_throttle_reasons.hw_slowdown"),
    )
    return dict(zip(REMEDIES, values, strict=True))


def query_gpus(fields: str) -> str | None:
    """nvidia-smi's values of these fields, each once where GPUs have the same; None without an answer."""
    done = run_nvidia_smi(fields)
    if done is None or done.returncode != 0:
        return None
    return "; ".join(dict.fromkeys(done.stdout.splitlines())) or None


def find_missing_compiler() -> str | None:
    """Return what Triton lacks to compile its kernel launchers (`triton/runtime/build.py`), or None. Python packages
    do not install these, and slim images lack them."""
    compiler = os.environ.get("CC") or "gcc or clang"
    if not any(shutil.which(name) for name in compiler.split(" or ")):
        return f"no {compiler}"
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return None if headers.exists() else f"no {headers}"


def compute_output_bytes(recipe: Recipe) -> int | None:
    """Free bytes that the run still needs, for its result and its checkpoints, one more than it keeps; None for a model
    that cannot be read."""
    from vcore_ds.models.architecture_check import count_parameters
    from vcore_ds.models.loading import DTYPES  # takes seconds to import, and only rank 0 needs it

    num_parts = recipe.parallel.tensor
    counts = count_parameters(recipe.model.path, recipe.lora, num_parts)
    if not counts.all:
        return None
    # Master weights, and two moments of AdamW. Muon's matrices have one, but not the embeddings.
    num_fp32_states = 1 if recipe.optimizer.name == "sgd" else 3
    parameter_bytes = DTYPES[recipe.model.precision].itemsize
    checkpoint = num_parts * counts.trained * (4 * num_fp32_states + parameter_bytes)  # last: the probe direction
    written = len(list(Path(recipe.run.output_dir).glob("checkpoints/step_*/COMPLETE")))
    result = num_parts * (counts.all if recipe.lora is None else counts.trained) * parameter_bytes
    return max(1, recipe.checkpoint.keep_last + 1 - written) * checkpoint + result


def find_unreadable(recipe: Recipe) -> dict[str, str]:
    """Key of each file of the recipe that this node cannot read -> problem with its remedy."""
    from vcore_ds.models.configuration import read_config  # take seconds to import; one rank of a node needs them
    from vcore_ds.models.model_folder import check_model_folder

    problems = {}
    try:
        check_model_folder(recipe.model.path)
        read_config(recipe.model.path)
    except (UserError, OSError, ValueError) as error:
        problem = first_line(error).removeprefix("model.path: ")
        problems["model.path"] = f"found {problem}. Give a folder that all nodes share"
    for key, path in recipe.data.paths().items():
        # A data set on the hub is read when the run starts. A path whose parent folder exists here is not a hub id.
        if not is_readable(path) and (not can_be_hub_id(path) or Path(path).parent.is_dir()):
            problems[f"data.{key}"] = f"found nothing to read at {path}. Give a file that all nodes share"
    return problems


def _make_mark(folder: Path) -> Path | str:
    """Make an empty file; return the error if that fails."""
    try:
        handle, name = tempfile.mkstemp(prefix=".preflight_", dir=folder)
    except OSError as error:
        return str(error)
    os.close(handle)
    return Path(name)


def _appears(path: Path) -> bool:
    """Whether the file is visible within `SHARED_FOLDER_SECONDS`."""
    deadline = time.monotonic() + SHARED_FOLDER_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(1.0)
    return True


def _time_all_reduce(host: str, is_first: bool, needs_gpu: bool) -> None:
    """Time an all-reduce; rank 0 prints its bandwidth and the networks. Refuses sockets where there is InfiniBand."""
    num_bytes = ALL_REDUCE_BYTES["cuda" if needs_gpu else "cpu"]
    with interconnect.nccl_log() as log:
        try:
            seconds = interconnect.time_all_reduce(num_bytes, MEET_SECONDS)
        except (TimeoutError, RuntimeError) as error:
            print(
                f"vcore-ds: preflight: {host}: rank {interconnect.rank()}: found {first_line(error)}, expected the sum "
                "within a second. Set NCCL_SOCKET_IFNAME to the interface of the network between the nodes, "
                "NCCL_IB_HCA to the InfiniBand adapters; NCCL_DEBUG=INFO shows what NCCL chose",
                file=sys.stderr,
                flush=True,
            )
            os._exit(UserError.EXIT_CODE)  # a normal exit would wait for the thread that hangs
        chosen = interconnect.parse_nccl_network(log.read_text()) if log is not None and log.exists() else None
    network = chosen or interconnect.find_gloo_network()
    reports = interconnect.gather((host, network, interconnect.find_infiniband_ports() if needs_gpu else []))
    if is_first:
        # The bus bandwidth of nccl-tests, which does not depend on the number of ranks.
        bandwidth = 2 * (1 - 1 / len(reports)) * num_bytes / seconds
        print(
            f"  all-reduce of {num_bytes / 2**20:g} MiB over {len(reports)} ranks: {seconds * 1e3:.3g} ms, bus "
            f"bandwidth {bandwidth / 1e9:.3g} GB/s"
        )
        for i, (name, used, ports) in enumerate(reports):
            print(f"    rank {i} on {name}: {used}" + (f" (ports: {', '.join(ports)})" if ports else ""), flush=True)
    slow = [
        f"{name}: rank {i}: found {used}, expected InfiniBand, of which the node has {', '.join(ports)}. Check "
        "rdma-core in the image, /dev/infiniband, and NCCL_IB_HCA; set NCCL_IB_DISABLE=1 if sockets are intended"
        for i, (name, used, ports) in enumerate(reports)
        if ports and used.startswith("Socket") and os.environ.get("NCCL_IB_DISABLE") != "1"
    ]
    _refuse("NCCL does not use the InfiniBand network", slow, is_first)
