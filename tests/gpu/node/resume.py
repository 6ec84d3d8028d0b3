"""Resume killed runs of a node on as many ranks and on half of them, compared with the same runs without a kill.

    python -m tests.gpu.node.resume --ranks 8

The folder is copied as a kill after step 4 of 6 would leave it, and resumed from there. Models are tiny.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from tests.gpu.comparison import largest_difference
from tests.gpu.node.launch import run_on_ranks
from tests.gpu.results import is_real_gpu, work_folder, write_results
from tests.helpers import device_runs, resumed_runs
from tests.helpers.device_runs import NUM_STEPS, STOP, read_numbers, write_inputs
from vcore_ds.config.schema import Recipe
from vcore_ds.distributed import layout
from vcore_ds.distributed.device import local_rank, uses_gpu
from vcore_ds.distributed.process_group import start_process_group

RUNS = ("vcore, fp32", "vcore, bf16", "vcore, optimizer in host memory")


def make_recipe(folder: Path, name: str, kind: str, num_before: int) -> Recipe:
    """`num_before`: ranks of the run that is killed."""
    recipe = device_runs.make_recipe(folder, name)
    sections = {
        "batch": recipe.batch.model_copy(update={"global_size": 2 * num_before}),
        "probe": recipe.probe.model_copy(update={"batch_size": 2 * num_before}),
        "run": recipe.run.model_copy(update={"output_dir": str(run_folder(folder, name, kind))}),
    }
    return recipe.model_copy(update=sections)


def run_folder(folder: Path, name: str, kind: str) -> Path:
    return folder / f"{name}, {kind}".replace(", ", "_").replace(" ", "_")


def train(folder: Path, kind: str, num_before: int) -> None:
    """Train on every rank: the runs without a kill, or a copy of each killed run to its end.

    `num_before`: ranks of the run that is killed.
    """
    if uses_gpu():
        torch.cuda.set_device(local_rank())
    # Not with `start_process_group` alone, whose group would end with the first run.
    torch.distributed.init_process_group("nccl" if uses_gpu() else "gloo")
    start_process_group(timeout_minutes=5)
    for name in RUNS:
        recipe, killed = make_recipe(folder, name, kind, num_before), run_folder(folder, name, "killed")
        if kind == "straight":
            resumed_runs.run_and_copy_after(recipe, STOP, killed)
            continue
        if layout.is_first():
            shutil.copytree(killed, recipe.run.output_dir)
        layout.gather_objects("job", None)
        resumed_runs.run_to_end(recipe)


def choose_bound(name: str, same_ranks: bool) -> float:
    """Largest relative difference of a step's loss and gradient norm; 0 where sums have a fixed order."""
    if same_ranks and not is_real_gpu():
        return 0.0
    return 1e-4 if "fp32" in name else 3e-2


def compare(folder: Path, name: str, num_before: int, num_after: int) -> dict[str, Any]:
    straight = run_folder(folder, name, "straight")
    resumed = run_folder(folder, name, f"on {num_after} ranks")
    pairs = zip(read_numbers(resumed), read_numbers(straight), strict=True)
    difference = max(largest_difference(*pair) for pair in pairs)
    tensors, expected = resumed_runs.load_checkpoint_tensors(resumed), resumed_runs.load_checkpoint_tensors(straight)
    differing = [key for key in tensors.keys() | expected.keys() if not torch.equal(tensors[key], expected[key])]
    bound = choose_bound(name, num_after == num_before)
    is_equal = bound > 0 or not differing
    return {
        "run": name,
        "ranks": f"{num_before} to {num_after}",
        "largest difference": difference,
        "bound": bound,
        "tensors of the last checkpoint that differ": f"{len(differing)} of {len(expected)}",
        "result": "passed" if difference <= bound and is_equal else "FAILED",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, help="ranks of the run that is killed")
    parser.add_argument("--train", metavar="KIND", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = work_folder("resume")
    if arguments.train is not None:
        train(folder, arguments.train, arguments.ranks)
        return 0
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_inputs(folder, num_traces=8 * arguments.ranks)
    ranks, others = arguments.ranks, (arguments.ranks, arguments.ranks // 2)
    run_on_ranks(ranks, "tests.gpu.node.resume", "--ranks", str(ranks), "--train", "straight")
    for number in others:
        run_on_ranks(number, "tests.gpu.node.resume", "--ranks", str(ranks), "--train", f"on {number} ranks")
    rows = [compare(folder, name, ranks, number) for number in others for name in RUNS]
    title = f"Runs of {ranks} ranks, killed after step {STOP} of {NUM_STEPS} and resumed."
    note = "Differences: the largest relative one of any step's loss or gradient norm."
    write_results("resume", ranks, title, rows, [note])
    return 0 if all(row["result"] == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
