"""The fixture of `peers.py`: a Qwen3 of 10.5M parameters and 512 synthetic traces, on disk where other trainers can
read them.

Imports nothing of the package, so that another trainer's environment can import it too.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

SIZES = dict(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=1104,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
NUM_TRACES, LONGEST, BATCH_SIZE, PROBE_SIZE, LEARNING_RATE = 512, 1024, 32, 4, 1e-4
MODEL, TRACES = "model", "traces.json"


def draw_lengths() -> list[int]:
    """Tokens of the traces: long-tailed, median 300, cut at 1,024."""
    generator = torch.Generator().manual_seed(0)
    drawn = 300 * torch.exp(0.7 * torch.randn(NUM_TRACES, generator=generator))
    return drawn.clamp(32, LONGEST).int().tolist()


def count_prompt_tokens(length: int) -> int:
    return length // 5


def draw_token_ids() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in draw_lengths()]


def draw_step_ids(k: int) -> list[int]:
    """Traces of optimizer step k, from 0, the same for every trainer."""
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(NUM_TRACES, generator=generator)
    return [int(order[(k * BATCH_SIZE + i) % NUM_TRACES]) for i in range(BATCH_SIZE)]


def count_targets(ids: list[int]) -> int:
    """Target tokens of some traces."""
    lengths = draw_lengths()
    return sum(lengths[i] - count_prompt_tokens(lengths[i]) for i in ids)


def write(folder: Path) -> None:
    """Write the model with a tokenizer of its vocabulary size, and the traces as rows of {"input_ids", "labels"}."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, tie_word_embeddings=True, use_cache=False, max_position_embeddings=LONGEST)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / MODEL)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SIZES["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0").save_pretrained(
        folder / MODEL
    )
    rows = []
    for ids in draw_token_ids():
        num_prompt = count_prompt_tokens(len(ids))
        rows.append({"input_ids": ids, "labels": [-100] * num_prompt + ids[num_prompt:]})
    (folder / TRACES).write_text(json.dumps(rows))
