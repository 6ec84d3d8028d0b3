"""tests/README.md names a test for each known problem, and the tests it names exist."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "tests" / "README.md").read_text(encoding="utf-8")


def test_tests_that_it_names_exist() -> None:
    named = re.findall(r"`((?:unit|dist|e2e|slurm)/test_\w+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 35
    for file, test in named:
        source = (REPOSITORY / "tests" / file).read_text(encoding="utf-8")
        assert not test or f"\ndef {test}(" in source, f"{file}::{test}"


def test_it_has_all_problems() -> None:
    assert re.findall(r"^\| (\d+)\. ", PAGE, re.MULTILINE) == [str(number) for number in range(1, 23)]
