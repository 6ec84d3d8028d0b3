"""The trained weights as a Hugging Face folder, gathered tensor by tensor."""

import json
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from . import distributed
from .zero3 import Engine

MAX_FILE_BYTES = 5 * 10**9
PREFIX = "causal_lm."


def save_hugging_face(engine: Engine, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the adapter (LoRA) or the full weights, with configuration and tokenizer; `peft` / `transformers` load it.

    All ranks must call it: gathering is a collective. Rank 0 writes, holding one file's worth of weights at a time.
    """
    is_writer = distributed.rank() == 0
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
    model = engine.module.causal_lm
    if isinstance(model, PeftModel):
        adapter = dict(_gathered(engine, trainable_only=True))
        if is_writer:
            model.save_pretrained(folder, state_dict=adapter)
    else:
        _write_sharded(_gathered(engine, trainable_only=False), folder, is_writer)
        if is_writer:
            model.config.save_pretrained(folder)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(folder)
    torch.distributed.barrier()


def _gathered(engine: Engine, trainable_only: bool) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of each parameter (a tied one once), on the CPU of rank 0; empty tensors on the others."""
    for name, parameter in engine.module.named_parameters():
        if trainable_only and not parameter.requires_grad:
            continue
        with deepspeed.zero.GatheredParameters([parameter]):
            whole = parameter.detach().cpu().clone() if distributed.rank() == 0 else torch.empty(0)
        yield name.removeprefix(PREFIX), whole


def _write_sharded(tensors: Iterator[tuple[str, Tensor]], folder: Path, is_writer: bool) -> None:
    files: list[dict[str, Tensor]] = [{}]
    weight_map: dict[str, int] = {}
    num_bytes = total_bytes = 0

    def flush() -> None:
        if is_writer:
            save_file(files[-1], folder / f"part-{len(files):05d}.safetensors", metadata={"format": "pt"})
        files[-1] = {}

    for name, tensor in tensors:  # every rank walks through: each item is a collective
        size = tensor.numel() * tensor.element_size()
        if num_bytes + size > MAX_FILE_BYTES and num_bytes:
            flush()
            files.append({})
            num_bytes = 0
        if is_writer:
            files[-1][name] = tensor
        weight_map[name] = len(files)
        num_bytes += size
        total_bytes += size
    flush()
    if not is_writer:
        return

    def final_name(number: int) -> str:
        return "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"

    for number in range(1, len(files) + 1):
        (folder / f"part-{number:05d}.safetensors").rename(folder / final_name(number))
    if len(files) > 1:
        index = {
            "metadata": {"total_size": total_bytes},
            "weight_map": {name: final_name(number) for name, number in weight_map.items()},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
