"""Functions of `method.name: custom`: one that tests name by this file, and those of the documentation."""

import re
from pathlib import Path

from torch import Tensor

from tests.helpers.commands import REPOSITORY


def focal(probabilities: Tensor, gamma: float) -> Tensor:
    return (1 - probabilities) ** gamma


FOCAL = {
    "name": "custom",
    "function": f"{__file__}:focal",
    "options": {"gamma": 2},
    "function_inputs": ["probabilities"],
}


def uncertain(entropies: Tensor, utilities: Tensor) -> Tensor:
    return entropies + 0 * utilities


UNCERTAIN = FOCAL | {"function": f"{__file__}:uncertain", "options": {}, "function_inputs": ["entropies", "utilities"]}


def write_functions_of_page(folder: Path) -> None:
    """Write the file of functions that docs/custom-weighting.md shows, as it is there."""
    page = (REPOSITORY / "docs" / "custom-weighting.md").read_text(encoding="utf-8")
    name, source = re.search(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL).groups()
    (folder / name).write_text(f"# -*- coding: latin-1 -*-\n# \xe9\n{source}", encoding="latin-1")
