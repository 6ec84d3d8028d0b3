"""CHAMP's competition problems, from the package `champ-dataset`."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from vcore_ds.common.errors import UserError

HELD_OUT = tuple(
    f"P_{name}"
    for name in (
        "Combinatorics_1 Combinatorics_18 Combinatorics_21 Combinatorics_30 Inequality_3 Inequality_8 Inequality_10 "
        "Inequality_13 Inequality_15 Inequality_16 Inequality_43 Inequality_47 Inequality_50 Number-Theory_5 "
        "Number-Theory_12 Number-Theory_22 Number-Theory_37 Number-Theory_69 Number-Theory_71 Number-Theory_79 "
        "Polynomial_11 Polynomial_17 Polynomial_34 Polynomial_35 Polynomial_36 Polynomial_47 Sequence_11 Sequence_20 "
        "Sequence_33 Sequence_40"
    ).split()
)
"""Problems with a number as answer; the quickstart trains on none of their solutions."""


def find_package_folder(module: str, package: str) -> Path:
    """Return an installed package's folder without importing it. Raises UserError where it is not installed."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{sys.executable} lacks {package}: pip install --no-deps {package} (a checkout: make .venv)")
    return Path(next(iter(spec.submodule_search_locations)))


def read_champ_problems() -> dict[str, Any]:
    """CHAMP's problems by name, with their answers and recorded conversations. Raises UserError without the package."""
    path = find_package_folder("champ_dataset", "champ-dataset") / "dataset_files" / "v0.json"
    problems: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["problems"]
    return problems
