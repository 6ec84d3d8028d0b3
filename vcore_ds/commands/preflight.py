"""`vcore-ds preflight`: check that all nodes are ready for a run, before it starts. One process per rank of the run."""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vcore_ds.commands.arguments import add_recipe
from vcore_ds.common.errors import UserError, first_line
from vcore_ds.common.imports import lasting_imports
from vcore_ds.common.paths import can_be_hub_id, is_readable
from vcore_ds.common.text import GIB, gib
from vcore_ds.config.load import load_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.distributed.network import node_name

HELP = "check that all nodes are ready for a run"
DESCRIPTION = (
    "Compare versions, commit and GPUs of all nodes, check files and free disk, and time a matrix multiplication on "
    "each rank and an all-reduce over all. Start it as train, one process per rank. Exit code 2 if a node is not "
    "ready, with what to do about it. Example: deepspeed --hostfile hosts --module vcore_ds preflight "
    "RECIPE.yaml"
)
TEMPORARY_BYTES = 2 * GIB  # required in the temporary folder, for compiled kernels and files of the processes
MEET_SECONDS = 120.0  # timeout to form the process group, and of the measurement; a working network takes seconds
SHARED_FOLDER_SECONDS = 10.0  # until the other nodes see a new file, whose absence no node has cached
NUM_TIMED = 5  # after an untimed one that builds connections and handles
SLOW_SHARE = 0.8  # of the median speed of all GPUs, below which one is named: all ranks wait for the slowest

add_arguments = add_recipe

T = TypeVar("T")


class Node(NamedTuple):
    """The report of one node."""

    host: str
    facts: Mapping[str, str | None]  # versions, commit and kind of GPU: the same on all nodes
    problems: Sequence[str]  # what is wrong whatever the other nodes have


def main(arguments: argparse.Namespace) -> None:
    """Compare all nodes, then time them; rank 0 prints. Raises UserError on rank 0, with a line per problem. The other
    ranks exit with the same code."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    with lasting_imports():
        import torch.distributed as dist

        # Imported before any group exists: as default arguments its functions would keep the group and its threads.
        import torch.distributed.nn.functional  # noqa: F401

        from vcore_ds.distributed.process_group import join_process_group, set_variables_of_one_process

    set_variables_of_one_process()
    do_in_time(
        lambda: join_process_group("gloo", timedelta(seconds=MEET_SECONDS)),
        "no meeting of all ranks",
        "all ranks to reach each other over TCP. Open all ports between the nodes, or set GLOO_SOCKET_IFNAME to the "
        "interface of a network between them (`ip -br address`)",
    )
    try:
        time_ranks(has_gpus=compare_nodes(recipe))
    finally:
        # Ends gloo's threads. A thread that still frees tensors while the interpreter shuts down aborts the process,
        # in 1 of 100 runs on busy cores.
        dist.destroy_process_group()


def compare_nodes(recipe: Recipe) -> bool:
    """Print what the nodes have; return whether they have GPUs. Raises UserError for problems, as `main`."""
    host, output = node_name(), Path(recipe.run.output_dir).absolute()
    folder = next(parent for parent in (output, *output.parents) if parent.is_dir())
    mark = gather(make_mark(folder) if _is_first() else None)[0]
    num_ranks = gather(host).count(host)
    is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
    nodes = [node for node in gather(inspect(recipe, mark, num_ranks) if is_first_of_node else None) if node]
    if _is_first():
        mark.unlink(missing_ok=True)
        facts = ", ".join(f"{name} {value}" for name, value in nodes[0].facts.items() if value)
        print(f"preflight: {len(nodes)} nodes; on {nodes[0].host}: {facts}", flush=True)
    problems = [f"{node.host}: {problem}" for node in nodes for problem in node.problems]
    _refuse("the nodes are not ready for this run", [*find_differences(nodes), *problems])
    return any(node.facts[KIND] for node in nodes)


KIND = "kind of GPU"


def gather(value: Any) -> list[Any]:
    """All-gather `value` through host memory. A collective. Raises UserError where another rank has ended, or does not
    come in `MEET_SECONDS`."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(gathered, value)
    except RuntimeError as error:
        raise UserError(
            f"preflight: {node_name()}: found {first_line(error)!r}, expected a report of each node. Look at the "
            "messages of the other nodes"
        ) from None
    return gathered


def _is_first() -> bool:
    return os.environ["RANK"] == "0"


