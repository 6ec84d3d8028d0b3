"""Commands as a user types them, and the metrics that they write."""

import contextlib
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

_PROCESS_VARIABLES = set(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE MASTER_ADDR MASTER_PORT DS_ACCELERATOR".split()
)

HANG_SECONDS = 600.0
"""Time after which a command counts as hung. Only a failing test waits this long, so a loaded machine gets plenty."""

METRICS = set(
    "step epoch padding_share rank_imbalance sequence_parallel probe_rank_imbalance probe_sequence_parallel loss "
    "weighted_loss alpha tau kl num_saturated effective_sample_size total_weight utility_mean utility_std "
    "direction_norm probe_loss probe_grad_norm direction_energy grad_norm learning_rate supervised_tokens sequences "
    "seconds seconds_probe seconds_utility seconds_main seconds_step supervised_tokens_per_second tokens "
    "tokens_per_second flops_training flops_extra utilization utilization_training peak_memory_bytes "
    "peak_memory_bytes_probe peak_memory_bytes_utility peak_memory_bytes_main peak_memory_bytes_step".split()
)
"""Keys of every line of metrics.jsonl."""

FINITE_DIFFERENCE_METRICS = {"epsilon", "changed_fraction", "signal_to_noise"}
"""Additional keys of a run with finite differences."""


def command_environment() -> dict[str, str]:
    """Environment variables of one command, as in a shell with the virtual environment activated."""
    environment = {key: value for key, value in os.environ.items() if key not in _PROCESS_VARIABLES}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
        "OMP_NUM_THREADS": "1",
        # In place of torchrun's --master_port and deepspeed's --num_accelerators, so that a line stays as it is typed.
        # Without the latter, `deepspeed FILE` starts a rank for each NUMA node.
        "PET_MASTER_PORT": str(free_port()),
        "LOCAL_SIZE": "1",
        # Two ranks cannot share one GPU, and these tests compare numbers of the CPU. Not by DS_ACCELERATOR, which a
        # user without a GPU would not set.
        "CUDA_VISIBLE_DEVICES": "",
    }
    return environment


UNUSED_GPU = "GPUs: found 1 with driver 570.86.15, which PyTorch"
"""Beginning of the message of commands after `add_unused_gpu`."""


def add_unused_gpu(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let this process see a driver and a GPU, which a PyTorch built without CUDA cannot use."""
    from vcore_ds.distributed import device

    (folder / "nvidia0").touch()
    (folder / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\n")
    patch.setattr(device, "DEVICES", folder)
    patch.setattr(device, "DRIVER", folder / "version")
    patch.setenv("CUDA_VISIBLE_DEVICES", "0")
    patch.delenv("DS_ACCELERATOR", raising=False)
    device._refuse_unused_gpus.cache_clear()


def run_command(line: str, *, timeout_seconds: float = HANG_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run `line` in the repository, as a shell with the virtual environment activated would; stdout includes stderr.
    `timeout_seconds`: after which the command and its ranks are killed and AssertionError is raised."""
    words = shlex.split(line)
    process = subprocess.Popen(
        words,
        cwd=REPOSITORY,
        env=command_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a new group, so that a timeout also ends the ranks
    )
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout_seconds} s: {line}\n{output.decode()}") from None
    return subprocess.CompletedProcess(words, process.returncode, output.decode())


def free_port() -> int:
    """A port on which nobody listens, below the ranges that Linux gives to outgoing connections and that
    `launch_scripts/slurm/train.sh` derives from job numbers: a server imports torch for seconds before it binds, and by
    then one of those could be taken. For the same reason the workers of pytest draw from disjoint ports."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = range(12_000 + worker, 20_000, num_workers)
    for port in random.SystemRandom().sample(ports, min(100, len(ports))):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port
    raise AssertionError("100 ports, chosen at random, are all taken")


def wait_until(
    holds: Callable[[], bool], what: str, timeout_seconds: float = HANG_SECONDS, *, every_seconds: float = 0.2
) -> None:
    """Wait until `holds()` is true; raises AssertionError after the timeout. `what`: name of the awaited event, for the
    message. `every_seconds`: time between polls; longer if a poll starts programs, which would take much of a core."""
    deadline = time.monotonic() + timeout_seconds
    while not holds():
        assert time.monotonic() < deadline, f"no {what} after {timeout_seconds} s"
        time.sleep(every_seconds)


def is_listened_on(port: int) -> bool:
    """Whether a server listens on a port of this machine."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def drop_machine_keys(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl without times, rates and bytes, which differ between machines and between runs."""
    machine = (
        "seconds", "tokens_per_second", "supervised_tokens_per_second", "utilization", "peak_memory_bytes",
        "checkpoint_bytes",
    )  # fmt: skip
    return {key: value for key, value in line.items() if not key.startswith(machine)}


def count_finished_steps(folder: Path) -> int:
    """Number of complete lines of metrics.jsonl in a run's folder; 0 before the file exists. The run may be writing
    it."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def has_control_characters(text: str) -> bool:
    return any(not character.isprintable() and character != "\n" for character in text)
