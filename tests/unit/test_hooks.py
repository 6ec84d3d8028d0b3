"""The hooks of .pre-commit-config.yaml run what a developer runs."""

import subprocess
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]


def test_every_hook_is_make_check_with_the_commands_of_this_environment() -> None:
    (local,) = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"  # nothing is downloaded
    (hook,) = local["hooks"]
    assert (hook["language"], hook["entry"], hook["pass_filenames"]) == ("system", "make check", False)
    planned = subprocess.run(["make", "--dry-run", "check"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    lines = planned.stdout.splitlines()
    assert {"ruff format --check .", "ruff check .", "mypy"} <= set(lines)
    assert any(line.startswith("python -m pytest tests/unit ") for line in lines)
