"""What only a GPU can show. Elsewhere each of these tests is skipped, and tests/conftest.py says how many."""

import pytest

from vcore_ds.distributed.device import uses_gpu


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    if not uses_gpu():
        pytest.skip("needs a GPU")