def _refuse(what: str, problems: Sequence[str]) -> None:
    """End all ranks if there are problems, which are the same on all ranks; rank 0 prints them."""
    if problems and _is_first():
        raise UserError("\n  ".join([f"preflight: {what}:", *problems]))
    if problems:
        time.sleep(3.0)  # the launcher kills all ranks once one exits; give rank 0 time to print
        sys.exit(UserError.EXIT_CODE)


def inspect(recipe: Recipe, mark: Path, num_ranks: int) -> Node:
    """Report on this node with `num_ranks` ranks; `mark` is the file that rank 0 has made in the output folder."""
    import torch

    from vcore_ds.distributed.device import find_driver_version, uses_gpu
    from vcore_ds.training.run_folder import describe_environment

    environment, problems, gpus = describe_environment(world_size=1), list(find_unreadable(recipe)), []
    try:
        gpus = list(environment["devices"]) if uses_gpu() else []
        num_expected = num_ranks if gpus or "SLURM_GPUS_ON_NODE" in os.environ else 0
        if len(gpus) != num_expected:
            problems.append(
                f"GPUs: found {len(gpus)} that PyTorch can use, expected {num_expected}. Check nvidia-smi there, or "
                "leave the node out with sbatch --exclude"
            )
    except UserError as error:  # a line of the report, beside those of other nodes
        problems.append(str(error))
    if num_ranks % recipe.parallel.tensor:
        problems.append(
            f"parallel.tensor: found {recipe.parallel.tensor} with {num_ranks} ranks on the node, expected a divisor "
            "of them: tensor-parallel ranks exchange the activations of every layer"
        )
    if not _appears(mark):
        problems.append(
            f"run.output_dir: found no file that rank 0 made in {mark.parent}, expected a folder that all nodes share "
            "and can write. Set run.output_dir"
        )
    needed = [(Path(tempfile.gettempdir()), TEMPORARY_BYTES)]
    if _is_first():  # the other nodes share the output folder
        needed.append((mark.parent, compute_output_bytes(recipe) or 0))
    problems += [
        f"free disk: found {_space(free)} in {folder}, expected {_space(num_bytes)}. Free some, or set TMPDIR or "
        "run.output_dir to another disk, or lower checkpoint.keep_last"
        for folder, num_bytes in needed
        if (free := shutil.disk_usage(folder).free) < num_bytes
    ]
    return Node(
        node_name(),
        {
            "python": environment["python"],
            **environment["packages"],
            "CUDA of torch": torch.version.cuda,
            "NCCL": None if torch.version.cuda is None else ".".join(map(str, torch.cuda.nccl.version())),
            "NVIDIA driver": find_driver_version(),
            "commit": environment["git_commit"],
            KIND: " + ".join(sorted(set(gpus))) or None,
        },
        problems,
    )


def find_unreadable(recipe: Recipe) -> Iterator[str]:
    """A line for each key of the recipe whose file this node cannot read."""
    from vcore_ds.models.architecture_check import check_model_folder
    from vcore_ds.models.description import read_model  # take seconds to import; one rank of a node needs them

    try:
        check_model_folder(recipe.model.path)
        read_model(recipe.model.path)
    except (UserError, OSError, ValueError) as error:
        problem = first_line(error).removeprefix("model.path: ")
        yield f"model.path: found {problem}. Give a folder that all nodes share"
    for key, path in recipe.data.paths().items():
        # A data set on the hub is read when the run starts. A path whose parent folder exists here is not a hub id.
        if not is_readable(path) and (not can_be_hub_id(path) or Path(path).parent.is_dir()):
            yield f"data.{key}: found nothing to read at {path}. Give a file that all nodes share"


def compute_output_bytes(recipe: Recipe) -> int | None:
    """Free bytes that the run still needs, for its result and its checkpoints, one more than it keeps; None for a model
    that cannot be read."""
    from vcore_ds.models.architecture_check import count_parameters
    from vcore_ds.models.description import DTYPES  # takes seconds to import, and only rank 0 needs it

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


def make_mark(folder: Path) -> Path:
    """Make an empty file; where that fails, return the path of a file that is not there."""
    try:
        handle, name = tempfile.mkstemp(prefix=".preflight_", dir=folder)
    except OSError:
        return folder / ".preflight_not_made"
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


def find_differences(nodes: Sequence[Node]) -> Iterator[str]:
    """A line for each fact of a node that differs from what most have."""
    for what in dict.fromkeys(name for node in nodes for name in node.facts):
        usual, number = Counter(node.facts.get(what) for node in nodes).most_common(1)[0]
        for host, value in ((node.host, node.facts.get(what)) for node in nodes):
            if value != usual:
                yield (
                    f"{host}: {what}: found {value or 'none'}, expected {usual or 'none'} as on {number} of "
                    f"{len(nodes)} nodes. Use one environment and checkout on a shared disk, and nodes of one kind "
                    f"(sbatch --constraint, --exclude={host})"
                )


