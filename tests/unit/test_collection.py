"""No test is left out because of the name of its folder, and no script of the tests is left behind by the package."""

from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest


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
