"""Run `vcore-ds` commands in an experiment, and read and write its results."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.commands import REPOSITORY

RECIPE = "launch_scripts/recipes/quickstart.yaml"


def read_results(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def write_json_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as JSON lines and create the parent folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_train(overrides: Sequence[str], output: Path) -> str:
    """Run `vcore-ds train` on the quickstart's recipe with an empty output folder; returns what it prints."""
    shutil.rmtree(output, ignore_errors=True)  # left by a stopped attempt
    return run_vcore_ds("train", *overrides)


def run_vcore_ds(command: str, *arguments: str) -> str:
    """Run a `vcore-ds` command on the quickstart's recipe, in one process with one thread; returns what it prints.

    Raises:
        RuntimeError: the command failed. The message has its last lines.
    """
    words = [sys.executable, "-m", "vcore_ds.commands.cli", command, RECIPE, *arguments]
    done = subprocess.run(
        words,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout
