"""The comparison on a real pretrained model: SmolLM2-135M-Instruct, LoRA, traces of CHAMP, by `vcore-ds train` itself.

Every run is the quickstart's recipe with fewer and smaller steps, in a process of its own. What counts is the held-out
loss that the run prints: mean cross-entropy of traces of problems that are not trained on. Those traces are as flawed
as the training's, right and wrong answers alike, so this says how well a method fits such traces, not how well the
model reasons afterwards.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vcore_ds.commands.quickstart.traces import prepare_quickstart_data

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = "launch_scripts/recipes/quickstart.yaml"
COMMON = [
    "schedule.num_steps=6",
    "batch.global_size=4",
    "batch.micro_batch_size_per_rank=2",
    "probe.batch_size=2",
    "data.cutoff_length=224",
    "data.validation_path=runs/quickstart_data/correct.jsonl",
]
HELD_OUT_LOSS = re.compile(r"held-out loss: ([\d.]+) before, ([\d.]+) after training")


def vcore(direction: str, kl_budget: float) -> list[str]:
    clip = {"adam": "1.0", "sgd": "null"}[direction]
    return [f"probe.direction={direction}", f"probe.clip={clip}", f"method.kl_budget={kl_budget}"]


ROWS = {
    "sft": ["methods/sft.yaml"],
    "vcore adam 0.05": vcore("adam", 0.05),
    "dft": ["methods/dft.yaml"],
    "vcore adam 0.005": vcore("adam", 0.005),
    "vcore sgd 0.05": vcore("sgd", 0.05),
    "vcore adam 0.5": vcore("adam", 0.5),
}


def run_rows(folder: Path, seeds: Sequence[int], num_jobs: int) -> None:
    """All rows for each seed, `num_jobs` runs at a time with one thread each. A line per finished run is appended to
    `folder`/smollm2.jsonl; what is there already is skipped."""
    prepare_quickstart_data(REPOSITORY / "runs" / "quickstart_data")
    results = folder / "smollm2.jsonl"
    finished = {(result["row"], result["seed"]) for result in read(results)}

    def one(row: str, seed: int) -> None:
        result = train(row, seed, folder / f"smollm2_{row.replace(' ', '_')}_{seed}")
        with results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{row} seed={seed}: held-out loss {result['before']} -> {result['after']}", flush=True)

    missing = [(row, seed) for seed in seeds for row in ROWS if (row, seed) not in finished]
    with ThreadPoolExecutor(num_jobs) as pool:
        list(pool.map(lambda pair: one(*pair), missing))


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def train(row: str, seed: int, output: Path) -> dict[str, Any]:
    """One run, with what it took."""
    start = time.perf_counter()
    overrides = [*ROWS[row], *COMMON, f"run.seed={seed}", f"run.output_dir={output}"]
    found = HELD_OUT_LOSS.search(run_train(overrides, output))
    assert found is not None  # `data.validation_path` is set
    shutil.rmtree(output / "adapter")
    before, after = map(float, found.groups())
    seconds = round(time.perf_counter() - start, 1)
    return {"row": row, "seed": seed, "before": before, "after": after, "seconds": seconds, "overrides": overrides}


def run_train(overrides: Sequence[str], output: Path) -> str:
    """What `vcore-ds train` prints, in one process with one thread, on the quickstart's recipe.

    Raises:
        RuntimeError: it failed; with its last lines.
    """
    shutil.rmtree(output, ignore_errors=True)  # what a stopped attempt has left
    command = [sys.executable, "-m", "vcore_ds.cli", "train", RECIPE, *overrides]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout
