"""What a GPU would find in whole steps and runs, on a simulated one (`tests/helpers/simulated_cuda`).

Skipped with its reason where no compiler is, and on a machine with a GPU, which is better.
"""

from pathlib import Path

import pytest
import torch

from tests.helpers.simulated_cuda.build import NoCompiler, compiled


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config) -> Path:
    """The compiled device, kept between runs of the tests."""
    if torch.version.cuda is not None:
        pytest.skip("PyTorch is built for CUDA, and a simulated device takes a build for CPUs")
    assert pytestconfig.cache is not None
    try:
        return compiled(pytestconfig.cache.mkdir("simulated_cuda"))
    except NoCompiler as reason:
        pytest.skip(f"nothing was tested on a simulated CUDA device: {reason}")
