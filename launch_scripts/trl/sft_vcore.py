"""Supervised fine-tuning with VCORE in TRL (1.16): token weights along AdamW's direction on trusted traces.

accelerate launch --num_processes 8 launch_scripts/trl/sft_vcore.py --model_name_or_path Qwen/Qwen3-1.7B \
    --train train.jsonl --trusted trusted.jsonl --output_dir runs/trl --learning_rate 1e-5

A line of the files has `prompt` and `completion`, both text or both messages. Every option of TRL's SFTConfig can be
added, such as --gradient_accumulation_steps 8; sequences stay unpacked. With --deepspeed FILE, a JSON file with ZeRO
stage 3 and without an optimizer, DeepSpeed shards the model.
"""

from dataclasses import dataclass
from typing import Any

from datasets import load_dataset
from torch import Tensor, nn
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config

import vcore_ds


class VcoreTrainer(SFTTrainer):
    """SFTTrainer with the weighted loss; the trusted traces are its evaluation set."""

    loss_is_scaled_for_ga = False  # a mean over the batch, which the Trainer divides by the accumulation steps
    vcore: vcore_ds.VcoreLoss | None = None
    kl_budget = 0.005

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.vcore is None:
            # This process's part of the trusted traces; the Trainer's loader would repeat some to fill all batches.
            traces: Any = self.eval_dataset
            part = [traces[i] for i in range(self.args.process_index, len(traces), self.args.world_size)]
            size = self.args.per_device_eval_batch_size
            batches = [self.data_collator(part[i : i + size]) for i in range(0, len(part), size)]
            self.vcore = vcore_ds.VcoreLoss(batches, kl_budget=self.kl_budget)
        return self.vcore(model, inputs, self.optimizer)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.vcore is not None and "loss" in logs:
            logs |= {"uniform_loss": float(self.vcore.uniform_loss), "alpha": float(self.vcore.alpha)}
        super().log(logs, start_time)


@dataclass
class DataArguments:
    """The files, and the budget of the weights."""

    train: str
    trusted: str
    kl_budget: float = 0.005


def main() -> None:
    """Train, and write the result to --output_dir."""
    parser = TrlParser((DataArguments, SFTConfig, ModelConfig))
    data, config, model = parser.parse_args_and_config()
    files = load_dataset("json", data_files={"train": data.train, "trusted": data.trusted})
    VcoreTrainer.kl_budget = data.kl_budget
    trainer = VcoreTrainer(
        model=model.model_name_or_path,
        args=config,
        train_dataset=files["train"],
        eval_dataset=files["trusted"],
        peft_config=get_peft_config(model),
    )
    vcore_ds.prepare_zero3(trainer.model)  # without --deepspeed it changes no result
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
