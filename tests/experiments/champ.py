"""Steering by trusted traces on a real model: SmolLM2-135M-Instruct on CHAMP, by `vcore-ds train` itself.

    python -m tests.experiments.champ run [--adapter lora full] [--jobs 2]    train what is missing
    python -m tests.experiments.champ report                             tables of docs/reports/steering-experiments.md

The training data are the quickstart's: solutions of competition problems by four language models, right and wrong ones
alike. The pool is the 16 trusted traces, with right answers to other problems. The measure is the loss on held-out
traces of problems that are in neither, separately for 16 right and 15 wrong answers to the same problems: a method
learns well from noisy traces if the first falls and the second falls less.

Decided before the first run: 10 steps of 8 traces of the training data (10 where trusted ones come on top). With LoRA
all rows run at both learning rates on seed 0, and on seeds 1 and 2 at the rate with the lower loss on the right
held-out traces. With all parameters, which take longer, only `sft` runs at all rates, and five of the rows at its best.
(The rate of 1e-4 was added when `sft` had hardly moved at 1e-5.) Each run is a process with one thread. Results are
appended to runs/champ/results.jsonl, and finished runs are skipped.
"""

import argparse
import json
import re
import shutil
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.experiments.processes import REPOSITORY, read_results, run_train
from tests.experiments.report import cell
from vcore_ds.commands.quickstart.traces import prepare_quickstart_data

FOLDER = REPOSITORY / "runs" / "champ"
RESULTS = FOLDER / "results.jsonl"
COMMON = ("schedule.num_steps=10", "checkpoint.every_minutes=null")
BATCHES = ("batch.global_size=8", "data.cutoff_length=320")
"""Overrides before those of a row: use all traces of the files, for which the quickstart has no time."""
POOL = "data.probe_path=runs/quickstart_data/trusted.jsonl"
SHARE = (POOL, "data.trusted_share=0.2", "batch.global_size=10")
"""2 trusted traces beside 8 of the training data."""
STEERED = ("presets/trusted.yaml", POOL)
ROWS = {
    "sft": ("methods/sft.yaml",),
    "dft": ("methods/dft.yaml",),
    "sft + trusted": ("methods/sft.yaml", *SHARE),
    "dft + trusted": ("methods/dft.yaml", *SHARE),
    "sft on the pool alone": ("methods/sft.yaml", "data.train_path=runs/quickstart_data/trusted.jsonl"),
    "vcore, B' all": (*STEERED, "method.base_measure=uniform", "data.trusted_share=0"),
    "vcore, B' all, base dft, + trusted": (*STEERED, "method.base_measure=dft", "batch.global_size=10"),
}
ADAPTERS = {"lora": (), "full": ("lora=null",)}
RATES = {"lora": (3e-4, 1e-3), "full": (1e-5, 3e-5, 1e-4)}
ROWS_OF = {"lora": tuple(ROWS), "full": ("sft", "dft", "sft + trusted", "sft on the pool alone", "vcore, B' all")}
CHOOSING_ROWS = {"lora": tuple(ROWS), "full": ("sft",)}
"""Rows that are run at all rates, on the first seed."""
SEEDS = (0, 1, 2)
HELD_OUT_LOSS = re.compile(r"(\w+) ([\d.]+) -> ([\d.]+)")

Run = tuple[str, str, float, int]
"""Adapter, row, learning rate, seed."""


def key(result: dict[str, Any]) -> Run:
    return result["adapter"], result["row"], result["learning_rate"], result["seed"]


