"""CPU seconds, wall seconds and memory of `vcore-ds prepare math`, of this code and of another commit's in turns.

    python -m tests.benchmarks.prepare --tokenizer MODEL [--rows 10000] [--rounds 10] [--before WORKTREE]

The rows have the schema of OpenMathReasoning and about 300 tokens; math-verify compares the answers. CPU seconds and
memory are sums over the command and all its descendants, sampled ten times a second: PSS, which divides shared pages
among the processes that share them, and RSS, which counts them for each.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np
import psutil

WORDS = (
    "Okay so let me think about this problem carefully we need to find the value of and then wait maybe it is better "
    "to substitute first because the equation has two roots hmm which means that the sum equals therefore by symmetry"
).split()
COMMAND = "import sys; from vcore_ds.commands.cli import main; sys.exit(main(sys.argv[1:]))"


def write_rows(path: Path, num_rows: int, seed: int) -> None:
    """Write rows of which a fifth has a wrong answer. Answers differ, so that each is compared."""
    random = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8") as file:
        for i in range(num_rows):
            a, b = (int(n) for n in random.integers(2, 100_000, 2))
            words = random.choice(WORDS, int(random.integers(60, 220))).tolist()
            for k in range(0, len(words), 12):
                words[k] = f"$x_{{{k}}} = {int(random.integers(1000))}$,\n"
            row = {
                "expected_answer": f"{2 * a}/{2 * b}",
                "problem_type": "has_answer_extracted",
                "generation_model": "DeepSeek-R1",
                "problem": f"Simplify $\\frac{{{3 * a}}}{{{3 * b}}}$.",
                "generated_solution": f"<think>\n{' '.join(words)}\n</think>\n\nThe answer is "
                f"\\boxed{{\\frac{{{a + (i % 5 == 0)}}}{{{b}}}}}.",
            }
            file.write(json.dumps(row) + "\n")


def measure(root: Path, rows: Path, output: Path, tokenizer: str, processes: int) -> dict[str, float]:
    """Run the command with the package in `root`; returns seconds and MiB."""
    words = f"prepare math {rows} --tokenizer {tokenizer} --output {output} --processes {processes}".split()
    environment = os.environ | {"PYTHONPATH": str(root)}
    started = time.monotonic()
    command = psutil.Popen(
        [sys.executable, "-c", COMMAND, *words], env=environment, cwd=root, stdout=subprocess.DEVNULL
    )
    seconds: dict[psutil.Process, float] = {}
    pss = rss = 0
    while command.poll() is None:
        memory = []
        for process in [command, *command.children(recursive=True)]:
            with suppress(psutil.Error):
                times, used = process.cpu_times(), process.memory_full_info()
                seconds[process] = times.user + times.system
                memory.append((used.pss, used.rss))
        pss, rss = max(pss, sum(p for p, _ in memory)), max(rss, sum(r for _, r in memory))
        time.sleep(0.1)
    assert command.returncode == 0
    wall = time.monotonic() - started
    return {"CPU s": sum(seconds.values()), "wall s": wall, "PSS MiB": pss / 2**20, "RSS MiB": rss / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--before", type=Path)
    arguments = parser.parse_args()
    roots = {"before": arguments.before, "after": Path(__file__).parents[2]}
    results: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(arguments.rounds):
            rows = Path(folder) / f"rows{i}.jsonl"
            write_rows(rows, arguments.rows, seed=i)
            for name in ("before", "after") if i % 2 else ("after", "before"):
                if (root := roots[name]) is not None:
                    output = Path(folder) / f"{name}{i}"
                    results[name].append(measure(root, rows, output, arguments.tokenizer, arguments.processes))
                    print(json.dumps({"round": i, "code": name, **results[name][-1]}), flush=True)
            stores = [Path(folder) / f"{name}{i}" / "tokens.bin" for name in roots if roots[name]]
            assert len({store.read_bytes() for store in stores}) == 1
    for name, measured in results.items():
        for key in measured[0] if measured else ():
            values = [result[key] for result in measured]
            print(
                f"{name:<7} {key:<8} sum {sum(values):10,.1f}  median {median(values):10,.1f}  max {max(values):10,.1f}"
            )


if __name__ == "__main__":
    main()
