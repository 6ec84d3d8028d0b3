"""The quickstart: a pretrained model learns from real reasoning traces, with everything prepared on the way."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vcore_ds.commands.quickstart.traces import prepare_quickstart_data
from vcore_ds.config.files import SHIPPED_RECIPES
from vcore_ds.config.load import load_recipe
from vcore_ds.config.schema import Recipe
from vcore_ds.distributed import layout
from vcore_ds.distributed.process_group import on_first_rank
from vcore_ds.errors import UserError
from vcore_ds.train.setup import start_ranks

REPOSITORY = Path(__file__).resolve().parents[3]
RECIPE = SHIPPED_RECIPES / "quickstart.yaml"
SCRIPT = "launch_scripts/quickstart.sh"
SHORTER = (
    "Shorter: schedule.num_steps=3 takes fewer steps; data.cutoff_length=208 and batch.global_size=4 make each smaller "
    f"(Ctrl-C, then bash {SCRIPT} with any of them)"
)
"""Advice for a slow machine."""
DATA = REPOSITORY / "runs" / "quickstart_data"


def prepare(overrides: Sequence[str]) -> list[str]:
    """Prepares model and data on rank 0 while the others wait; returns overrides with their paths and a free output
    folder. A collective."""
    recipe, needs_pool = load_with_pool(overrides)
    start_ranks(recipe)

    def find() -> dict[str, Any]:
        data = prepare_quickstart_data(DATA)
        # As JSON, which is YAML: a path may hold a comma.
        held_out = json.dumps({"correct": str(data.correct), "incorrect": str(data.incorrect)})
        return {
            "model.path": data.model,
            "data.train_path": data.train,
            "data.validation_path": held_out,
            "run.output_dir": _free_folder(REPOSITORY / recipe.run.output_dir),
        }

    found: dict[str, Any] = layout.gather_objects("job", on_first_rank(find))[0]
    pool = [f"data.probe_path={DATA / 'trusted.jsonl'}"] if needs_pool else []
    return pool + without_chosen(found, recipe, overrides)


def load_with_pool(overrides: Sequence[str]) -> tuple[Recipe, bool]:
    """The recipe, and whether it needs the quickstart's pool of trusted traces, as with presets/trusted.yaml.

    Raises:
        UserError: the overrides are wrong, with a pool and without.
    """
    try:
        return load_recipe(RECIPE, overrides), False
    except UserError:
        with contextlib.suppress(UserError):
            return load_recipe(RECIPE, [f"data.probe_path={DATA}", *overrides]), True
        raise


def without_chosen(found: dict[str, Any], recipe: Recipe, overrides: Sequence[str]) -> list[str]:
    """`found` as overrides, without the keys that the user set in an override or a fragment, which stay as they are."""

    def value(recipe: Recipe, key: str) -> Any:
        section, _, name = key.partition(".")
        return getattr(getattr(recipe, section), name)

    shipped = load_recipe(RECIPE)
    chosen = {override.partition("=")[0] for override in overrides}
    chosen |= {key for key in found if value(recipe, key) != value(shipped, key)}
    return [f"{key}={value}" for key, value in found.items() if key not in chosen]


def _free_folder(folder: Path) -> Path:
    """`folder`, or the first of folder_2, folder_3, ... that does not exist yet."""
    candidate, number = folder, 2
    while candidate.exists():
        candidate = folder.with_name(f"{folder.name}_{number}")
        number += 1
    return candidate


def say_what_next() -> None:
    """Prints one command to continue with, on rank 0."""
    if layout.is_first():
        print(f"Next: bash {SCRIPT} schedule.num_steps=100  # trains longer; more in README.md")
