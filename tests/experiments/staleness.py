"""Loss of accuracy when stored token weights do not follow the model (docs/reports/whole-traces.md).

    python -m tests.experiments.staleness run       what is missing
    python -m tests.experiments.staleness report    the table

Task, seeds, choice of learning rates and measures are those of `whole_traces.py` in its central cell; runs are of three
epochs. Results are appended to RESULTS, and finished runs are skipped.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from tests.experiments import whole_traces
from tests.experiments.processes import read_results
from tests.experiments.report import whole_traces_table
from tests.experiments.settings import BATCH_SIZE, Setting

RESULTS = Path(__file__).with_suffix(".jsonl")
NUM_STEPS = 3 * whole_traces.NUM_TRACES // BATCH_SIZE


def make_rows() -> dict[str, Setting]:
    """Name -> row, without seed and learning rate (0)."""
    grid = whole_traces.grid(*whole_traces.CELLS[0])
    sft, vcore = (replace(grid[name], num_steps=NUM_STEPS) for name in ("sft", "vcore, 0.5 nats within"))
    stored = replace(sft, method="stored", kl_budget=vcore.kl_budget, pool_size=vcore.pool_size)
    return {
        "before training": grid["before training"],
        "sft": sft,
        "every step, Adam's direction, alpha": vcore,
        "every step": replace(vcore, direction="sgd", alpha="none"),
        "once per epoch": replace(stored, stored="epoch"),
        "once before training": replace(stored, stored="start"),
        "once, with the finished sft model": replace(stored, stored="finished"),
    }


def run() -> None:
    whole_traces.run_missing(whole_traces.iter_due_on_all_seeds(make_rows(), RESULTS), RESULTS)


def report() -> None:
    results = read_results(RESULTS)
    rates = whole_traces.choose_rates(make_rows(), results)
    print(whole_traces_table(make_rows(), rates, results, whole_traces.SEEDS))
    print(f"{len(results)} runs, {sum(result['seconds'] for result in results) / 60:.0f} minutes of one core.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "report"))
    {"run": run, "report": report}[parser.parse_args().command]()


if __name__ == "__main__":
    main()