def train(run: Run) -> None:
    adapter, row, rate, seed = run
    start, output = time.perf_counter(), FOLDER / f"{adapter}_{list(ROWS).index(row)}_{rate:g}_{seed}"
    changes = (*ADAPTERS[adapter], f"optimizer.learning_rate={rate}", f"run.seed={seed}", f"run.output_dir={output}")
    overrides = [*BATCHES, *ROWS[row], *COMMON, *changes]
    losses = HELD_OUT_LOSS.findall(run_train(overrides, output))
    for folder in ("checkpoints", "adapter", "model"):
        shutil.rmtree(output / folder, ignore_errors=True)
    result: dict[str, Any] = {"adapter": adapter, "row": row, "learning_rate": rate, "seed": seed}
    for name, before, after in losses:
        result |= {f"{name}_before": float(before), f"{name}_after": float(after)}
    result |= {"seconds": round(time.perf_counter() - start, 1), "overrides": overrides}
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(f"{run}: correct {result['correct_after']}, incorrect {result['incorrect_after']}", flush=True)


def choose_rate(adapter: str, row: str, results: Iterable[dict[str, Any]]) -> float:
    """The learning rate with the lowest loss on right held-out traces, from runs on the first seed."""
    choosing = row if row in CHOOSING_ROWS[adapter] else "sft"
    runs = [result for result in results if key(result)[:2] == (adapter, choosing) and result["seed"] == SEEDS[0]]
    loss = {result["learning_rate"]: result["correct_after"] for result in runs}
    return min(RATES[adapter], key=loss.__getitem__)


def run_adapter(adapter: str, num_jobs: int) -> None:
    def run_missing(runs: Sequence[Run]) -> None:
        done = {key(result) for result in read_results(RESULTS)}
        with ThreadPoolExecutor(num_jobs) as pool:
            list(pool.map(train, [run for run in runs if run not in done]))

    run_missing([(adapter, row, rate, SEEDS[0]) for rate in RATES[adapter] for row in CHOOSING_ROWS[adapter]])
    results = read_results(RESULTS)
    rates = {row: choose_rate(adapter, row, results) for row in ROWS_OF[adapter]}
    run_missing([(adapter, row, rate, seed) for seed in SEEDS for row, rate in rates.items()])


def report() -> None:
    results = read_results(RESULTS)
    for adapter in ADAPTERS:
        done = {key(result): result for result in results if result["adapter"] == adapter}
        if not done:
            continue
        first = next(iter(done.values()))
        before = f"{first['correct_before']} on right answers, {first['incorrect_before']} on wrong ones"
        print(f"### {adapter}\n\nBefore training: {before}.\n")
        print("| row | rate | seeds | correct | to sft | incorrect | to sft | incorrect - correct | to sft | minutes |")
        print("|---" * 10 + "|")
        by_row = {}
        for row in ROWS_OF[adapter]:
            rate = choose_rate(adapter, row, results)
            runs = [done[run] for seed in SEEDS if (run := (adapter, row, rate, seed)) in done]
            if not runs:
                continue
            by_row[row] = {run["seed"]: measures(run) for run in runs}
            cells = [row, f"{rate:g}", str(len(runs))]
            for i in range(3):
                cells.append(cell([measured[i] for measured in by_row[row].values()], 4))
                pairs = [(measured[i], by_row["sft"].get(seed)) for seed, measured in by_row[row].items()]
                differences = [a - b[i] for a, b in pairs if b is not None]
                cells.append("" if row == "sft" else cell(differences, 4, difference=True))
            cells.append(f"{statistics.mean(run['seconds'] for run in runs) / 60:.1f}")
            print("| " + " | ".join(cells) + " |")
        print()


def measures(result: dict[str, Any]) -> tuple[float, float, float]:
    """Losses on right and on wrong held-out traces, and their difference."""
    correct, incorrect = result["correct_after"], result["incorrect_after"]
    return correct, incorrect, incorrect - correct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="train what is missing")
    runs.add_argument("--adapter", nargs="+", choices=ADAPTERS, default=list(ADAPTERS))
    runs.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    commands.add_parser("report", help="print the tables")
    arguments = parser.parse_args()
    if arguments.command == "report":
        report()
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    prepare_quickstart_data(REPOSITORY / "runs" / "quickstart_data")
    for adapter in arguments.adapter:
        run_adapter(adapter, arguments.jobs)


if __name__ == "__main__":
    main()