def _space(num_bytes: int) -> str:
    return f"{gib(num_bytes, 1)} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.3g} MiB"


def time_ranks(has_gpus: bool) -> None:
    """Time a matrix multiplication on each rank and an all-reduce over all; rank 0 prints. Ends all ranks where the
    all-reduce fails, or a GPU is slow."""
    size, num_bytes = (8192, 256 * 2**20) if has_gpus else (512, 16 * 2**20)
    matmul_seconds, seconds = do_in_time(
        lambda: _measure(size, num_bytes, has_gpus),
        f"no all-reduce of {num_bytes} bytes",
        "the sum within a second. Set NCCL_SOCKET_IFNAME to the interface of the network between the nodes, "
        "NCCL_IB_HCA to the InfiniBand adapters; NCCL_DEBUG=INFO shows what NCCL chose",
    )
    speeds = gather((node_name(), 2 * size**3 / matmul_seconds / 1e12))
    if os.environ["RANK"] == "0":
        # The bus bandwidth of nccl-tests, which does not depend on the number of ranks.
        bandwidth = 2 * (1 - 1 / len(speeds)) * num_bytes / seconds
        slowest, fastest = min(speed for _, speed in speeds), max(speed for _, speed in speeds)
        print(
            f"  matrix multiplication: {slowest:.3g} to {fastest:.3g} TFLOP/s\n"
            f"  all-reduce of {num_bytes / 2**20:g} MiB over {len(speeds)} ranks: {seconds * 1e3:.3g} ms, bus "
            f"bandwidth {bandwidth / 1e9:.3g} GB/s",
            flush=True,
        )
    _refuse("a GPU is slower than the others", find_slow_gpus(speeds) if has_gpus else [])


def do_in_time(work: Callable[[], T], missing: str, expected: str) -> T:
    """Return `work()`, or print a message and end the process if it fails or takes `MEET_SECONDS`. In a thread: forming
    a group blocks in C. gloo goes on for minutes after its timeout, NCCL hangs where a network drops its packets."""
    working = ThreadPoolExecutor(1).submit(work)
    try:
        return working.result(MEET_SECONDS)
    except (TimeoutError, RuntimeError) as error:
        found = first_line(error) if working.done() else f"{missing} in {MEET_SECONDS:g} s"
        message = f"{node_name()}: rank {os.environ['RANK']}: found {found}, expected {expected}"
        print(f"vcore-ds: preflight: {message}", file=sys.stderr, flush=True)
        os._exit(UserError.EXIT_CODE)  # a normal exit would wait for the thread that hangs


def _measure(size: int, num_bytes: int, on_gpu: bool) -> tuple[float, float]:
    """Median seconds of a square matrix multiplication, and of an all-reduce by NCCL with one GPU per rank, else gloo.
    Raises RuntimeError for a wrong sum."""
    import torch
    import torch.distributed as dist

    group, device = None, torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl", timeout=timedelta(seconds=MEET_SECONDS))

    def time_median(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(1 + NUM_TIMED):
            dist.barrier()  # over gloo, so that all ranks start together
            started = time.perf_counter()
            work()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:])

    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    values = torch.ones(num_bytes // 4, device=device)
    medians = time_median(lambda: matrix @ matrix), time_median(lambda: dist.all_reduce(values, group=group))
    expected = float(dist.get_world_size()) ** (1 + NUM_TIMED)
    # Also detects a network that corrupts data. The sum is finite in fp32 up to millions of ranks.
    if not torch.allclose(values, torch.full_like(values, expected)):
        raise RuntimeError(f"the all-reduce gave {float(values.min()):g} to {float(values.max()):g}, not {expected:g}")
    return medians


def find_slow_gpus(speeds: Sequence[tuple[str, float]]) -> list[str]:
    """A line for each rank that is clearly slower than most; `speeds`: host and TFLOP/s of each rank."""
    usual = statistics.median(speed for _, speed in speeds)
    return [
        f"{host}: rank {rank}: found {speed:.3g} TFLOP/s in a matrix multiplication, expected about {usual:.3g} as on "
        "the other ranks, which wait for it. Look at clocks, power and temperature (nvidia-smi -q -d PERFORMANCE)"
        for rank, (host, speed) in enumerate(speeds)
        if speed < SLOW_SHARE * usual
    ]
