"""Fixtures: a cluster of two nodes, and a folder from which a user submits."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import setup
from tests.helpers.commands import REPOSITORY
from tests.slurm.cluster import Cluster, find_missing_requirement

__all__ = ["checkout", "cluster", "setup"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = find_missing_requirement()
    if missing is not None:
        pytest.skip(f"THE SLURM SCRIPTS ARE NOT TESTED HERE: {missing}")
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def write_checkout(folder: Path) -> Path:
    """Make a folder from which a user submits: links to the repository's scripts, and logs in that folder."""
    for name in ("launch_scripts", "ds_configs"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return write_checkout(tmp_path)
