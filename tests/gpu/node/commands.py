"""Commands as a user types them, on several ranks: preflight, a run with asynchronous checkpoints, score.

python -m tests.gpu.node.commands --ranks 8 [--shape 0.6b]
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet

from tests.benchmarks.gpu import SHAPES
from tests.gpu.calibrate import NUM_TRACES, make_settings, write_inputs
from tests.gpu.node.launch import run_on_ranks
from tests.gpu.results import work_folder, write_results
from vcore_ds.engine.checkpoint_folder import COMPLETE

NUM_STEPS = 4


def measure(name: str, num_ranks: int, *arguments: str) -> dict[str, Any]:
    started = time.monotonic()
    try:
        run_on_ranks(num_ranks, "vcore_ds.commands.cli", name, *arguments)
        code = 0
    except subprocess.CalledProcessError as error:
        code = error.returncode
    return {"command": name, "exit code": code, "seconds": time.monotonic() - started}


def count_results(folder: Path) -> dict[str, tuple[int, int]]:
    """By command what it has written, and what it should have."""
    checkpoints = len(list((folder / "run" / "checkpoints").glob(f"*/{COMPLETE}")))
    tables = list((folder / "scores").rglob("scores.parquet"))
    num_scored = sum(pyarrow.parquet.read_table(table).num_rows for table in tables)
    return {"train": (checkpoints, NUM_STEPS), "score": (num_scored, NUM_TRACES)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    arguments = parser.parse_args()
    folder, ranks = work_folder("commands"), arguments.ranks
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_inputs(folder, arguments.shape)
    settings = make_settings(folder, arguments.shape, NUM_STEPS)
    saving = ("checkpoint.async=true", "checkpoint.every_steps=1", f"checkpoint.keep_last={NUM_STEPS}")
    scoring = (f"data.probe_path={folder / 'train.jsonl'}", "--output", str(folder / "scores"))
    rows = [
        measure("preflight", ranks, *settings),
        measure("train", ranks, *settings, *saving),
        measure("score", ranks, *settings, *scoring),
    ]
    for row in rows:
        row["written"], row["expected"] = count_results(folder).get(row["command"], (0, 0))
        row["result"] = "passed" if row["exit code"] == 0 and row["written"] == row["expected"] else "FAILED"
    write_results("commands", ranks, f"Commands on {ranks} ranks, Qwen3-{arguments.shape}.", rows)
    return 0 if all(row["result"] == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
