"""Does VCORE learn better than plain fine-tuning, and what does it need to? (docs/reports/experiments.md)

    python -m tests.experiments.learning run tuned_adamw    one part of the grid, or all of it without a name
    python -m tests.experiments.learning report             the tables, from what has been run

`run` appends one JSON line per finished run to runs/learning/results.jsonl and skips finished runs, so it may be
stopped and started again. It uses one thread; two processes may work on different parts or seeds.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

from tests.experiments.processes import REPOSITORY, read_results
from tests.experiments.report import kinds_table, parse_setting, table
from tests.experiments.settings import Setting
from tests.experiments.training import train_and_record

FOLDER = REPOSITORY / "runs" / "learning"
RESULTS = FOLDER / "results.jsonl"


def grid(part: str) -> list[Setting]:
    """Rows of one part, without seeds."""
    sft = Setting()
    vcore = replace(sft, method="vcore", kl_budget=0.05, direction="adam")
    if part.startswith("scratch"):
        sft, vcore = (replace(row, learning_rate=3e-3) for row in (sft, vcore))
    if part == "scratch":
        return [
            sft,
            vcore,
            replace(vcore, kl_budget=0.005),
            replace(vcore, direction="sgd"),
            replace(sft, method="dft"),
            replace(sft, method="random"),
        ]
    if part == "scratch_more":
        return [
            replace(vcore, budget_schedule="falling"),
            *(replace(sft, learning_rate=6e-3, method=method) for method in ("sft", "dft", "iw_sft", "random")),
            *(replace(vcore, learning_rate=6e-3, kl_budget=budget) for budget in (0.005, 0.05)),
            replace(vcore, learning_rate=6e-3, direction="sgd"),
            replace(vcore, learning_rate=6e-3, probe_data="pool"),
            replace(vcore, utility="bf16_difference"),
            replace(vcore, probe_data="pool"),
            replace(sft, learning_rate=1.5e-3),
            replace(vcore, budget_schedule="rising"),
        ]
    if part == "scratch_sgd":
        sft, vcore = (replace(row, optimizer="sgd", learning_rate=0.5) for row in (sft, vcore))
        return [sft, replace(vcore, direction="sgd"), replace(vcore, direction="sgd", kl_budget=0.005)]
    if part == "tuned_clean":
        sft, vcore = (replace(row, regime="tuned", num_steps=60, training_noise=False) for row in (sft, vcore))
        rows = []
        for optimizer, direction, rate in (("adamw", "adam", 1e-4), ("sgd", "sgd", 0.05)):
            sft, vcore = (replace(row, optimizer=optimizer, learning_rate=rate) for row in (sft, vcore))
            vcore = replace(vcore, direction=direction)
            rows += [sft, vcore, replace(vcore, kl_budget=0.5), replace(sft, method="dft")]
        return rows
    if part == "tuned_more":
        return make_more_tuned_rows()
    sft, vcore = (replace(row, regime="tuned", num_steps=60, learning_rate=1e-4) for row in (sft, vcore))
    if part == "tuned_sgd":
        sft, vcore = (replace(row, optimizer="sgd", learning_rate=0.05) for row in (sft, vcore))
        vcore = replace(vcore, direction="sgd")
    other_rates = (3e-4, 1e-3) if part == "tuned_adamw" else (0.2, 0.5)
    rows = [
        sft,
        *(replace(sft, method=method) for method in ("dft", "iw_sft", "random")),
        *(replace(row, learning_rate=rate) for row in (sft, replace(vcore, kl_budget=0.5)) for rate in other_rates),
        *(replace(vcore, kl_budget=budget) for budget in (0.005, 0.05, 0.2, 0.5, 1.0)),
        *(replace(vcore, kl_budget=0.5, alpha=alpha) for alpha in ("none", "variance", "effective_sample_size")),
        *(replace(vcore, kl_budget=0.5, budget_schedule=schedule) for schedule in ("rising", "falling")),
        *(replace(vcore, kl_budget=0.5, probe_size=size) for size in (1, 32)),
        replace(vcore, kl_budget=0.5, utility="bf16_difference"),
        *(replace(vcore, kl_budget=0.5, probe_data=data) for data in ("clean", "pool")),
        replace(sft, method="dft", learning_rate=other_rates[0]),
    ]
    if part == "tuned_adamw":
        rows += [replace(vcore, kl_budget=budget, direction="sgd") for budget in (0.05, 0.5)]
    return rows


def make_more_tuned_rows() -> list[Setting]:
    """Rows whose probe is cleaner than the training batch, and other uses of the same data."""
    sft = Setting(regime="tuned", num_steps=60, learning_rate=1e-4)
    vcore = replace(sft, method="vcore", kl_budget=0.5, direction="adam")
    rows = []
    for sft_row, vcore_row, high_rate in (
        (sft, vcore, 1e-3),
        (
            replace(sft, optimizer="sgd", learning_rate=0.05),
            replace(vcore, optimizer="sgd", direction="sgd", learning_rate=0.05),
            0.5,
        ),
    ):
        trusted = replace(vcore_row, probe_data="pool")
        rows += [
            replace(vcore_row, probe_loss="dft"),
            replace(vcore_row, probe_loss="answer"),
            replace(vcore_row, probe_size=128),
            replace(trusted, kl_budget=0.05),
            replace(trusted, learning_rate=high_rate),
            replace(vcore_row, probe_loss="dft", learning_rate=high_rate),
            replace(sft_row, method="sft_mixed", probe_data="pool"),
            replace(sft_row, method="sft_mixed", probe_data="pool", learning_rate=high_rate),
            replace(sft_row, method="dft", learning_rate=high_rate),
        ]
    return rows


PARTS = ("tuned_adamw", "tuned_sgd", "tuned_more", "tuned_clean", "scratch", "scratch_more", "scratch_sgd")


def run_parts(parts: Sequence[str], seeds: Sequence[int]) -> None:
    """Run all rows of a seed before the next seed, so that an unfinished grid can be reported."""
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    settings = [replace(row, seed=seed) for part in parts for seed in seeds for row in grid(part)]
    for setting in settings:
        if setting in {parse_setting(result) for result in read_results(RESULTS)}:
            continue
        train_and_record(setting, RESULTS, FOLDER)


def report() -> None:
    results = read_results(RESULTS)
    parts = {
        "From a trained model, 60 steps of AdamW": grid("tuned_adamw")
        + [r for r in make_more_tuned_rows() if is_adamw(r)],
        "From a trained model, 60 steps of SGD": grid("tuned_sgd")
        + [r for r in make_more_tuned_rows() if not is_adamw(r)],
        "The same on clean traces, AdamW": [row for row in grid("tuned_clean") if is_adamw(row)],
        "The same on clean traces, SGD": [row for row in grid("tuned_clean") if not is_adamw(row)],
        "From scratch, 600 steps of AdamW": grid("scratch") + grid("scratch_more"),
        "From scratch, 600 steps of SGD": grid("scratch_sgd"),
    }
    for title, rows in parts.items():
        if any(replace(parse_setting(result), seed=0) in rows for result in results):
            print(f"### {title}\n\n{table(rows, results)}\n")
    tuned = next(iter(parts.values()))
    print(f"### Where the loss is, from a trained model, AdamW\n\n{kinds_table(tuned, results)}\n")
    print(f"{len(results)} runs, {sum(result['seconds'] for result in results) / 60:.0f} minutes of one core.\n")


def is_adamw(row: Setting) -> bool:
    return row.optimizer == "adamw"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train what is missing of the grid")
    run.add_argument("parts", nargs="*", choices=PARTS, default=PARTS)
    run.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    commands.add_parser("report", help="print the tables")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run_parts(arguments.parts, arguments.seeds)
    else:
        report()


if __name__ == "__main__":
    main()
