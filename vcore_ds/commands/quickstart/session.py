"""The quickstart: train a pretrained model on recorded solutions, with model and data prepared on the way."""

import itertools
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
from vcore_ds.distributed.process_group import run_on_first_rank
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
    """Prepare model and data on rank 0, and return overrides with their paths and an unused output folder. Collective.

    Raises UserError where the overrides are wrong, or model and data cannot be made or written.
    """
    recipe, pool = load_with_pool(overrides)
    start_ranks(recipe.engine, recipe.parallel)

    def prepare_and_override() -> list[str]:
        data = prepare_quickstart_data(DATA)
        folder = REPOSITORY / recipe.run.output_dir
        folders = itertools.chain([folder], (folder.with_name(f"{folder.name}_{i}") for i in itertools.count(2)))
        values = {
            "model.path": str(data.model),
            "data.train_path": str(data.train),
            "data.validation_path": {"correct": str(data.correct), "incorrect": str(data.incorrect)},
            "run.output_dir": str(next(path for path in folders if not path.exists())),
        }
        return pool + without_chosen(values, recipe, overrides)

    words: list[str] = layout.gather_objects("job", run_on_first_rank(prepare_and_override))[0]
    return words


def load_with_pool(overrides: Sequence[str]) -> tuple[Recipe, list[str]]:
    """Load the recipe, and the override with the trusted traces where it needs them (presets/trusted.yaml)."""
    try:
        return load_recipe(RECIPE, overrides), []
    except UserError:
        pool = [make_override("data.probe_path", str(DATA / "trusted.jsonl"))]
        with suppress(UserError):
            return load_recipe(RECIPE, [*pool, *overrides]), pool
        raise


def without_chosen(values: dict[str, Any], recipe: Recipe, overrides: Sequence[str]) -> list[str]:
    """Turn `values` into overrides, leaving out keys that the user set in an override or a fragment."""
    chosen = {override.partition("=")[0] for override in overrides}
    shipped, wanted = flat_values(load_recipe(RECIPE)), flat_values(recipe)
    return [make_override(k, v) for k, v in values.items() if k not in chosen and wanted[k] == shipped[k]]


def say_what_next() -> None:
    """Print, on rank 0, a command to continue with."""
    if layout.is_first():
        print(f"Next: bash {SCRIPT} schedule.num_steps=100  # trains longer; more in README.md")
