"""Selection of traces from a data mixture for one task, like LESS (arXiv:2402.04333): SmolLM2-135M-Instruct, LoRA.

    python -m tests.experiments.target_selection run [--seeds 0 1 2]     score and train what is missing
    python -m tests.experiments.target_selection report                  the table of docs/reports/scoring.md

The mixture has worked solutions of six small tasks, a sixth of each, all of them right. The target is one of the tasks,
another one with each seed, and the pool has a few more of its traces. `vcore-ds score` gives every trace its utility
for the pool at the base model; `vcore-ds train` then takes equally many SFT steps on each row's traces. The measures
are the share of the target's traces among the chosen ones, and the loss on held-out traces of the target.

Rows: all traces, and a tenth of them, chosen by utility (`data.keep`), at random, by the lowest loss, by the fewest
supervised tokens.

Decided before the first run: sizes, rate and rows as below, three seeds, all of them reported. Predicted: of the tenth
with the highest utility at least 0.9 belongs to the target, of the random one a sixth; its held-out loss is the lowest
of all rows with every target, all traces and the random tenth come next within 0.1 nats of each other, and the two
other criteria are worse than random where their tenth has few traces of the target.

Decided after these three and before the rest: seeds 3 to 5, so that every task is the target once; all else as before.
Predicted for utility: a share of at least 0.9 with spelling and counting and of 0.7 with subtraction, whose solutions
look like additions; the lowest loss of all rows with spelling and counting, and with subtraction within 0.1 nats of the
lowest, which may be that of the lowest loss before training.
"""

import argparse
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.experiments.processes import REPOSITORY, read_results, run_vcore_ds, write_json_lines
from vcore_ds.commands.quickstart.traces import prepare_quickstart_data
from vcore_ds.data.scores_folder import read_traces

FOLDER = REPOSITORY / "runs" / "target_selection"
RESULTS = Path(__file__).with_suffix(".jsonl")
NUM_OF_A_TASK, NUM_POOL, NUM_HELD_OUT = 40, 8, 24
KEEP_SHARE = 0.1
SEEDS = (0, 1, 2, 3, 4, 5)
COMMON = ("data.cutoff_length=160", "run.num_token_records=0", "run.num_followed_traces=0")
TRAINING = (
    "methods/sft.yaml",
    "batch.global_size=8",
    "schedule.num_steps=8",
    "optimizer.learning_rate=1e-3",
    "checkpoint.every_minutes=null",
)
HELD_OUT_LOSS = re.compile(r"Held-out loss: ([\d.]+) -> ([\d.]+)")
ROWS = ("highest utility", "random", "all", "lowest loss", "shortest")
WORDS = "apple bread chair dance eagle flame grape house island juice knife lemon mango night ocean piano".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

Task = Callable[[random.Random], tuple[str, str]]
"""Draws a question and its worked answer."""


