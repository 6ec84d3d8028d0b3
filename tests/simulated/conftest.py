"""Fixtures for a simulated CUDA device (`tests/helpers/simulated_cuda`), which shows errors that a CPU does not.

Skipped where there is no compiler, and on machines with a GPU, which run tests/gpu instead.
"""

from pathlib import Path

import pytest
import torch

from tests.helpers.simulated_cuda.build import NoCompiler, compile_device


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config) -> Path:
    """The compiled device, kept between runs of the tests."""
    if torch.version.cuda is not None:
        pytest.skip("PyTorch is built for CUDA, and a simulated device needs a build for CPUs")
    assert pytestconfig.cache is not None
    try:
        return compile_device(pytestconfig.cache.mkdir("simulated_cuda"))
    except NoCompiler as reason:
        pytest.skip(f"nothing was tested on a simulated CUDA device: {reason}")
