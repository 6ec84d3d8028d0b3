"""Start ranks for parts of `make gpu8` and `make gpu`, on the devices of their environment."""

import os
import subprocess
import sys

from tests.gpu.parts import IS_LOOPBACK
from tests.helpers.commands import REPOSITORY


def make_rank_arguments(num_ranks: int, module: str, *arguments: str) -> tuple[str, ...]:
    """Arguments of Python that run a module on `num_ranks` ranks: of one node, or in a part with `IS_LOOPBACK` each a
    node of its own."""
    if IS_LOOPBACK in os.environ:
        return ("-m", "tests.gpu.node.loopback", str(num_ranks), "-m", module, *arguments)
    launcher = ("-m", "vcore_ds.distributed.torchrun", "--standalone", "--nproc-per-node", str(num_ranks))
    return (*launcher, "-m", module, *arguments)


def run_on_ranks(num_ranks: int, module: str, *arguments: str) -> None:
    """Run a module on `num_ranks` ranks; raises CalledProcessError if it fails."""
    print(f"{num_ranks} ranks: {module} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, *make_rank_arguments(num_ranks, module, *arguments)], cwd=REPOSITORY, check=True)


def device_variables(num_ranks: int) -> dict[str, str]:
    """Variables that give a command of the tests (`tests.helpers.jobs.Job`) this process's devices."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return {"DS_ACCELERATOR": "cpu"}
    num_devices = 1 if IS_LOOPBACK in os.environ else num_ranks
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_devices))))
    return {"CUDA_VISIBLE_DEVICES": devices}
