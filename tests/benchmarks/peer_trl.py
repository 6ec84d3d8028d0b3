"""One rank of TRL's SFTTrainer on the fixture of `peers.py`, at its best settings. Imports nothing else of the package.

RANK=.. WORLD_SIZE=.. python -m tests.benchmarks.peer_trl FOLDER STEPS OUTPUT
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from tests.benchmarks import peer_fixture

ZERO3 = {
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": True,
        "reduce_bucket_size": 50_000_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 100_000,
    },
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}
MICRO_BATCH_SIZE = 4
"""Sequences of a micro-batch, of about equal length."""


class Clock(TrainerCallback):
    """CPU and wall seconds of the steps after the first."""

    def __init__(self) -> None:
        self.started = (0.0, 0.0)
        self.seconds = (0.0, 0.0)

    def on_step_end(self, args, state, control, **kwargs):
        now = time.process_time(), time.perf_counter()
        if state.global_step == 1:
            self.started = now
        self.seconds = (now[0] - self.started[0], now[1] - self.started[1])


def sort_traces(folder: Path, num_steps: int) -> list[dict[str, list[int]]]:
    """The traces in the order in which two ranks draw them: those of a step sorted by length, `MICRO_BATCH_SIZE` to
    each rank."""
    rows = json.loads((folder / peer_fixture.TRACES).read_text())
    traces = []
    for k in range(num_steps):
        traces += sorted((rows[i] for i in peer_fixture.draw_step_ids(k)), key=lambda row: -len(row["input_ids"]))
    return traces


def main() -> None:
    folder, num_steps, output = Path(sys.argv[1]), int(sys.argv[2]) + 1, Path(sys.argv[3])
    clock = Clock()
    trainer = SFTTrainer(
        str(folder / peer_fixture.MODEL),
        SFTConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=MICRO_BATCH_SIZE,
            gradient_accumulation_steps=peer_fixture.BATCH_SIZE // MICRO_BATCH_SIZE // 2,
            max_steps=num_steps,
            max_length=peer_fixture.LONGEST,
            learning_rate=peer_fixture.LEARNING_RATE,
            train_sampling_strategy="sequential",
            bf16=True,
            use_cpu=True,
            ddp_backend="gloo",
            deepspeed=ZERO3,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": torch.bfloat16},
            optim="adamw_torch_fused",
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(sort_traces(folder, num_steps)),
        processing_class=AutoTokenizer.from_pretrained(folder / peer_fixture.MODEL),
        callbacks=[clock],
    )
    trainer.train()
    output.write_text(json.dumps(clock.seconds))


if __name__ == "__main__":
    main()
