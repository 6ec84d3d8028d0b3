"""No test is left out because of the name of its folder."""

from fnmatch import fnmatch
from pathlib import Path

import pytest


def test_every_folder_with_tests_is_collected(pytestconfig: pytest.Config) -> None:
    tests = Path(__file__).parents[1]
    folders = {part for path in tests.rglob("test_*.py") for part in path.relative_to(tests.parent).parts[:-1]}
    assert "dist" in folders
    skipped = {name for name in folders for pattern in pytestconfig.getini("norecursedirs") if fnmatch(name, pattern)}
    assert skipped == set()