def addition(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(100, 999), draw.randint(100, 999)
    hundreds, rest = a + b // 100 * 100, b % 100
    return f"What is {a} + {b}?", f"{a} + {b - rest} = {hundreds}, and {hundreds} + {rest} = {a + b}. Answer: {a + b}"


def subtraction(draw: random.Random) -> tuple[str, str]:
    a, b = draw.randint(500, 999), draw.randint(100, 499)
    left = a - b // 100 * 100
    return f"What is {a} - {b}?", f"{a} - {b // 100 * 100} = {left}, and {left} - {b % 100} = {a - b}. Answer: {a - b}"


def weekday(draw: random.Random) -> tuple[str, str]:
    day, ahead = draw.randrange(7), draw.randint(8, 60)
    then = DAYS[(day + ahead) % 7]
    steps = f"{ahead} days are {ahead // 7} weeks and {ahead % 7} days. {ahead % 7} days after {DAYS[day]} is {then}."
    return f"Today is {DAYS[day]}. Which day is it in {ahead} days?", f"{steps} Answer: {then}"


def sorting(draw: random.Random) -> tuple[str, str]:
    words = draw.sample(WORDS, 5)
    steps = ", then ".join(sorted(words))
    return f"Sort these words: {', '.join(words)}.", f"First comes {steps}. Answer: {' '.join(sorted(words))}"


def spelling(draw: random.Random) -> tuple[str, str]:
    word = draw.choice(WORDS) + draw.choice(WORDS)
    letters, backwards = "-".join(word), "-".join(reversed(word))
    return f"Write {word} backwards.", f"The letters are {letters}. Backwards: {backwards}. Answer: {word[::-1]}"


def counting(draw: random.Random) -> tuple[str, str]:
    words = [draw.choice(WORDS[:4]) for _ in range(8)]
    word = draw.choice(words)
    places = [i for i, other in enumerate(words, start=1) if other == word]
    steps = f"It stands at {', '.join(map(str, places))}, which are {len(places)} places."
    return f"How often is {word} in this list: {' '.join(words)}?", f"{steps} Answer: {len(places)}"


TASKS: dict[str, Task] = {task.__name__: task for task in (addition, weekday, sorting, subtraction, spelling, counting)}
"""Tasks by name. The target of seed k is the k-th."""


def choose_target(seed: int) -> str:
    return list(TASKS)[seed]


def make_data(seed: int, folder: Path) -> list[dict[str, Any]]:
    """Write mixture, pool and held-out traces, in which no question is repeated; returns the mixture's rows."""
    draw, asked = random.Random(seed), set()

    def draw_rows(task: str, number: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        while len(rows) < number:
            question, answer = TASKS[task](draw)
            if question not in asked:
                asked.add(question)
                turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                rows.append({"messages": turns, "task": task})
        return rows

    mixture = [row for task in TASKS for row in draw_rows(task, NUM_OF_A_TASK)]
    draw.shuffle(mixture)
    write_json_lines(folder / "mixture.jsonl", mixture)
    write_json_lines(folder / "pool.jsonl", draw_rows(choose_target(seed), NUM_POOL))
    write_json_lines(folder / "held_out.jsonl", draw_rows(choose_target(seed), NUM_HELD_OUT))
    return mixture


def score(folder: Path) -> float:
    """Score the mixture along the pool, unless an earlier call did; returns the minutes."""
    start, output = time.perf_counter(), folder / "scores"
    if not output.exists():
        paths = (f"data.train_path={folder}/mixture.jsonl", f"data.probe_path={folder}/pool.jsonl")
        run_vcore_ds("score", *COMMON, *paths, f"data.cache_dir={folder}/cache", "--output", str(output))
    return (time.perf_counter() - start) / 60


def choose_positions(row: str, seed: int, columns: dict[str, np.ndarray]) -> np.ndarray:
    """Positions of a row's traces in the table of scores."""
    measures = {
        "highest utility": -columns["utility_mean.trusted"],
        "lowest loss": columns["loss"],
        "shortest": columns["num_supervised_tokens"],
        "random": np.random.default_rng(seed).permutation(len(columns["loss"])),
    }
    num_traces = len(columns["loss"])
    if row == "all":
        return np.arange(num_traces)
    return np.argsort(measures[row], kind="stable")[: round(KEEP_SHARE * num_traces)]


def train(row: str, seed: int, folder: Path, mixture: Sequence[dict[str, Any]]) -> dict[str, Any]:
    columns = read_traces(folder / "scores", ["row", "loss", "num_supervised_tokens", "utility_mean.trusted"])
    positions = choose_positions(row, seed, columns)
    traces = [mixture[i] for i in columns["row"][positions]]
    data = folder / "mixture.jsonl"
    keep = [f"data.keep.scores={folder}/scores", f"data.keep.top={KEEP_SHARE}"] if row == "highest utility" else []
    if row not in ("highest utility", "all"):
        data = folder / f"{row.replace(' ', '_')}.jsonl"
        write_json_lines(data, traces)
    output = folder / row.replace(" ", "_")
    shutil.rmtree(output, ignore_errors=True)  # left by a stopped attempt
    paths = [
        f"data.train_path={data}",
        f"data.validation_path={folder}/held_out.jsonl",
        f"data.cache_dir={folder}/cache",
        f"run.output_dir={output}",
        f"run.seed={seed}",
    ]
    losses = HELD_OUT_LOSS.search(run_vcore_ds("train", *TRAINING, *COMMON, *paths, *keep))
    assert losses is not None
    for name in ("checkpoints", "adapter"):
        shutil.rmtree(output / name, ignore_errors=True)
    return {
        "seed": seed,
        "target": choose_target(seed),
        "row": row,
        "num_traces": len(traces),
        "share_of_target": sum(trace["task"] == choose_target(seed) for trace in traces) / len(traces),
        "tokens_a_trace": float(columns["num_supervised_tokens"][positions].mean()),
        "loss_before": float(losses[1]),
        "loss_after": float(losses[2]),
    }


def run(seeds: Sequence[int]) -> None:
    prepare_quickstart_data(REPOSITORY / "runs" / "quickstart_data")
    done = {(result["seed"], result["row"]) for result in read_results(RESULTS)}
    for seed in seeds:
        folder = FOLDER / str(seed)
        mixture = make_data(seed, folder)
        print(f"seed {seed}: scored in {score(folder):.1f} minutes", flush=True)
        for row in (row for row in ROWS if (seed, row) not in done):
            result = train(row, seed, folder, mixture)
            with RESULTS.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(result, flush=True)


def report() -> None:
    results = read_results(RESULTS)
    seeds = sorted({result["seed"] for result in results})
    heads = " | ".join(f"{choose_target(seed)}: share, loss" for seed in seeds)
    print(f"| traces | {heads} |\n{'|---' * (len(seeds) + 1)}|")
    for row in ROWS:
        by_seed = {result["seed"]: result for result in results if result["row"] == row}
        cells = [
            f"{by_seed[seed]['share_of_target']:.2f}, {by_seed[seed]['loss_after']:.3f}" if seed in by_seed else ""
            for seed in seeds
        ]
        print(f"| {row} | {' | '.join(cells)} |")
    before = {result["seed"]: result["loss_before"] for result in results}
    print("\nBefore training:", ", ".join(f"{before[seed]:.3f}" for seed in seeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="score and train what is missing")
    running.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=list(SEEDS))
    commands.add_parser("report", help="print the tables")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.seeds)
    else:
        report()


if __name__ == "__main__":
    main()
