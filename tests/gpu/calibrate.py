"""What a plan says with the speed that this GPU reaches: a run of a few steps, then `vcore-ds plan --calibrate`.

    python -m tests.gpu.calibrate [--shape 0.6b]

The run has random weights of a Qwen3's shape, and traces of random tokens with lengths around those of long chains of
thought. The plan is that of the recipe for Qwen3-1.7B on this one GPU.
"""

import argparse
import os
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.benchmarks.gpu import SHAPES
from tests.helpers.setups import write_conversations
from tests.helpers.tokenizer import make_tokenizer
from vcore_ds.commands.cli import main

FOLDER = Path(os.environ.get("VCORE_DS_GPU_RESULTS", "runs/gpu")) / "calibration"
NUM_TRACES, NUM_STEPS, MEAN_LETTERS = 128, 8, 3000
"""The tokenizer has a token for each letter."""


def write_inputs(folder: Path, shape: str) -> None:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[shape], max_position_embeddings=131072)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    drawn = random.Random(0)
    lengths = [round(MEAN_LETTERS * drawn.lognormvariate(-0.25, 0.7)) for _ in range(NUM_TRACES)]
    traces = [(f"question {i}?", "".join(drawn.choices("0123456789 ", k=length))) for i, length in enumerate(lengths)]
    write_conversations(folder / "train.jsonl", traces)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_inputs(FOLDER, arguments.shape)
    recipe = "launch_scripts/recipes/qwen3_1.7b_math_full.yaml"
    settings = [
        f"model.path={FOLDER / 'model'}",
        f"data.train_path={FOLDER / 'train.jsonl'}",
        f"data.cache_dir={FOLDER / 'cache'}",
        f"schedule.num_steps={NUM_STEPS}",
        f"run.output_dir={FOLDER / 'run'}",
    ]
    failed = main(["train", recipe, *settings])
    sys.exit(failed or main(["plan", recipe, "--gpus", "1", "--calibrate", str(FOLDER / "run")]))
