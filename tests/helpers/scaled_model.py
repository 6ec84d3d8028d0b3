"""A small model with the proportions of a large one, and the recipes with which a plan is checked on it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from tests.helpers.soak import IS_SOAK, soak
from vcore_ds.config.load import SHIPPED_DEEPSPEED_CONFIGS
from vcore_ds.config.schema import Recipe
from vcore_ds.planning.model_shape import ModelShape, layer_parameters

NUM_RANKS = 2

NUM_TOKENS = 1024 if IS_SOAK else 512
"""Tokens of a micro-batch on each rank."""

DENSE_MODEL, MOE_MODEL, DEEPSPEED_JSON = "model", "moe_model", "deepspeed.json"

_HEAD_DIM = 16
_NUM_LAYERS = 4
_VOCABULARY_SIZE = 512

_SIZES = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)
"""Keys of the DeepSpeed JSON whose values are numbers of elements."""


@dataclass(frozen=True)
class Case:
    """Configuration of a run of the small model."""

    name: str
    lora: bool = False
    checkpoints: bool = False
    packed: bool = False
    sequence_parallel: int = 1
    model: str = DENSE_MODEL
    """Folder of the model."""
    expert: int = 1
    """Expert-parallel size."""
    rank: int | None = None
    """Rank of the direction's factors; None for a full-rank direction."""

    @property
    def lengths(self) -> list[int]:
        """Lengths of the main batch's sequences: two micro-steps of `NUM_TOKENS` on each rank."""
        if self.packed:
            return [NUM_TOKENS // 4] * 16
        return [NUM_TOKENS * self.sequence_parallel] * (2 * NUM_RANKS // self.sequence_parallel)


CASES = (
    Case("full"),
    Case("packed", checkpoints=True, packed=True),
    Case("k = 2", checkpoints=True, sequence_parallel=2),
    Case("experts / 2", checkpoints=True, model=MOE_MODEL, expert=2),
    Case("rank 8", rank=8),
    *soak(
        {
            "checkpoints": Case("checkpoints", checkpoints=True),
            "lora": Case("lora", lora=True),
            "experts": Case("experts", checkpoints=True, model=MOE_MODEL),
        }
    ).values(),
)


def scaled_shape(shape: ModelShape) -> ModelShape:
    """Shape of a model with four narrow layers and the proportions of `shape`: ratio of heads to key/value heads, of
    MLP and heads to the hidden size; tied embeddings and normalized heads as there."""
    ratio = shape.num_heads // shape.num_kv_heads
    heads = ratio * max(1, math.ceil(8 / ratio))
    heads += heads % 2 * ratio  # even, so that two ranks can share a sequence
    hidden = 8 * max(1, round(heads * _HEAD_DIM * shape.hidden_size / (shape.num_heads * shape.head_dim) / 8))
    width = 8 * max(1, round(hidden * shape.intermediate_size / shape.hidden_size / 8))
    kv_heads = heads // ratio
    return ModelShape(
        _NUM_LAYERS,
        heads,
        kv_heads,
        _HEAD_DIM,
        layer_parameters(hidden, heads, kv_heads, _HEAD_DIM, width),
        hidden_size=hidden,
        intermediate_size=width,
        vocabulary_size=_VOCABULARY_SIZE,
        is_tied=shape.is_tied,
        normalizes_heads=shape.normalizes_heads,
    )


def make_config(shape: ModelShape, kind: type[PretrainedConfig], **more: Any) -> PretrainedConfig:
    """The configuration of a model of this shape."""
    return kind(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocabulary_size,
        tie_word_embeddings=shape.is_tied,
        **more,
    )


def write_scaled_model(large: ModelShape, folder: Path) -> None:
    """Write the small model with random weights (a Qwen3, or a Llama if heads are not normalized), an MoE model, and
    the shipped DeepSpeed JSON for large models, with sizes scaled down as the layers are."""
    small = scaled_shape(large)
    config = make_config(
        small, Qwen3Config if small.normalizes_heads else LlamaConfig, max_position_embeddings=8 * NUM_TOKENS
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / DENSE_MODEL)
    moe_config = Qwen3MoeConfig(
        num_hidden_layers=_NUM_LAYERS,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=_HEAD_DIM,
        moe_intermediate_size=48,
        num_experts=16,
        num_experts_per_tok=4,
        vocab_size=_VOCABULARY_SIZE,
        max_position_embeddings=8 * NUM_TOKENS,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(moe_config).save_pretrained(folder / MOE_MODEL)
    deepspeed = json.loads((SHIPPED_DEEPSPEED_CONFIGS / "zero3_bf16_large.json").read_text(encoding="utf-8"))
    zero = deepspeed["zero_optimization"]
    for key in _SIZES:
        zero[key] = max(1, round(zero[key] * small.layer_parameters / large.layer_parameters))
    (folder / DEEPSPEED_JSON).write_text(json.dumps(deepspeed), encoding="utf-8")


def make_recipe(case: Case, folder: Path) -> Recipe:
    """A recipe of VCORE by JVP in bf16, with a probe batch half as large as the main one, on the files of
    `write_scaled_model`."""
    sections: dict[str, dict[str, Any] | None] = {
        "method": {"kl_budget": 0.005},
        "model": {"path": str(folder / case.model), "gradient_checkpointing": case.checkpoints},
        "parallel": {"expert": case.expert},
        "lora": {"rank": 4, "alpha": 8} if case.lora else None,
        "data": {"train_path": "none", "cutoff_length": max(case.lengths)},
        "batch": {
            "global_size": len(case.lengths),
            "micro_batch_size_per_rank": 1,
            "pack_tokens_per_rank": NUM_TOKENS if case.packed else None,
            "sequence_parallel": case.sequence_parallel,
        },
        "probe": {"batch_size": len(case.lengths) // 2, "sequence_parallel": case.sequence_parallel, "rank": case.rank},
        "optimizer": {"learning_rate": 1e-5},
        "schedule": {"num_steps": 1},
        "run": {"output_dir": "none"},
        "engine": {"deepspeed_config": str(folder / DEEPSPEED_JSON), "coalesce_gradient_reduction": False},
    }
    return Recipe.model_validate(sections)
