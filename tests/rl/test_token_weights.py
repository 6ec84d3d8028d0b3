"""The lines of docs/scoring.md train on a file of token weights as `method.name: stored` does: equal losses, step by
step, in fp32. From a recipe to scores of all tokens, to weights, to two steps of each.

With plain transformers always, on a tiny model; on the quickstart's model with both, where VCORE_DS_TRL_PYTHON names a
Python that has TRL (docs/export.md).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch_scripts.quickstart import DATA
from launch_scripts.quickstart_data import prepare_quickstart_data
from tests.helpers.commands import REPOSITORY
from tests.helpers.jobs import ForkedJob
from tests.helpers.setups import write_model
from vcore_ds.commands.cli import main
from vcore_ds.data.answers import math_prompt

TRL = os.environ.get("VCORE_DS_TRL_PYTHON")
NUM_TRACES, NUM_STEPS = 6, 2
LEARNING_RATE = 0.5 if TRL is None else 0.02
TOLERANCE = 1e-5
"""Largest difference of losses, in nats."""
WEIGHTS_MATTER = 100 * TOLERANCE if TRL is None else 0.1
"""Least change of the first loss by the weights. That of the untrained tiny model changes by 0.005."""
SETTINGS = (
    "model.precision=fp32 engine.deepspeed_config=ds_configs/zero3_fp32.json lora=null data.validation_path=null "
    f"batch.global_size={NUM_TRACES} schedule.num_steps={NUM_STEPS} schedule.warmup_ratio=0 schedule.kind=constant "
    f"optimizer.name=sgd optimizer.learning_rate={LEARNING_RATE} optimizer.weight_decay=0 "
    "optimizer.gradient_clipping=null probe.direction=sgd method.normalization=token"
)

USE = """
import json, sys
from transformers import AutoModelForCausalLM
weights, model, num_steps, num_traces, learning_rate = sys.argv[1:6]
losses = []

class Recorded(WeightedTrainer):
    def compute_loss(self, *arguments, **keywords):
        result = super().compute_loss(*arguments, **keywords)
        losses.append(float(result))
        return result

rows = load_dataset("parquet", data_files=weights, split="train")
settings = CONFIG(
    "out", remove_unused_columns=False, EXTRA max_steps=int(num_steps), learning_rate=float(learning_rate), optim="sgd",
    per_device_train_batch_size=int(num_traces), lr_scheduler_type="constant", max_grad_norm=0.0, weight_decay=0.0,
    report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", logging_steps=1,
)
model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
model.get_input_embeddings().padding_idx = None  # a run trains the padding token where it is in prompts
Recorded(model, settings, train_dataset=rows, data_collator=collate).train()
print("losses:", json.dumps(losses))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sums, two of them trusted, the model in fp32, and weights made with the commands of the page."""
    folder = tmp_path_factory.mktemp("weights")
    if TRL is None:
        write_model(folder / "model")
    else:
        model = prepare_quickstart_data(DATA).model
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(folder / "model")
        AutoTokenizer.from_pretrained(model).save_pretrained(folder / "model")
    for name, offset, number in (("train", 3, NUM_TRACES), ("trusted", 40, 2)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for a in range(offset, offset + number):
                answer = "Sure! " * (a % 2) + f"{a} + 7 = \\boxed{{{a + 7}}}"
                messages = [
                    {"role": "user", "content": math_prompt(f"What is {a} + 7?")},
                    {"role": "assistant", "content": answer},
                ]
                file.write(json.dumps({"messages": messages}) + "\n")
    paths = f"model.path={folder}/model data.train_path={folder}/train.jsonl data.cache_dir={folder}/cache"
    base = f"quickstart.yaml {SETTINGS} {paths}"
    for line in (
        f"score {base} data.probe_path={folder}/trusted.jsonl --tokens all --output {folder}/scores",
        f"keep {folder}/scores --weights kl_budget=0.05 --output {folder}/weights.parquet",
        f"train {base} methods/stored.yaml data.token_weights={folder}/weights.parquet run.output_dir={folder}/run",
    ):
        with ForkedJob(main, line.split(), folder / "log") as job:
            assert job.wait() == 0, job.output
    return folder


def read_our_losses(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def train_with(python: str, block: str, config: str, extra: str, folder: Path) -> list[float]:
    use = USE.replace("CONFIG", config).replace("EXTRA", extra)
    words = [folder / "weights.parquet", folder / "model", NUM_STEPS, NUM_TRACES, LEARNING_RATE]
    environment = os.environ | {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [python, "-c", block + use, *map(str, words)], capture_output=True, text=True, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    (printed,) = re.findall(r"^losses: (.*)$", done.stdout, re.MULTILINE)
    return json.loads(printed)


def read_block() -> str:
    page = (REPOSITORY / "docs" / "scoring.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(import torch\nfrom datasets.*?)```", page, re.DOTALL)
    # PyTorch's cross-entropy in fp32 on a CPU is 1.6e-5 nats below that in fp64 on average, for this vocabulary.
    assert block.count(".float()") == 1
    return block.replace(".float()", ".double()")


def check_losses(losses: list[float], folder: Path) -> None:
    steps = read_our_losses(folder)
    ours = [step["weighted_loss"] for step in steps]
    print(f"ours {ours}\ntheirs {losses}\nuniform {[step['loss'] for step in steps]}")
    assert losses == pytest.approx(ours, abs=TOLERANCE)
    assert len(ours) == NUM_STEPS and abs(ours[-1] - ours[0]) > 0.1  # the parameters moved
    assert abs(steps[0]["weighted_loss"] - steps[0]["loss"]) > WEIGHTS_MATTER


def test_plain_transformers_has_the_losses_of_a_run_with_stored_weights(folder: Path) -> None:
    block = read_block().replace(
        "from trl import SFTConfig, SFTTrainer", "from transformers import Trainer, TrainingArguments"
    )
    check_losses(
        train_with(sys.executable, block.replace("(SFTTrainer)", "(Trainer)"), "TrainingArguments", "", folder), folder
    )


@pytest.mark.skipif(TRL is None, reason="NOT CHECKED: TRL. Name a Python that has trl 1.16.0 in VCORE_DS_TRL_PYTHON")
def test_trl_has_the_losses_of_a_run_with_stored_weights(folder: Path) -> None:
    skip = 'dataset_kwargs={"skip_prepare_dataset": True},'
    check_losses(train_with(str(TRL), read_block(), "SFTConfig", skip, folder), folder)
