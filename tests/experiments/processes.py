"""`vcore-ds train` as a part of an experiment, and the file of results."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = "launch_scripts/recipes/quickstart.yaml"


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def run_train(overrides: Sequence[str], output: Path) -> str:
    """What `vcore-ds train` prints, in one process with one thread, on the quickstart's recipe.

    Raises:
        RuntimeError: it failed; with its last lines.
    """
    shutil.rmtree(output, ignore_errors=True)  # what a stopped attempt has left
    command = [sys.executable, "-m", "vcore_ds.cli", "train", RECIPE, *overrides]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout
