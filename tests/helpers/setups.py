"""Files for runs in tests: a two-layer model with its tokenizer, a dozen conversations, DeepSpeed's configuration."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from launch_scripts.quickstart_data import prepare_model
from tests.helpers import tiny
from tests.helpers.commands import REPOSITORY
from tests.helpers.tokenizer import CHATML, make_tokenizer
from vcore_ds.data.tokenization import load_tokenizer


@dataclass(frozen=True)
class TinySetup:
    """Model folders and data files, and the overrides with which a recipe uses them."""

    untied: Path
    tied: Path
    train: Path
    validation: Path
    cache: Path

    def overrides(
        self, output_dir: Path, *changes: str, model: Path | None = None, precision: str = "fp32"
    ) -> list[str]:
        """Overrides for any shipped recipe; `changes` come last."""
        return [
            f"model.path={model or self.untied}",
            f"model.precision={precision}",
            f"engine.deepspeed_config=ds_configs/zero3_{precision}.json",
            f"data.train_path={self.train}",
            f"data.validation_path={self.validation}",
            f"data.cache_dir={self.cache}",
            "data.cutoff_length=256",
            "batch.global_size=4",
            "batch.micro_batch_size_per_rank=1",
            "batch.pack_tokens_per_rank=null",
            "probe.batch_size=2",
            "optimizer.learning_rate=0.01",
            "schedule.num_steps=2",
            f"run.output_dir={output_dir}",
            "run.num_followed_traces=0",
            "run.validate_every=null",
            *changes,
        ]


def write_model(folder: Path, *, tied: bool = False, chat_template: str | None = CHATML) -> Path:
    tokenizer = make_tokenizer(chat_template)
    tiny.qwen3(tied=tied, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_conversations(path: Path, pairs: Sequence[tuple[str, str]]) -> Path:
    rows = (
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in pairs
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_deepspeed_config(
    path: Path,
    *,
    bf16: bool = False,
    persistence_threshold: int = 500,
    offloaded: Sequence[str] = (),
    pin_memory: bool = False,
) -> Path:
    """Write a small ZeRO-3 configuration without the keys that a recipe sets. `offloaded`: sections such as
    `offload_optimizer`, for states that are kept in host memory."""
    config = tiny.deepspeed_config(bf16=bf16, persistence_threshold=persistence_threshold)
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"):
        del config[key]
    config["zero_optimization"] |= {part: {"device": "cpu", "pin_memory": pin_memory} for part in offloaded}
    path.write_text(json.dumps(config))
    return path


def sums(numbers: Sequence[int]) -> list[tuple[str, str]]:
    """Questions and answers of different lengths."""
    return [(f"what is {n} plus {n}?", f"{n} and {n} " * (1 + n % 5) + f"is {2 * n}.") for n in numbers]


def prepare_pretrained_model() -> Path:
    """Download the quickstart's model unless an earlier run of the tests did; returns its folder."""
    return prepare_model(REPOSITORY / "runs" / "quickstart_data")


def write_first_layers(folder: Path, num_layers: int) -> Path:
    """Write the quickstart's model with the first of its 30 layers: real weights and tokens in a fraction of the
    time."""
    full_model = prepare_pretrained_model()
    model = AutoModelForCausalLM.from_pretrained(full_model, num_hidden_layers=num_layers, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    load_tokenizer(str(full_model)).save_pretrained(folder)
    return folder
