"""The package installed outside its repository, as a wheel and with -e: shipped files are found by name."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

from tests.helpers.commands import REPOSITORY
from vcore_ds import __version__

pytestmark = pytest.mark.e2e

PACKAGE, CONFIGS = REPOSITORY / "vcore_ds", REPOSITORY / "ds_configs"
RECIPES = REPOSITORY / "launch_scripts" / "recipes"
SCRIPTS = REPOSITORY / "launch_scripts" / "slurm"
SHIPPED = ("ds_configs", "recipes", "slurm")
NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.egg-info")


def run(words: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, without the import paths of this process."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def run_pip(*words: str | Path, folder: Path) -> None:
    done = run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words], folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that are built, since setuptools leaves files behind."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    for name in ("vcore_ds", "launch_scripts", "ds_configs"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=NOT_COPIED)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run_pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, source, folder=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_environment(folder: Path) -> Path:
    """Create a virtual environment that sees the dependencies of this one, but not this project; returns its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # Python ignores the .pth files of a folder that another .pth file names, and so this project, installed with -e.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, installed by its name as from an index."""
    python = make_environment(tmp_path_factory.mktemp("installed"))
    # --ignore-installed: the environment of the tests, which this one sees, has the package already.
    options = ("--no-deps", "--no-index", "--ignore-installed", "--find-links", wheel.parent)
    run_pip("--python", python, "install", *options, "vcore-ds", folder=wheel.parent)
    return python


@pytest.fixture(scope="module")
def editable(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the copy, installed with -e."""
    python = make_environment(tmp_path_factory.mktemp("editable"))
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--editable")
    run_pip("--python", python, "install", *options, source, folder=source)
    return python


@pytest.fixture(params=["installed", "editable"])
def vcore_ds(request: pytest.FixtureRequest) -> Path:
    """The command vcore-ds of an installation."""
    return request.getfixturevalue(request.param).with_name("vcore-ds")


def test_pyproject_lists_all_packages() -> None:
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    names = {".".join(folder.relative_to(REPOSITORY).parts) for folder in folders}
    assert sorted(listed) == sorted([*names, *(f"vcore_ds.shipped.{name}" for name in SHIPPED)])


def test_the_wheel_has_the_package_the_shipped_files_and_the_metadata_that_an_index_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
        assert archive.read(name.replace("METADATA", "licenses/LICENSE")) == (REPOSITORY / "LICENSE").read_bytes()
    package = {path.relative_to(REPOSITORY).as_posix() for path in PACKAGE.rglob("*.*") if path.suffix != ".pyc"}
    files = [*RECIPES.rglob("*.yaml"), RECIPES / "recipe.schema.json"]
    recipes = {f"vcore_ds/shipped/recipes/{path.relative_to(RECIPES).as_posix()}" for path in files}
    others = {f"vcore_ds/shipped/ds_configs/{path.name}" for path in CONFIGS.glob("*.json")}
    others |= {f"vcore_ds/shipped/slurm/{path.name}" for path in SCRIPTS.iterdir()}
    assert names == package | recipes | others
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert metadata["Version"] == __version__ and metadata["Name"].replace("_", "-") == "vcore-ds"
    assert metadata["Summary"] == project["description"] and metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11" and metadata["Description-Content-Type"] == "text/markdown"
    assert set(metadata.get_all("Provides-Extra")) == project["optional-dependencies"].keys()
    # A direct URL, which an index refuses, would be in none of them.
    assert not any("@" in requirement for requirement in metadata.get_all("Requires-Dist"))


def test_each_environment_imports_its_installation(
    installed: Path, editable: Path, source: Path, tmp_path: Path
) -> None:
    code = "import vcore_ds; print(vcore_ds.__file__)"
    first, second = (Path(run([python, "-c", code], tmp_path).stdout.strip()) for python in (installed, editable))
    assert first.is_relative_to(installed.parents[1]) and second == source / "vcore_ds" / "__init__.py"


def test_shipped_files_are_found_by_name_in_an_empty_folder(vcore_ds: Path, tmp_path: Path) -> None:
    words = ["paper/qwen3_32b_code_lora", "methods/dft", "presets/recommended.yaml"]
    done = run([vcore_ds, "check", *words, "--ranks", "8"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    recipe = run([vcore_ds, "check", *words, "--recipe"], tmp_path).stdout
    assert yaml.safe_load(recipe)["engine"]["deepspeed_config"] == "ds_configs/zero3_bf16_large.json"
    resolved = tmp_path / "resolved.yaml"  # every installation reads what another one writes
    resolved.write_text(recipe)
    again = run([vcore_ds, "check", resolved, "--ranks", "8"], tmp_path).stdout.splitlines()
    assert again[1:] == done.stdout.splitlines()[1:] and again[1].startswith("Batch: 32 sequences a step")

    mine = tmp_path / "mine.yaml"
    mine.write_text("base: [qwen3_8b_math_full.yaml, methods/sft.yaml]\nrun: {output_dir: runs/mine}\n")
    done = run([vcore_ds, "check", "mine.yaml", "--recipe"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and "output_dir: runs/mine" in done.stdout

    done = run([vcore_ds, "recipes"], tmp_path)
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    recipes = {path.relative_to(RECIPES).as_posix() for path in RECIPES.rglob("*.yaml")}
    assert listed == recipes | {f"ds_configs/{path.name}" for path in CONFIGS.glob("*.json")}
    assert "  qwen3_4b_math_full.yaml                  Qwen3-4B, math, all parameters, VCORE as recomm" in done.stdout


SBATCH = """#!/bin/bash
# As SLURM: the script is copied, and runs in the folder of the submission.
while [[ $1 == -* ]]; do shift; done
cp "$1" spooled
shift
SLURM_ARRAY_TASK_ID=0 SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=1 SLURM_STEP_ID=0 SLURM_JOB_NODELIST=n1 bash spooled "$@" > out
echo 7
"""
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
echo "$(command -v python) ${@: -2}" >> steps
"""


def test_a_sweep_is_submitted_to_slurm_from_any_folder(vcore_ds: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    (folder / "bin").mkdir(parents=True)
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "scontrol": "#!/bin/bash\necho n1"}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    cells = {"sft": "methods/sft.yaml"}
    sweep = {"recipe": "qwen3_4b_math_lora.yaml", "output_dir": "my runs", "seeds": [1], "cells": cells}
    (folder / "mine.yaml").write_text(yaml.safe_dump(sweep))
    submit = f'PATH="{folder}/bin:$PATH" exec "{vcore_ds}" sweep mine.yaml --slurm'
    done = run(["bash", "-c", submit], folder)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("job array 7: 1 of 1 runs."), (
        done.stdout
    )
    recipe, python = "my runs/recipes/sft/seed_1.yaml", vcore_ds.with_name("python")
    expected = [f"{python} {command} {recipe}" for command in ("preflight", "train")]
    assert (folder / "steps").read_text().splitlines() == expected
    assert (folder / "my runs" / "logs" / "sft" / "seed_1.exit").read_text() == "0\n"
