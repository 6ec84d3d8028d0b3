"""A model small enough for every command line here: two layers, byte-level tokenizer, a dozen conversations."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers import tiny

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@dataclass(frozen=True)
class TinySetup:
    """Model folders and data files, and how a recipe is pointed at them."""

    untied: Path
    tied: Path
    train: Path
    validation: Path
    cache: Path

    def overrides(
        self, output_dir: Path, *changes: str, model: Path | None = None, precision: str = "fp32"
    ) -> list[str]:
        """Of any of the shipped recipes; `changes` come last."""
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
            "batch.packed_row_tokens=null",
            "probe.batch_size=2",
            "optimizer.learning_rate=0.01",
            "schedule.num_steps=2",
            f"run.output_dir={output_dir}",
            *changes,
        ]


def make_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a byte."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=chat_template
    )


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


def sums(numbers: Sequence[int]) -> list[tuple[str, str]]:
    """Questions and answers, no two of the same length."""
    return [(f"what is {n} plus {n}?", f"{n} and {n} " * (1 + n % 5) + f"is {2 * n}.") for n in numbers]
