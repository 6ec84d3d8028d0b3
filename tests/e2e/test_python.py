"""docs/python.md: its lines run as they stand, in a fresh process, and print what the page shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import REPOSITORY, command_environment
from vcore_ds.commands.quickstart.session import DATA
from vcore_ds.commands.quickstart.traces import prepare_quickstart_data

pytestmark = pytest.mark.e2e

PAGE = REPOSITORY / "docs" / "python.md"


def test_the_twenty_lines_print_what_the_page_shows(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```\n\nprints", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (shown,) = re.findall(r"prints\n\n```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "HuggingFaceTB").mkdir()
    model = prepare_quickstart_data(DATA).model
    (tmp_path / "HuggingFaceTB" / model.name).symlink_to(model)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=command_environment()
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    row = re.compile(r"^('.*?') +utility +(\S+) +weight +(\S+)$", re.MULTILINE)
    printed, expected = row.findall(done.stdout), row.findall(shown)
    assert [token for token, _, _ in printed] == [token for token, _, _ in expected] and len(expected) == 13
    for (_, *found), (_, *wanted) in zip(printed, expected, strict=True):
        # Another machine's kernels round differently.
        assert [float(x) for x in found] == pytest.approx([float(x) for x in wanted], rel=1e-3, abs=2e-2)
    assert float(printed[-2][1]) < -10  # the wrong digit
