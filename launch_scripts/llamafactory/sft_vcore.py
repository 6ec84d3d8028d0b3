"""Supervised fine-tuning with VCORE in LLaMA-Factory (0.9.5), none of whose files change.

DISABLE_VERSION_CHECK=1 torchrun --nproc-per-node 8 launch_scripts/llamafactory/sft_vcore.py sft.yaml

The YAML file is LLaMA-Factory's, with `stage: sft`; `dataset` has the training traces, `eval_dataset` the trusted ones.
With `deepspeed: FILE`, a JSON file with ZeRO stage 3 and without an optimizer, DeepSpeed shards the model. The variable
turns off a check that asks for an older transformers than this project needs. LLaMA-Factory's activation checkpointing
fails with the newer one; `disable_gradient_checkpointing: true` and `gradient_checkpointing: true` use transformers'.
"""

from typing import Any

from llamafactory.train.sft import workflow
from llamafactory.train.tuner import run_exp
from torch import Tensor, nn

import vcore_ds


class VcoreTrainer(workflow.CustomSeq2SeqTrainer):
    """LLaMA-Factory's trainer with the weighted loss; the trusted traces are its evaluation set."""

    loss_is_scaled_for_ga = False  # a mean over the batch, which the Trainer divides by the accumulation steps
    vcore: vcore_ds.VcoreLoss | None = None

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *arguments: Any, **options: Any) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, *arguments, **options)
        if self.vcore is None:
            # This process's part of the trusted traces; the Trainer's loader would repeat some to fill all batches.
            traces: Any = self.eval_dataset
            part = [traces[i] for i in range(self.args.process_index, len(traces), self.args.world_size)]
            size = self.args.per_device_eval_batch_size
            batches = [self.data_collator(part[i : i + size]) for i in range(0, len(part), size)]
            self.vcore = vcore_ds.VcoreLoss(batches, clip=self.args.max_grad_norm)
        return self.vcore(model, inputs, self.optimizer)

    def train(self, *arguments: Any, **options: Any) -> Any:
        vcore_ds.prepare_zero3(self.model)  # without DeepSpeed it changes no result
        return super().train(*arguments, **options)

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        if self.vcore is not None and "loss" in logs:
            logs |= {"uniform_loss": float(self.vcore.uniform_loss), "alpha": float(self.vcore.alpha)}
        super().log(logs, *arguments, **options)


if __name__ == "__main__":
    workflow.CustomSeq2SeqTrainer = VcoreTrainer
    run_exp()
