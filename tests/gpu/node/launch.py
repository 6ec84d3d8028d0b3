"""Start ranks of one node for parts of `make gpu8`, on the devices of their environment."""

import os
import subprocess
import sys

from tests.helpers.commands import REPOSITORY


def make_rank_arguments(num_ranks: int, module: str, *arguments: str) -> tuple[str, ...]:
    """Arguments of Python that run a module on `num_ranks` ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    return (*launcher, "-m", module, *arguments)


def run_on_ranks(num_ranks: int, module: str, *arguments: str) -> None:
    """Run a module on `num_ranks` ranks; raises CalledProcessError if it fails."""
    print(f"{num_ranks} ranks: {module} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, *make_rank_arguments(num_ranks, module, *arguments)], cwd=REPOSITORY, check=True)


def device_variables(num_ranks: int) -> dict[str, str]:
    """Variables that give a command of the tests (`tests.helpers.jobs.Job`) this process's devices."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return {"DS_ACCELERATOR": "cpu"}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_ranks))))
    return {"CUDA_VISIBLE_DEVICES": devices}
