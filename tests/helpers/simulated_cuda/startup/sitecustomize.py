"""Install the simulated device in every Python process that starts with this folder in PYTHONPATH (`ranks.py`)."""

import os
from pathlib import Path

from tests.helpers.simulated_cuda.child import install

install(Path(os.environ["VCORE_DS_SIMULATED_CUDA"]))
