"""Calibrate a plan by the speed of these GPUs: a run of a few steps, then `vcore-ds plan --calibrate`.

    python -m tests.gpu.calibrate [--shape 0.6b] [--ranks 8]

The run has random weights of a Qwen3's shape, and traces of random tokens that are as long as long chains of thought.
The plan is that of the recipe for Qwen3-1.7B on as many GPUs.
"""

import argparse
import random
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.benchmarks.gpu import SHAPES
from tests.gpu.node.launch import make_rank_arguments
from tests.gpu.results import work_folder, write_results
from tests.helpers.commands import REPOSITORY
from tests.helpers.setups import write_conversations
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.cli import main
from vcore_ds.commands.plan.columns import calibrate
from vcore_ds.common.errors import UserError
from vcore_ds.distributed.device import uses_gpu
from vcore_ds.planning.hardware import Achieved

RECIPE = "launch_scripts/recipes/qwen3_1.7b_math_full.yaml"
NUM_TRACES, NUM_STEPS = 128, 8
MEAN_LETTERS = {"tiny": 60}
"""Mean letters of a trace by shape, 3000 for the others. The tokenizer has a token for each letter."""

TINY = (
    *("model.precision=fp32", "engine.deepspeed_config=ds_configs/zero3_fp32.json"),
    *("batch.global_size=8", "probe.batch_size=4"),
)
"""Settings for the tiny shape. In bf16 the simulated device would interpret the attention kernel, for minutes a
step."""


def write_inputs(folder: Path, shape: str) -> None:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = SHAPES[shape]
    sizes = sizes | {"vocab_size": max(sizes["vocab_size"], len(tokenizer))}
    config = Qwen3Config(**sizes, max_position_embeddings=131072)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    drawn = random.Random(0)
    mean = MEAN_LETTERS.get(shape, 3000)
    lengths = [round(mean * drawn.lognormvariate(-0.25, 0.7)) for _ in range(NUM_TRACES)]
    traces = [(f"question {i}?", "".join(drawn.choices("0123456789 ", k=length))) for i, length in enumerate(lengths)]
    write_conversations(folder / "train.jsonl", traces)


def make_settings(folder: Path, shape: str, num_steps: int) -> list[str]:
    """Arguments of `vcore-ds train` for the inputs in `folder`."""
    return [
        RECIPE,
        f"model.path={folder / 'model'}",
        f"data.train_path={folder / 'train.jsonl'}",
        f"data.cache_dir={folder / 'cache'}",
        f"schedule.num_steps={num_steps}",
        f"run.output_dir={folder / 'run'}",
        "run.num_followed_traces=0",
        *(TINY if shape == "tiny" else ()),
    ]


def report(run: Path, num_ranks: int, shape: str) -> None:
    measured, description = calibrate(str(run))
    rows = [
        {
            "speeds": name,
            "matrix multiplications, share of the peak": achieved.compute,
            "update, share of the memory bandwidth": achieved.memory,
        }
        for name, achieved in (("of this run", measured), ("assumed by plan", Achieved()))
    ]
    write_results("calibrate", num_ranks, f"Speeds of a run of Qwen3-{shape} on {num_ranks} ranks. {description}", rows)


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    folder, ranks = work_folder("calibrate"), arguments.ranks
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_inputs(folder, arguments.shape)
    settings = make_settings(folder, arguments.shape, NUM_STEPS)
    command = [sys.executable, *make_rank_arguments(ranks, "vcore_ds.commands.cli", "train", *settings)]
    failed = subprocess.run(command, cwd=REPOSITORY).returncode
    if failed:
        return failed
    plan = ["plan", RECIPE, "--gpus", str(ranks), "--calibrate", str(folder / "run")]
    if uses_gpu():
        report(folder / "run", ranks, arguments.shape)
        return main(plan)
    try:
        calibrate(str(folder / "run"))
    except UserError as error:  # expected: the speed of a CPU does not calibrate GPUs
        print(f"vcore-ds {' '.join(plan)}\nerror: {error}")
        return 0 if "expected GPUs whose peak is known" in str(error) else 1
    return 1


if __name__ == "__main__":
    sys.exit(run())
