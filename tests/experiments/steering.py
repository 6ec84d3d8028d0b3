"""When does steering by trusted data pay (docs/reports/steering-experiments.md)? On the task of `learning.py`.

    python -m tests.experiments.steering run --noise random    one of the two kinds of noise, or both without a name
    python -m tests.experiments.steering report                the tables, from what has been run

Learning rates are chosen for each row on the seeds of CHOOSING_SEEDS, which are run at all rates, by the loss on
held-out problems that are not those of the tables. The other seeds are run at the chosen rate, or with
`--all-rates` at all. Results are appended to RESULTS, and finished runs are skipped.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tests.experiments.processes import REPOSITORY, read_results
from tests.experiments.report import CHOOSING_SEEDS, choose_rate, parse_setting, steering_table
from tests.experiments.settings import Setting
from tests.experiments.training import train_and_record

FOLDER = REPOSITORY / "runs" / "learning_steering"
RESULTS = Path(__file__).with_suffix(".jsonl")
"""Committed with the code. Results of 2026-11-22 remain only in docs/reports/steering-tables.md."""
NOISES = ("random", "systematic")
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
SEEDS = tuple(range(5))
RATES = {"adamw": (3e-4, 1e-3, 3e-3), "sgd": (0.05, 0.2, 0.5)}
TRUSTED_SHARE = 0.2
"""4 trusted sequences in addition to 16 of the training data."""
WITHIN = 0.005
"""Nats within a trace if the budget is over the batch."""


def grid(noise: str, optimizer: str) -> dict[str, Setting]:
    """Name -> row, without seed and learning rate (0)."""
    sft = Setting(regime="tuned", num_steps=60, noise=noise, optimizer=optimizer, learning_rate=0.0)
    dft = replace(sft, method="dft")
    direction = "adam" if optimizer == "adamw" else "sgd"
    with_training_probe = replace(sft, method="vcore", kl_budget=0.5, direction=direction, probe_size=16)
    with_pool = replace(with_training_probe, probe_data="pool")
    full_pool = replace(with_pool, probe_size=64)
    over_batch = replace(full_pool, kl_budget=WITHIN, batch_kl_budget=1.0)
    rows = {
        "sft": sft,
        "dft": dft,
        "sft + trusted": replace(sft, trusted_share=TRUSTED_SHARE),
        "dft + trusted": replace(dft, trusted_share=TRUSTED_SHARE),
        "sft on the pool alone": replace(sft, main_data="pool"),
        "vcore, B' 4": replace(with_pool, probe_size=4),
        "vcore, B' 16": with_pool,
        "vcore, B' all": full_pool,
        "vcore, B' all, every 5": replace(full_pool, probe_every=5),
        "vcore, B' all, every 20": replace(full_pool, probe_every=20),
        "vcore, B' 4, decay 0.9": replace(with_pool, probe_size=4, probe_decay=0.9),
        "vcore, B' all, 0.05 nats": replace(full_pool, kl_budget=0.05),
        "vcore, B' all, base dft": replace(full_pool, base_measure="dft"),
        "vcore, B' all, batch 0.1 nats": replace(full_pool, batch_kl_budget=0.1),
        "vcore, B' all, batch 0.5 nats": replace(full_pool, batch_kl_budget=0.5),
        "vcore, B' all, 1 nat over the batch": over_batch,
        "vcore, B' all, + trusted": replace(full_pool, trusted_share=TRUSTED_SHARE),
        "vcore, B' all, base dft, + trusted": replace(full_pool, base_measure="dft", trusted_share=TRUSTED_SHARE),
        "vcore, pool 8, B' all": replace(full_pool, pool_size=8, probe_size=8),
        "vcore, pool 8, B' all, 1 nat over the batch": replace(over_batch, pool_size=8, probe_size=8),
        "vcore, pool 512, B' all, every 5": replace(full_pool, pool_size=512, probe_size=512, probe_every=5),
        "vcore, no pool, B' 16": with_training_probe,
        "vcore, no pool, B' 16, probe loss dft": replace(with_training_probe, probe_loss="dft"),
        "vcore, no pool, previous step": replace(with_training_probe, probe_source="previous_step"),
    }
    if optimizer == "adamw":
        return rows
    names = ("sft", "dft", "sft + trusted", "dft + trusted", "vcore, B' all", "vcore, B' all, base dft, + trusted")
    return {name: rows[name] for name in names}


def iter_missing(
    noise: str, optimizer: str, seeds: Sequence[int], names: Sequence[str], all_rates: bool
) -> Iterator[Setting]:
    """Yield missing runs in order, each once the runs before it have finished."""
    for seed in seeds:
        for row in (row for name, row in grid(noise, optimizer).items() if name in names):
            results = read_results(RESULTS)
            rates = RATES[optimizer]
            if seed not in CHOOSING_SEEDS and not all_rates:
                rates = (choose_rate(row, rates, results),)
            done = {parse_setting(result) for result in results}
            settings = [replace(row, learning_rate=rate, seed=seed) for rate in rates]
            yield from (setting for setting in settings if setting not in done)


def run(
    noises: Sequence[str], optimizers: Sequence[str], seeds: Sequence[int], names: Sequence[str], all_rates: bool
) -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for optimizer in optimizers:
        for noise in noises:
            for setting in iter_missing(noise, optimizer, seeds, names, all_rates):
                train_and_record(setting, RESULTS, FOLDER)


def report() -> None:
    results = read_results(RESULTS)
    for choosing_seeds in (CHOOSING_SEEDS, SEEDS):
        print(f"## Learning rates chosen on seeds {', '.join(map(str, choosing_seeds))}\n")
        for optimizer, name in OPTIMIZERS.items():
            for noise in NOISES:
                table = steering_table(grid(noise, optimizer), RATES[optimizer], results, choosing_seeds)
                print(f"### {noise.capitalize()} noise, {name}\n\n{table}\n")
    print(f"{len(results)} runs, {sum(result['seconds'] for result in results) / 60:.0f} minutes of one core.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="train what is missing of the grid")
    runs.add_argument("--noise", nargs="+", choices=NOISES, default=NOISES)
    runs.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    runs.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    names = list(grid(NOISES[0], "adamw"))
    runs.add_argument("--rows", nargs="+", choices=names, default=names)
    runs.add_argument("--all-rates", action="store_true", help="run every seed at all learning rates")
    commands.add_parser("report", help="print the tables")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.noise, arguments.optimizer, arguments.seeds, arguments.rows, arguments.all_rates)
    else:
        report()


if __name__ == "__main__":
    main()
