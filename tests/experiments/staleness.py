"""What it costs that stored token weights do not follow the model (docs/reports/whole-traces.md).

    python -m tests.experiments.staleness run       what is missing
    python -m tests.experiments.staleness report    the table

Task, seeds, choice of learning rates and measures are those of `whole_traces.py` in its central cell; runs are of three
epochs. Results are appended to RESULTS, and what is there is skipped.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from tests.experiments import whole_traces
from tests.experiments.processes import read
from tests.experiments.report import chosen_rate, setting_of, whole_traces_table
from tests.experiments.settings import BATCH_SIZE, Setting

RESULTS = Path(__file__).with_suffix(".jsonl")
NUM_STEPS = 3 * whole_traces.NUM_TRACES // BATCH_SIZE


def rows() -> dict[str, Setting]:
    """By name, seed and learning rate (0) aside."""
    grid = whole_traces.grid(*whole_traces.CELLS[0])
    sft, vcore = (replace(grid[name], num_steps=NUM_STEPS) for name in ("sft", "vcore, 0.5 nats within"))
    stored = replace(sft, method="stored", kl_budget=vcore.kl_budget, pool_size=vcore.pool_size)
    return {
        "before training": grid["before training"],
        "sft": sft,
        "every step, Adam's direction, alpha": vcore,
        "every step": replace(vcore, direction="sgd", alpha="none"),
        "once an epoch": replace(stored, stored="epoch"),
        "once before training": replace(stored, stored="start"),
        "once, with the finished sft model": replace(stored, stored="finished"),
    }


def rates() -> dict[str, float]:
    """By row. Raises ValueError where one has not been run at all rates."""
    results, seeds = read(RESULTS), whole_traces.CHOOSING_SEEDS
    return {
        name: chosen_rate(row, whole_traces.rates_of(row), results, seeds, by_accuracy=True)
        for name, row in rows().items()
    }


def due() -> Iterator[Setting]:
    """All runs, each given when those before it have been run."""
    for seed in whole_traces.CHOOSING_SEEDS:
        for row in rows().values():
            yield from (replace(row, learning_rate=rate, seed=seed) for rate in whole_traces.rates_of(row))
    chosen = rates()
    for seed in whole_traces.SEEDS:
        yield from (replace(row, learning_rate=chosen[name], seed=seed) for name, row in rows().items())


def run() -> None:
    torch.set_num_threads(1)
    whole_traces.FOLDER.mkdir(parents=True, exist_ok=True)
    done = {setting_of(result) for result in read(RESULTS)}
    for setting in due():
        if setting not in done:
            result = whole_traces.train(setting)
            with RESULTS.open("a") as file:
                file.write(json.dumps({**whole_traces.changed(setting), **result}) + "\n")
            print(f"{setting.label()} seed={setting.seed}: {result}", flush=True)


def report() -> None:
    results = read(RESULTS)
    print(whole_traces_table(rows(), rates(), results, whole_traces.SEEDS))
    print(f"{len(results)} runs, {sum(result['seconds'] for result in results) / 60:.0f} minutes of one core.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "report"))
    {"run": run, "report": report}[parser.parse_args().command]()


if __name__ == "__main__":
    main()
