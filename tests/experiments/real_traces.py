"""Whole wrong traces on a real model: SmolLM2-135M-Instruct on word problems, by the commands of the product.

    python -m tests.experiments.real_traces run [--seeds 0 1 2]    what is missing
    python -m tests.experiments.real_traces report                 the table of docs/reports/whole-traces.md

Traces, trusted traces and problems come from `launch_scripts.wrong_traces`, with the seed of the run; the recipe is
wrong_traces.yaml. Each command is a process with one thread, forked from one that has imported everything. Rows, sizes,
measures and predictions are on the page, committed before the first reported run. Results are appended to
real_traces.jsonl, and finished runs are skipped."""

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launch_scripts import wrong_traces
from tests.experiments.processes import REPOSITORY, read_results
from tests.experiments.task import measure_trace_separation
from tests.helpers.jobs import ForkedJob
from vcore_ds.commands import cli
from vcore_ds.common.statistics import cell
from vcore_ds.data.scores_folder import read_traces

FOLDER = REPOSITORY / "runs" / "real_traces"
RESULTS = Path(__file__).with_suffix(".jsonl")
SEEDS = (0, 1, 2)
SECONDS = "CPU seconds: "
"""Last words in the log of a finished command, before the number."""
SFT = ("methods/sft.yaml",)
ROWS = {
    "sft": SFT,
    "sft, quarter of highest utility": (*SFT, "data.keep.scores={scores}", "data.keep.top=0.25"),
    "sft + trusted": (*SFT, "data.trusted_share=0.2", "batch.global_size=10"),
    "vcore, 1 nat over the batch": (
        "method.scope=sequence_and_batch",
        "method.kl_budget=0.005",
        "method.batch_kl_budget=1.0",
    ),
    "sft on the pool alone": (*SFT, "data.train_path={data}/trusted.jsonl", "data.trusted_overlap=keep"),
    "dft": ("methods/dft.yaml",),
}
"""Row -> overrides of the recipe, in the order of the runs. Scores are taken with the `sft` run."""
SELECTION = "sft, quarter of highest utility"


def run(seeds: Sequence[int], rows: Sequence[str]) -> None:
    for seed in seeds:
        wrong_traces.write(FOLDER / f"seed_{seed}" / "data", seed)
    for row in rows:
        for seed in seeds:
            if (seed, row) not in {(result["seed"], result["row"]) for result in read_results(RESULTS)}:
                result = {"seed": seed, "row": row} | train_and_evaluate(row, seed)
                print(result, flush=True)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(result) + "\n")


def train_and_evaluate(row: str, seed: int) -> dict[str, Any]:
    """Shares of answers, CPU seconds of scoring and training, and for scored traces the result of
    `measure_separation`."""
    folder = FOLDER / f"seed_{seed}"
    run_folder, scores = folder / f"row_{list(ROWS).index(row)}", folder / "scores"
    result: dict[str, Any] = {}
    if row == SELECTION:
        sft, pool = folder / f"row_{list(ROWS).index('sft')}", f"data.probe_path={folder}/data/trusted.jsonl"
        seconds = run_command(f"score {sft} {pool} --output {scores}", scores)
        result |= {"cpu_seconds_score": seconds} | measure_separation(scores, folder / "data" / "mixture.jsonl")
    common = [
        f"data.train_path={folder}/data/mixture.jsonl",
        f"data.probe_path={folder}/data/trusted.jsonl",
        f"data.cache_dir={FOLDER}/cache",
        f"run.seed={seed}",
        f"run.output_dir={run_folder}",
        "run.num_token_records=0",
    ]
    changes = [override.format(data=folder / "data", scores=scores) for override in ROWS[row]]
    line = " ".join(["train wrong_traces.yaml", *common, *changes])
    result["cpu_seconds_train"] = run_command(line, run_folder)
    evaluation = folder / f"{run_folder.name}_evaluation"
    evaluate = f"eval {run_folder} --output {evaluation} --tasks math500={folder}/data/problems.jsonl"
    run_command(f"{evaluate} --temperature 0 --max-new-tokens 48 --batch-size 64", evaluation)
    right, wrong_rule = wrong_traces.shares_of_answers(evaluation, folder / "data" / "problems.jsonl")
    return result | {"right": right, "wrong_rule": wrong_rule, "overrides": list(ROWS[row])}


def run_command(line: str, output: Path) -> float:
    """Run `vcore-ds LINE`, which writes the folder `output`, unless an earlier attempt has finished; returns its CPU
    seconds without imports.

    Raises:
        RuntimeError: the command failed. The message has its last lines.
    """
    log = output.with_name(f"{output.name}.log")
    if not log.exists() or SECONDS not in log.read_text():
        shutil.rmtree(output, ignore_errors=True)  # left by a stopped attempt
        with ForkedJob(run_timed, line.split(), log) as job:
            code = job.wait(timeout_seconds=3600)
        if code != 0:
            raise RuntimeError(f"vcore-ds {line} ended with {code}:\n{job.output[-3000:]}")
    return float(log.read_text().rsplit(SECONDS, 1)[1])


def run_timed(arguments: Sequence[str]) -> int:
    code = cli.main(arguments)
    if code == 0:
        print(f"{SECONDS}{time.process_time():.1f}", flush=True)
    return code


def measure_separation(scores: Path, mixture: Path) -> dict[str, float]:
    """AUC, the probability that a right trace is above a wrong one, by mean utility and by minus the loss; and the
    share of right traces among the quarter of highest utility."""
    is_wrong = np.array([json.loads(line)["is_wrong"] for line in mixture.read_text().splitlines()])
    traces = read_traces(scores, ["row", "utility_mean.trusted", "loss"])
    is_wrong, utility = is_wrong[traces["row"]], traces["utility_mean.trusted"]
    kept = np.argsort(-utility)[: len(utility) // 4]
    return {
        "auc": measure_trace_separation(torch.tensor(utility), torch.tensor(is_wrong)),
        "auc_of_loss": measure_trace_separation(torch.tensor(-traces["loss"]), torch.tensor(is_wrong)),
        "right_share_kept": float((~is_wrong[kept]).mean()),
    }


def report() -> None:
    results = read_results(RESULTS)
    by_row = {row: {r["seed"]: r for r in results if r["row"] == row} for row in ROWS}
    print("| row | right answers, % | to sft | seeds | wrong rule, % | CPU seconds |")
    print("|---" * 6 + "|")
    for row, by_seed in by_row.items():
        if not by_seed:
            continue
        right = {seed: 100 * result["right"] for seed, result in sorted(by_seed.items())}
        differences = [value - 100 * by_row["sft"][seed]["right"] for seed, value in right.items()]
        wrong = [100 * result["wrong_rule"] for result in by_seed.values()]
        seconds = [r["cpu_seconds_train"] + r.get("cpu_seconds_score", 0.0) for r in by_seed.values()]
        each = ", ".join(f"{value:.0f}" for value in right.values())
        to_sft = "" if row == "sft" else cell(differences, 0, difference=True)
        cells = [row, cell(list(right.values()), 0), to_sft, each, cell(wrong, 0), f"{np.mean(seconds):.0f}"]
        print("| " + " | ".join(cells) + " |")
    for result in by_row[SELECTION].values():
        print({key: result[key] for key in ("seed", "auc", "auc_of_loss", "right_share_kept")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="train what is missing")
    runs.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    runs.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    commands.add_parser("report", help="print the table")
    arguments = parser.parse_args()
    if arguments.command == "report":
        report()
    else:
        run(arguments.seeds, arguments.rows)


if __name__ == "__main__":
    main()
