"""Token weights of other methods compared with plain fine-tuning, for wrong traces and for wrong tokens; and Muon
compared with AdamW for wrong traces (docs/reports/experiments.md).

    python -m tests.experiments.baselines run       what is missing
    python -m tests.experiments.baselines report    the tables

Task, seeds, choice of learning rates and measures are those of `whole_traces.py` in its central cell and of
`steering.py` with AdamW. Results are appended to RESULTS, and finished runs are
skipped.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.experiments import steering, whole_traces
from tests.experiments.processes import read_results
from tests.experiments.report import CHOOSING_SEEDS, choose_rate, steering_table, whole_traces_table
from tests.experiments.settings import Setting
from tests.experiments.training import train

RESULTS = Path(__file__).with_suffix(".jsonl")
METHODS = ("sft", "dft", "asft", "eaft", "deft", "profit")
CELL = whole_traces.CELLS[0]


def make_trace_rows() -> dict[str, Setting]:
    """Rows with wrong traces, without seed and learning rate (0)."""
    rows = whole_traces.grid(*CELL)
    return {"before training": rows["before training"]} | {n: replace(rows["sft"], method=n) for n in METHODS}


def make_optimizer_rows() -> dict[str, Setting]:
    """Rows of AdamW and Muon with wrong traces, without seed and learning rate (0)."""
    grid = whole_traces.grid(*CELL)
    sft, vcore = grid["sft"], grid["vcore, 0.5 nats within"]
    muon = replace(vcore, optimizer="muon")
    return {
        "sft": sft,
        "sft, Muon": replace(sft, optimizer="muon"),
        "vcore": vcore,
        "vcore, Muon": replace(muon, direction="muon"),
        "vcore, Muon, along the gradient": replace(muon, direction="sgd"),
    }


def make_token_rows(noise: str) -> dict[str, Setting]:
    """Rows with wrong tokens, without seed and learning rate (0)."""
    sft = steering.grid(noise, "adamw")["sft"]
    return {name: replace(sft, method=name) for name in METHODS}


def iter_due_runs() -> Iterator[Setting]:
    """Yield all runs, each once the runs before it have finished."""
    for rows in (make_trace_rows(), make_optimizer_rows()):
        yield from whole_traces.iter_due_on_all_seeds(rows, RESULTS)
    all_rates = steering.RATES["adamw"]
    for noise in steering.NOISES:
        for seed in steering.SEEDS:
            for row in make_token_rows(noise).values():
                is_choosing = seed in CHOOSING_SEEDS
                for rate in all_rates if is_choosing else (choose_rate(row, all_rates, read_results(RESULTS)),):
                    yield replace(row, learning_rate=rate, seed=seed)


def train_once(setting: Setting) -> dict[str, Any]:
    return whole_traces.train(setting) if setting.wrong_traces > 0 else train(setting, steering.FOLDER)


def run() -> None:
    steering.FOLDER.mkdir(parents=True, exist_ok=True)
    whole_traces.run_missing(iter_due_runs(), RESULTS, train_once)


def report() -> None:
    results = read_results(RESULTS)
    print(f"### {CELL[0].capitalize()} noise, {CELL[1]:.0%} of the traces wrong\n")
    for rows in (make_trace_rows(), make_optimizer_rows()):
        rates = whole_traces.choose_rates(rows, results)
        print(whole_traces_table(rows, rates, results, whole_traces.SEEDS) + "\n")
    for noise in steering.NOISES:
        print(f"### {noise.capitalize()} noise of single tokens\n")
        print(steering_table(make_token_rows(noise), steering.RATES["adamw"], results) + "\n")
    print(f"{len(results)} runs, {sum(result['seconds'] for result in results) / 60:.0f} minutes of one core.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "report"))
    {"run": run, "report": report}[parser.parse_args().command]()


if __name__ == "__main__":
    main()
