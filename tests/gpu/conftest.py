"""Tests that need a GPU. They are skipped on other machines, and tests/conftest.py reports how many."""

import pytest

from vcore_ds.distributed.device import uses_gpu


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    if not uses_gpu():
        pytest.skip("needs a GPU")
