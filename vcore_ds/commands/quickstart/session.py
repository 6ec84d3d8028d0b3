"""The quickstart: a pretrained model learns from real reasoning traces, with everything prepared on the way."""

import importlib.metadata
import itertools
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vcore_ds.commands.quickstart.traces import prepare_quickstart_data
from vcore_ds.common.errors import UserError
from vcore_ds.config.files import SHIPPED_RECIPES
from vcore_ds.config.load import load_recipe, make_override
from vcore_ds.config.resume import flat_values
from vcore_ds.config.schema import Recipe
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import on_first_rank
from vcore_ds.train.setup import start_ranks

REPOSITORY = Path(__file__).resolve().parents[3]
DATA = REPOSITORY / "runs" / "quickstart_data"
RECIPE = SHIPPED_RECIPES / "quickstart.yaml"
SCRIPT = "launch_scripts/quickstart.sh"
SHORTER = (
    "Shorter: schedule.num_steps=3 takes fewer steps; data.cutoff_length=208 and batch.global_size=4 make each smaller "
    f"(Ctrl-C, then bash {SCRIPT} with any of them)"
)
"""Advice for a slow machine."""


def prepare(overrides: Sequence[str]) -> list[str]:
    """Prepares model and data on rank 0 while the others wait; returns overrides with their paths and a free output
    folder. A collective.

    Raises:
        UserError: the overrides are wrong, the model and the data cannot be made, or their folder cannot be written.
    """
    recipe, pool = load_with_pool(overrides)
    start_ranks(recipe)

    def make() -> list[str]:
        data = prepare_quickstart_data(DATA)
        folder = REPOSITORY / recipe.run.output_dir
        numbered = (folder.with_name(f"{folder.name}_{number}") for number in itertools.count(2))
        values = {
            "model.path": str(data.model),
            "data.train_path": str(data.train),
            "data.validation_path": {"correct": str(data.correct), "incorrect": str(data.incorrect)},
            "run.output_dir": str(next(path for path in itertools.chain([folder], numbered) if not path.exists())),
        }
        return pool + without_chosen(values, recipe, overrides)

    words: list[str] = layout.gather_objects("job", on_first_rank(make))[0]
    return words


def load_with_pool(overrides: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The recipe, and the override with the pool of trusted traces where it needs one, as with presets/trusted.yaml."""
    try:
        return load_recipe(RECIPE, overrides), []
    except UserError:
        pool = [make_override("data.probe_path", str(DATA / "trusted.jsonl"))]
        with suppress(UserError):
            return load_recipe(RECIPE, [*pool, *overrides]), pool
        raise


def without_chosen(values: dict[str, Any], recipe: Recipe, overrides: Sequence[str]) -> list[str]:
    """`values` as overrides, without the keys that the user set in an override or a fragment."""
    chosen = {override.partition("=")[0] for override in overrides}
    shipped, wanted = flat_values(load_recipe(RECIPE)), flat_values(recipe)
    return [make_override(k, v) for k, v in values.items() if k not in chosen and wanted[k] == shipped[k]]


def say_what_next() -> None:
    """Prints one command to continue with, on rank 0."""
    if layout.is_first():
        print(f"Next: bash {SCRIPT} schedule.num_steps=100  # trains longer; more in README.md")


# Exits with 0 where PyTorch can use a GPU, else with 1; says why where nvidia-smi lists GPUs that it cannot use.


def main() -> int:
    version, built_for = importlib.metadata.version("torch"), None
    if not version.endswith("+cpu"):  # whose import takes seconds and can say nothing else
        import torch

        if torch.cuda.is_available():
            return 0
        built_for = torch.version.cuda
    command = shutil.which("nvidia-smi")
    if command is not None and b"GPU " in subprocess.run([command, "-L"], capture_output=True).stdout:
        reason = f"is a build for CUDA {built_for} that can use none of them; expected a driver that is new enough"
        if built_for is None:
            reason = "is a build without CUDA; expected the build that fits the driver, as README.md says"
        print(f"On the CPU: nvidia-smi lists GPUs, but PyTorch {version} {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
