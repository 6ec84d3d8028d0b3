"""The changelog's newest release is the version, and releases follow one another."""

import re
from datetime import date
from pathlib import Path

from packaging.version import Version

import vcore_ds

CHANGELOG = Path(__file__).resolve().parents[2] / "CHANGELOG.md"


def test_the_newest_release_is_the_version() -> None:
    first, *headings = re.findall(r"^## (.*)$", CHANGELOG.read_text(), re.MULTILINE)
    assert first == "[Unreleased]"
    releases = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", heading) for heading in headings]
    version = Version(vcore_ds.__version__)
    numbers = [tuple(map(int, release.groups()[:3])) for release in releases if release]
    days = [date.fromisoformat(release[4]) for release in releases if release]
    assert len(numbers) == len(headings)  # every heading has that form
    assert version.release > numbers[0] if version.is_devrelease else version.release == numbers[0]
    assert numbers == sorted(set(numbers), reverse=True) and days == sorted(days, reverse=True)
