"""Run functions on ranks with a simulated CUDA device each; environment variables that give commands such a device."""

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.helpers.commands import HANG_SECONDS, REPOSITORY

Launch = tuple[Callable[..., Any], int, tuple[Any, ...]]
"""A function, the number of ranks, and the function's arguments."""


def run_simulated(library: Path, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """`run_ranks` in processes forked from a new one that has installed `library` as its device and then imported
    everything: 10 s of CPU time, so put many checks into one function. `library`: path from
    `tests.helpers.simulated_cuda.build.compile_device`."""
    return run_launches(library, [(function, world_size, arguments)])[0]


def run_launches(library: Path, launches: Sequence[Launch]) -> list[list[Any]]:
    """Run several launches one after another, from one process that has imported everything; returns the results by
    launch and rank."""
    with TemporaryDirectory() as folder:
        call, result = Path(folder, "call"), Path(folder, "result")
        call.write_bytes(pickle.dumps(list(launches)))
        environment = simulated_environment(library)
        command = [sys.executable, "-m", "tests.helpers.simulated_cuda.child", *map(str, (library, call, result))]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=2 * HANG_SECONDS
        )
        print(done.stdout)
        assert done.returncode == 0, done.stderr
        return pickle.loads(result.read_bytes())


def simulated_environment(library: Path, *, for_commands: bool = False) -> dict[str, str]:
    """Environment variables of a process that loads `library`. `for_commands`: whether every Python process below
    installs the device when it starts, so that launchers and commands run on it as they are typed."""
    # Without the variables that keep all other tests on the CPU.
    environment = {name: x for name, x in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR")}
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.submodule_search_locations
    environment |= {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        # The device is loaded before PyTorch, whose libraries it needs.
        "LD_LIBRARY_PATH": str(Path(torch.submodule_search_locations[0], "lib")),
    }
    if for_commands:
        folders = [str(Path(__file__).with_name("startup")), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment |= {
            "VCORE_DS_SIMULATED_CUDA": str(library.resolve()),
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        }
    return environment
