"""The tests, their scripts and their helpers: none is left out because of the name of its folder."""

import subprocess
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from deepspeed.runtime import engine

from tests.helpers.packages import path_in_package
from vcore_ds.method import weights

REPOSITORY = Path(__file__).resolve().parents[2]


def test_every_folder_with_tests_is_collected(pytestconfig: pytest.Config) -> None:
    tests = Path(__file__).parents[1]
    folders = {part for path in tests.rglob("test_*.py") for part in path.relative_to(tests.parent).parts[:-1]}
    assert "dist" in folders
    skipped = {name for name in folders for pattern in pytestconfig.getini("norecursedirs") if fnmatch(name, pattern)}
    assert skipped == set()


FOREIGN = {"peer_trl"}
"""Run with the Python of a peer."""
SCRIPTS = [
    path
    for folder in ("benchmarks", "experiments")
    for path in sorted((Path(__file__).parents[1] / folder).glob("*.py"))
    if path.stem not in FOREIGN
]


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_every_script_can_be_imported(path: Path) -> None:
    import_module(f"tests.{path.parent.name}.{path.stem}")


def test_a_clone_in_a_folder_named_like_the_package_is_not_the_package() -> None:
    assert path_in_package(weights.__file__) == "vcore_ds/method/weights.py"
    assert path_in_package(engine.__file__) == "deepspeed/runtime/engine.py"
    for file in ("tests/unit/test_packages.py", ".venv/lib/python3.11/site-packages/torch/_tensor.py"):
        assert path_in_package(f"/home/me/vcore_ds/{file}") == path_in_package(f"/home/me/deepspeed/{file}") == ""


def test_every_hook_is_make_check_with_the_commands_of_this_environment() -> None:
    """The hooks of .pre-commit-config.yaml run what a developer runs."""
    (local,) = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"  # nothing is downloaded
    (hook,) = local["hooks"]
    assert (hook["language"], hook["entry"], hook["pass_filenames"]) == ("system", "make check", False)
    planned = subprocess.run(["make", "--dry-run", "check"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    lines = planned.stdout.splitlines()
    assert {"ruff format --check .", "ruff check .", "mypy"} <= set(lines)
    assert any(line.startswith("python -m pytest tests/unit ") for line in lines)
