"""Commands of `vcore-ds` as a part of an experiment, and the file of results."""

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


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Rows as lines of JSON; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_train(overrides: Sequence[str], output: Path) -> str:
    """What `vcore-ds train` prints on the quickstart's recipe; `output`, its folder, is emptied before."""
    shutil.rmtree(output, ignore_errors=True)  # what a stopped attempt has left
    return run_vcore_ds("train", *overrides)


def run_vcore_ds(command: str, *arguments: str) -> str:
    """What a command of `vcore-ds` prints, in one process with one thread, on the quickstart's recipe.

    Raises:
        RuntimeError: it failed; with its last lines.
    """
    whole = [sys.executable, "-m", "vcore_ds.commands.cli", command, RECIPE, *arguments]
    done = subprocess.run(
        whole,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(whole)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout
