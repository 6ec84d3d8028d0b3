"""The smallest valid recipe, as the mapping in a YAML file."""

import copy
from typing import Any

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
    """A new copy, which a test may change."""
    return copy.deepcopy(_SMALLEST)
