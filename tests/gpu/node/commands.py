"""Commands as a user types them: preflight, a run with asynchronous checkpoints, score (`--ranks 8 [--shape 0.6b]`)."""

import argparse
import shutil
import sys
import time

import pyarrow.parquet

from tests.benchmarks.gpu import SHAPES
from tests.gpu.calibrate import NUM_TRACES, make_settings, write_inputs
from tests.gpu.node.launch import run_on_ranks
from tests.gpu.results import work_folder, write_results
from vcore_ds.training.checkpoint_folder import COMPLETE

NUM_STEPS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    arguments = parser.parse_args()
    folder, ranks, rows = work_folder("commands"), arguments.ranks, []
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_inputs(folder, arguments.shape)
    settings = make_settings(folder, arguments.shape, NUM_STEPS)
    saving = ("checkpoint.async=true", "checkpoint.every_steps=1", f"checkpoint.keep_last={NUM_STEPS}")
    scoring = (f"data.probe_path={folder / 'train.jsonl'}", "--output", str(folder / "scores"))
    for name, options in {"preflight": (), "train": saving, "score": scoring}.items():
        started = time.monotonic()
        run_on_ranks(ranks, "vcore_ds.commands.cli", name, *settings, *options)
        rows.append({"command": name, "seconds": time.monotonic() - started})
    checkpoints = len(list((folder / "run" / "checkpoints").glob(f"*/{COMPLETE}")))
    scored = sum(pyarrow.parquet.read_table(table).num_rows for table in folder.glob("scores/**/scores.parquet"))
    note = f"Checkpoints: {checkpoints} of {NUM_STEPS}; traces scored: {scored} of {NUM_TRACES}."
    write_results("commands", ranks, f"Commands on {ranks} ranks, Qwen3-{arguments.shape}.", rows, [note])
    return 0 if (checkpoints, scored) == (NUM_STEPS, NUM_TRACES) else 1


if __name__ == "__main__":
    sys.exit(main())
