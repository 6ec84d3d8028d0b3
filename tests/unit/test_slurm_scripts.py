"""The SLURM scripts where they end before SLURM is needed. On a cluster: tests/slurm."""

import os
import subprocess
from pathlib import Path

import pytest

from vcore_ds.config import load_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((REPOSITORY / "launch_scripts").glob("*.slurm"))


def run(script: Path, folder: Path, **environment: str) -> tuple[int, str]:
    outside = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run(
        ["bash", script], cwd=folder, env=outside | environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_misuse_is_said(script: Path, tmp_path: Path) -> None:
    code, message = run(script, tmp_path)
    assert code == 2 and f"cd REPOSITORY && sbatch launch_scripts/{script.name}" in message
    code, message = run(script, REPOSITORY)
    assert code != 0 and "submit this with sbatch" in message


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_restarts_have_a_limit(script: Path, tmp_path: Path) -> None:
    (tmp_path / "launch_scripts").symlink_to(REPOSITORY / "launch_scripts")
    code, message = run(script, tmp_path, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="4", MAX_RESTARTS="3")
    assert code == 1 and "restart 4 of job 7: expected at most 3 (MAX_RESTARTS)" in message


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_recipe_is_there(script: Path) -> None:
    (recipe,) = (line.removeprefix("recipe=") for line in script.read_text().splitlines() if line.startswith("recipe="))
    assert (load_recipe(REPOSITORY / recipe).lora is not None) == ("lora" in script.stem)
    assert f"#SBATCH --job-name={script.stem}\n" in script.read_text()
