"""CPU seconds, memory and bytes of a scored trace: `vcore-ds score` beside Bergson, on SmolLM2-135M-Instruct in fp32.

    python -m tests.benchmarks.peer_scoring --peer-python PATH [--sizes 8 32]

PATH is the Python of an environment that has Bergson (`pip install bergson`). Both score the same traces, of the data
mixture of `tests.experiments.target_selection` (some 75 tokens with the prompt), along the mean gradient of the same 8
traces, by the adapter of a short run. All its parameters are in linear layers, so that Bergson's dot product must equal
our utilities. Each runs as a separate command with one process and one thread, one after the other. The cost of a trace
is the slope between two sizes, which leaves out start, model and query, in CPU seconds, which depend less on other load
than wall time. Peak memory is that of the larger size.

    vcore      a number for every token and trace, by forward mode
    dot        Bergson: gradient of each trace, times the query's as soon as it is there

Predicted before the first run, by counting matrix multiplications with a forward as 1: 2 for both, so between 0.8 and
1.2 of Bergson's CPU seconds; differences below 1e-4 of the norm."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.experiments import target_selection
from tests.experiments.processes import REPOSITORY, run_train, write_json_lines
from vcore_ds.commands.quickstart.traces import prepare_quickstart_data
from vcore_ds.data.scores_folder import read_traces
from vcore_ds.data.tokenization import load_tokenizer

FOLDER = REPOSITORY / "runs" / "peer_scoring"
PEER_SCRIPT = REPOSITORY / "tests" / "experiments" / "peer_bergson.py"
FP32 = ("model.precision=fp32", "engine.deepspeed_config=ds_configs/zero3_fp32.json", "data.cutoff_length=160")
PLAIN = ("probe.direction=sgd", "probe.clip=null")
"""The gradient itself, instead of Adam's update as in the run's recipe."""


def make_data(sizes: Sequence[int], model: Path) -> None:
    """Write the traces of each size and of the query, as conversations and as token ids with labels."""
    mixture = target_selection.make_data(0, FOLDER)
    tokenizer = load_tokenizer(str(model))
    pool = [json.loads(line) for line in (FOLDER / "pool.jsonl").read_text().splitlines()]
    for name, rows in {"pool": pool, **{str(size): mixture[:size] for size in sizes}}.items():
        write_json_lines(FOLDER / f"{name}.jsonl", rows)
        tokenized = []
        for row in rows:
            prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True)["input_ids"]
            ids = tokenizer.apply_chat_template(row["messages"])["input_ids"]
            after = len(ids) - ids[::-1].index(tokenizer.eos_token_id)  # a line break, which belongs to no turn
            labels = [-100] * len(prompt) + ids[len(prompt) : after] + [-100] * (len(ids) - after)
            tokenized.append({"input_ids": ids, "labels": labels})
        write_json_lines(FOLDER / f"{name}_ids.jsonl", tokenized)


def train_adapter(size: int) -> None:
    """Take two SFT steps, so that A has a gradient too."""
    steps = ("methods/sft.yaml", "schedule.num_steps=2", "data.validation_path=null", "run.num_followed_traces=0")
    paths = (f"data.train_path={FOLDER}/{size}.jsonl", f"data.cache_dir={FOLDER}/store")
    run_train([*FP32, *steps, *paths, f"run.output_dir={FOLDER}/run"], FOLDER / "run")


def measure_command(command: Sequence[str], log: Path) -> dict[str, float]:
    """CPU seconds and peak bytes of a command and its child processes.

    Raises:
        RuntimeError: the command failed. The message has its last lines.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HOME": str(FOLDER / "cache")}
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=file, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
    if status != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {status}:\n{log.read_text()[-3000:]}")
    return {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024}


def score_with_vcore(size: int) -> dict[str, Any]:
    """Cost of scoring, and the mean utility of every trace, in the order of the traces."""
    output = FOLDER / f"vcore_{size}"
    shutil.rmtree(output, ignore_errors=True)
    paths = [f"data.{key}_path={FOLDER}/{file}.jsonl" for key, file in (("train", size), ("probe", "pool"))]
    command = [sys.executable, "-m", "vcore_ds.commands.cli", "score", str(FOLDER / "run"), *PLAIN, *paths]
    command += [f"data.cache_dir={FOLDER}/store", "--output", str(output)]
    result = measure_command(command, output.with_suffix(".log"))
    scores = read_traces(output, ["utility_mean.trusted"])["utility_mean.trusted"]
    return result | {"bytes": sum(path.stat().st_size for path in output.iterdir()), "scores": scores}


def score_with_bergson(size: int, python: str) -> dict[str, Any]:
    """Cost of scoring, and Bergson's dot product for every trace."""
    output = FOLDER / f"dot_{size}.json"
    files = [str(FOLDER / file) for file in ("run/adapter", f"{size}_ids.jsonl", "pool_ids.jsonl")]
    result = measure_command([python, str(PEER_SCRIPT), "dot", *files, str(output)], output.with_suffix(".log"))
    scored = json.loads(output.read_text())
    return result | {"bytes": scored["bytes"], "scores": np.array(scored["scores"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="Python of an environment that has Bergson")
    parser.add_argument("--sizes", type=int, nargs=2, default=[8, 32], help="traces, whose costs are subtracted")
    arguments = parser.parse_args()
    small, large = arguments.sizes
    make_data(arguments.sizes, prepare_quickstart_data(REPOSITORY / "runs" / "quickstart_data").model)
    if not (FOLDER / "run" / "adapter").exists():
        train_adapter(small)
    print("| | CPU seconds a trace | CPU seconds besides | peak GB | bytes a trace |\n|---|---|---|---|---|")
    scores = {}
    for name in ("vcore", "dot"):
        first, second = (
            score_with_vcore(size) if name == "vcore" else score_with_bergson(size, arguments.peer_python)
            for size in arguments.sizes
        )
        slope = {key: (second[key] - first[key]) / (large - small) for key in ("cpu_seconds", "bytes")}
        besides = first["cpu_seconds"] - small * slope["cpu_seconds"]
        cells = [name, f"{slope['cpu_seconds']:.2f}", f"{besides:.0f}", f"{second['peak_bytes'] / 1e9:.1f}"]
        print("| " + " | ".join([*cells, f"{slope['bytes']:,.0f}"]) + " |", flush=True)
        scores[name] = second["scores"]
    difference = np.linalg.norm(scores["vcore"] - scores["dot"]) / np.linalg.norm(scores["dot"])
    print(f"\nThe scores differ by {difference:.1e} of their norm.")


if __name__ == "__main__":
    main()
