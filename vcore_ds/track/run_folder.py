"""A run's folder: recipe.yaml, environment.json, metrics.jsonl, and the result."""

import json
import math
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..config import Recipe, dump_recipe
from ..errors import UserError

PACKAGES = ("torch", "deepspeed", "transformers", "peft")


def refuse_used_folder(folder: Path) -> None:
    """Raises UserError where `folder` holds something already; a run never overwrites another."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "holds another run" if (folder / "recipe.yaml").exists() else "is not an empty folder"
        raise UserError(
            f"run.output_dir: {folder}: {what}; expected a new or empty one. Set run.output_dir, or remove it"
        )


class RunFolder:
    """Written by rank 0 only."""

    def __init__(self, folder: Path, recipe: Recipe, world_size: int):
        self.path = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(dump_recipe(recipe))
        (folder / "environment.json").write_text(json.dumps(environment(world_size), indent=2) + "\n")
        # Line-buffered: what a killed run had measured is on disk.
        self._metrics = open(folder / "metrics.jsonl", "w", buffering=1)  # noqa: SIM115

    def write_metrics(self, values: dict[str, Any]) -> None:
        """One line; null for a number that is not finite, which JSON cannot hold."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._metrics.write(json.dumps(clean) + "\n")

    def close(self) -> None:
        self._metrics.close()


def environment(world_size: int) -> dict[str, Any]:
    """Versions, commit, devices: what one needs to know to repeat a run."""
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": {"vcore_ds": __version__, **{name: version(name) for name in PACKAGES}},
        "git_commit": _git_commit(),
        "host": platform.node(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or [platform.machine()],
        "world_size": world_size,
    }


def _git_commit() -> str | None:
    """Of the package's own checkout; None where it is installed from elsewhere."""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
