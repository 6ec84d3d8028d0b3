"""The launch scripts where they end before SLURM, or a launcher, is needed. On a cluster: tests/slurm."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from vcore_ds.config.load import load_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((REPOSITORY / "launch_scripts").glob("*.slurm"))
RECIPES = {
    "train": "qwen3_8b_math_full",
    "train_32b": "qwen3_32b_math_full",
    "train_32b_lora": "qwen3_32b_math_lora",
}
"""What each script trains; that of train.slurm is its first argument."""


def list_arguments(script: Path) -> list[str]:
    return [RECIPES["train"]] if script.stem == "train" else []


def run(script: Path, folder: Path, **environment: str) -> tuple[int, str]:
    outside = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run(
        ["bash", script, *list_arguments(script)], cwd=folder, env=outside | environment, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_misuse_is_reported(script: Path, tmp_path: Path) -> None:
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
def test_the_recipe_of_a_script_exists(script: Path) -> None:
    recipe = load_recipe(RECIPES[script.stem])
    assert (recipe.lora is not None) == ("lora" in script.stem)
    assert f"#SBATCH --job-name={script.stem}\n" in script.read_text()


@pytest.mark.parametrize("arguments", [[], ["run.seed=1"]])
def test_the_script_for_all_recipes_needs_one(arguments: list[str]) -> None:
    script = REPOSITORY / "launch_scripts" / "train.slurm"
    done = subprocess.run(["bash", script, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "launch_scripts/train.slurm RECIPE [OVERRIDES]" in done.stderr


ALLOCATOR = [
    ({}, (None, "expandable_segments:True")),
    ({"PYTORCH_ALLOC_CONF": "backend:native"}, (None, "backend:native")),
    ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, ("backend:native", None)),
]
"""Settings of the user, and the values that ranks then have under the old and the new name."""


def drop_allocator_settings() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.endswith("_ALLOC_CONF")}


def submit(
    script: Path, folder: Path, environment: dict[str, str], **commands: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as in a job on the node n1, where srun and others are replaced by lines of bash."""
    (folder / "bin").mkdir()
    for name, text in {"scontrol": "echo n1", **commands}.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "launch_scripts").symlink_to(REPOSITORY / "launch_scripts")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0"}
    variables = environment | job | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", script, *list_arguments(script)], cwd=folder, env=variables, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


RUN_ITS_COMMAND = """
echo "srun $@" >> srun_lines
while [[ $1 == -* ]]; do shift; done
exec "$@"
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_nodes_of_four_gpus_in_a_container_bound_to_their_cores(script: Path, tmp_path: Path) -> None:
    """GB200: what sbatch was asked for comes from SLURM; no number of GPUs is in the scripts or the recipe."""
    copy = tmp_path / script.name
    text = script.read_text()
    assert text.count("\nsource ") == 1
    copy.write_text(text.replace("\nsource ", "\nsrun_options=(--container-mounts=/data:/data)\nsource "))
    variables = os.environ | {
        "SLURM_GPUS_ON_NODE": "4",
        "SRUN_OPTIONS": "--container-image=nvcr.io#nvidia/pytorch --container-mount-home",
        "NUMA_BINDING": "node",
    }
    done = submit(copy, tmp_path, variables, srun=RUN_ITS_COMMAND, python='echo "$@" >> python_lines')
    assert done.returncode == 0, done.stderr
    assert "with 4 ranks a node" in done.stdout
    steps = (tmp_path / "srun_lines").read_text().splitlines()
    steps = [line for line in steps if line.startswith("srun ")]
    assert len(steps) == 2 and "--output=" not in "".join(steps)
    # A node that fails in the preflight ends the others within a minute.
    assert [re.findall(r"--wait=(\d+)", step) for step in steps] == [["60"], ["1800"]]
    for step in steps:
        for option in ("--container-image=nvcr.io#nvidia/pytorch", "--container-mount-home", "--container-mounts="):
            assert step.index(option) < step.index("bash -c")
    preflight, train = (tmp_path / "python_lines").read_text().splitlines()
    for line, command in ((preflight, "preflight"), (train, "train")):
        assert "--nproc-per-node=4 --numa-binding=node --node-rank=0 --master-addr=n1 --master-port=20007" in line
        assert line.endswith(f"-m vcore_ds {command} {RECIPES[script.stem]}")
        parsed = torchrun.parse_args(line.split()[2:])
        assert (parsed.nproc_per_node, parsed.numa_binding) == ("4", "node")


@pytest.mark.parametrize("may_requeue", [True, False])
def test_a_job_is_requeued_only_where_slurm_allows_it(tmp_path: Path, may_requeue: bool) -> None:
    scontrol = f'echo "$@" >> calls; echo n1 Requeue={int(may_requeue)} Restarts=0'
    done = submit(SCRIPTS[0], tmp_path, dict(os.environ), scontrol=scontrol, srun="exit 85")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert done.returncode == 85 and ("requeue 7" in calls) == may_requeue
    endings = ("back into the queue" in done.stdout, "ended with exit code 85" in done.stdout)
    assert endings == (may_requeue, not may_requeue)


@pytest.mark.parametrize("given, expected", ALLOCATOR)
def test_segments_expand_under_slurm_unless_the_user_has_set_otherwise(
    tmp_path: Path, given: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    environment = drop_allocator_settings() | given
    done = submit(SCRIPTS[0], tmp_path, environment, srun=f"env > {tmp_path}/ranks; exit 3")
    assert done.returncode == 3
    settings = dict(
        line.split("=", 1) for line in (tmp_path / "ranks").read_text().splitlines() if "_ALLOC_CONF=" in line
    )
    assert (settings.get("PYTORCH_CUDA_ALLOC_CONF"), settings.get("PYTORCH_ALLOC_CONF")) == expected


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
        [sys.executable, "-c", code], cwd=REPOSITORY, env=drop_allocator_settings() | given, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.split() == [str(value) for value in expected], done.stderr
