"""The smallest valid recipe, as the mapping of a YAML file, and the problems of invalid recipes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from vcore_ds.config.load import load_recipe
from vcore_ds.config.problems import RecipeError

_SMALLEST: dict[str, Any] = {
    "method": {"kl_budget": 0.05},
    "model": {"path": "some/model"},
    "data": {"train_path": "train.jsonl"},
    "optimizer": {"learning_rate": 0.1},
    "schedule": {"num_steps": 3},
    "run": {"output_dir": "out"},
    "engine": {"deepspeed_config": "ds.json"},
}


def smallest_recipe() -> dict[str, Any]:
    """A new copy of the smallest valid recipe, which a test may change."""
    return copy.deepcopy(_SMALLEST)


def write_yaml(path: Path, content: dict[str, Any] | str) -> Path:
    """Write a recipe file and create its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path


def find_problems(recipe: str | Path, *words: str) -> tuple[str, ...]:
    """The problems of a recipe that does not load."""
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, words)
    assert str(error.value).splitlines() == list(error.value.problems)
    return error.value.problems


def find_problem(recipe: str | Path, *words: str) -> str:
    """The only problem of a recipe that does not load."""
    (problem,) = find_problems(recipe, *words)
    return problem
