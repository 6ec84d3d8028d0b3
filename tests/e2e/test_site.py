"""The site of the documentation, by the command of the Makefile."""

import os
import re
import subprocess
from pathlib import Path

import pytest

import vcore_ds
from tests.helpers.commands import REPOSITORY

pytestmark = pytest.mark.e2e


def test_the_site_has_every_page_and_every_public_name(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    # The environment is the one of this test: not made again where a file that it is made from is newer.
    command = ["make", "--old-file=.venv", f"BUILD={tmp_path}/site", "docs"]
    made = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    site = tmp_path / "site" / "site"
    pages = [path.relative_to(REPOSITORY).with_suffix("") for path in (REPOSITORY / "docs").rglob("*.md")]
    written = {path.relative_to(site) for path in site.rglob("*.html")}
    missing = [page for page in pages if not {page / "index.html", page.with_suffix(".html")} & written]
    assert len(pages) > 30 and missing == []
    names = re.findall(r'id="vcore_ds\.(\w+)"', (site / "docs" / "api" / "index.html").read_text(encoding="utf-8"))
    assert sorted(names) == vcore_ds.__all__
    assert "What is exact here" in (site / "search.json").read_text(encoding="utf-8")
