"""The launch scripts where they end before SLURM, or a launcher, is needed. On a cluster: tests/slurm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vcore_ds.config.load import load_recipe

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


ALLOCATOR = [
    ({}, (None, "expandable_segments:True")),
    ({"PYTORCH_ALLOC_CONF": "backend:native"}, (None, "backend:native")),
    ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, ("backend:native", None)),
]
"""What the user has set, and what ranks then find under the old and the new name."""


def without_allocator_settings() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.endswith("_ALLOC_CONF")}


@pytest.mark.parametrize("given, expected", ALLOCATOR)
def test_segments_expand_under_slurm_unless_the_user_has_set_otherwise(
    tmp_path: Path, given: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"scontrol": "echo n1", "srun": f"env > {tmp_path}/ranks; exit 3"}.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    (tmp_path / "launch_scripts").symlink_to(REPOSITORY / "launch_scripts")
    environment = without_allocator_settings()
    environment |= {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        **given,
    }
    done = subprocess.run(["bash", SCRIPTS[0]], cwd=tmp_path, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 3
    found = dict(line.split("=", 1) for line in (tmp_path / "ranks").read_text().splitlines() if "_ALLOC_CONF=" in line)
    assert (found.get("PYTORCH_CUDA_ALLOC_CONF"), found.get("PYTORCH_ALLOC_CONF")) == expected


@pytest.mark.parametrize("given, expected", ALLOCATOR)
@pytest.mark.parametrize("script", ["train_32b.sh", "quickstart.sh"])
def test_segments_expand_unless_the_user_has_set_otherwise(
    script: str, given: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    code = (
        "import os, runpy, sys\n"
        "class WhenTorchIsImported:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            print(os.environ.get('PYTORCH_CUDA_ALLOC_CONF'), os.environ.get('PYTORCH_ALLOC_CONF'))\n"
        "            sys.exit()\n"
        "sys.meta_path.insert(0, WhenTorchIsImported())\n"
        f"runpy.run_path('launch_scripts/{script}')\n"
        "import torch"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=without_allocator_settings() | given, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.split() == [str(value) for value in expected], done.stderr
