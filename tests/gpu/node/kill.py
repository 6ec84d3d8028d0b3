"""Kill a rank of a run, and let one hang: how soon the other ranks end, and with which message; then resume the run.

    python -m tests.gpu.node.kill --ranks 8 [--shape 0.6b]

The command is typed as a user types it (`vcore-ds train` under torchrun), on random weights of a Qwen3's shape.
"""

import argparse
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.gpu import SHAPES
from tests.gpu.calibrate import make_settings, write_inputs
from tests.gpu.node.launch import device_variables, make_rank_arguments
from tests.gpu.results import work_folder, write_results
from tests.helpers.commands import count_finished_steps, read_metrics
from tests.helpers.jobs import Job

DEAD_SECONDS = 10.0
"""Bound on the time in which ranks of a host notice a dead one (docs/checkpoints.md) and end."""
HUNG_SECONDS = 15.0
"""Value of `engine.lost_rank_seconds`, 60 by default."""
NUM_STEPS = 20
STEPS_BETWEEN = 3
"""Steps between checkpoints, and between the start of a command and the fault."""


def make_command(folder: Path, shape: str, num_ranks: int) -> str:
    settings = [
        *make_settings(folder, shape, NUM_STEPS),
        f"checkpoint.every_steps={STEPS_BETWEEN}",
        f"engine.lost_rank_seconds={HUNG_SECONDS}",
    ]
    return shlex.join(["python", *make_rank_arguments(num_ranks, "vcore_ds.commands.cli", "train", *settings)])


def inject(job: Job, folder: Path, num_ranks: int, fault: signal.Signals) -> dict[str, Any]:
    """Signal the last rank in the middle of a run; returns when the others ended and which named it."""
    first = count_finished_steps(folder / "run")
    job.wait_for(f"step {first + STEPS_BETWEEN + 1}/{NUM_STEPS} ")
    ranks = [job.rank(rank) for rank in range(num_ranks)]
    victim, others = ranks[-1], ranks[:-1]
    start = time.monotonic()
    victim.send_signal(fault)
    _, alive = psutil.wait_procs(others, timeout=120)
    seconds = time.monotonic() - start
    code = job.wait()
    is_dead = fault == signal.SIGKILL
    what = "its process is dead" if is_dead else r"no sign of life for \d+ s"
    message = rf"rank (\d+): rank {num_ranks - 1} \(host \S+, pid {victim.pid}\), last seen at: [^:]*: {what}"
    naming_ranks = sorted(set(re.findall(message, job.output)), key=int)
    bound = DEAD_SECONDS if is_dead else HUNG_SECONDS + DEAD_SECONDS
    passed = not alive and naming_ranks and code == 1 and seconds < bound
    return {
        "fault of the last rank": fault.name,
        "others ended after s": seconds,
        "bound s": bound,
        "ranks that named it": ", ".join(naming_ranks) or "none",
        "exit code": code,
        "steps taken": len(read_metrics(folder / "run")),
        "result": "passed" if passed else "FAILED",
    }


def finish(job: Job, folder: Path) -> dict[str, Any]:
    """Wait for the end of the resumed run."""
    code = job.wait()
    steps = [line["step"] for line in read_metrics(folder / "run")]
    has_resumed = re.search(r"Resumed after step (\d+)", job.output)
    passed = code == 0 and has_resumed and steps == list(range(1, NUM_STEPS + 1))
    return {
        "fault of the last rank": f"none, resumed after step {has_resumed[1] if has_resumed else '?'}",
        "others ended after s": "",
        "bound s": "",
        "ranks that named it": "",
        "exit code": code,
        "steps taken": len(steps),
        "result": "passed" if passed else "FAILED",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    arguments = parser.parse_args()
    folder, ranks = work_folder("kill"), arguments.ranks
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_inputs(folder, arguments.shape)
    command, rows = make_command(folder, arguments.shape, ranks), []
    for fault in (signal.SIGKILL, signal.SIGSTOP, None):
        log = folder / f"{'end' if fault is None else fault.name}.log"
        print(f"{command} > {log}", flush=True)
        with Job(command, log, **device_variables(ranks)) as job:
            rows.append(finish(job, folder) if fault is None else inject(job, folder, ranks, fault))
    write_results("kill", ranks, f"A lost rank in a run of {ranks}, Qwen3-{arguments.shape}.", rows)
    return 0 if all(row["result"] == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
