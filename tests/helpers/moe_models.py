"""Tiny random MoE models of many architectures, in folders with the tensor names and files of models on the hub."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.helpers import tiny
from tests.helpers.tokenizer import make_tokenizer

_SIZES = dict(
    vocab_size=259, num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
_MLA = dict(kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_key_value_heads=4)
_SHARED = dict(n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1)
MOE_CONFIGS = {
    "qwen3_moe": dict(num_experts=4, mlp_only_layers=[]),
    "deepseek_v3": dict(_MLA, **_SHARED, q_lora_rank=8, num_nextn_predict_layers=1),
    "glm4_moe": _SHARED,
    "mixtral": dict(num_local_experts=4),
    "gpt_oss": dict(num_local_experts=4),
    "kimi_linear": dict(
        _MLA, num_experts=4, num_experts_per_token=2, num_shared_experts=1, first_k_dense_replace=1,
        linear_attn_config=dict(
            head_dim=8, num_heads=4, short_conv_kernel_size=4, kda_layers=[1], full_attn_layers=[2]
        ),
    ),
    "nemotron_h": dict(
        n_routed_experts=4, n_group=1, topk_group=1, moe_shared_expert_intermediate_size=16,
        layers_block_type=["mamba", "moe", "attention"], num_hidden_layers=3, mamba_num_heads=4, mamba_head_dim=8,
        ssm_state_size=8, n_groups=2, chunk_size=16,
    ),
}  # fmt: skip
"""Model type -> fields of its configuration."""


def moe_model(name: str, dtype: torch.dtype = torch.float32, **changes: int) -> PreTrainedModel:
    return tiny.moe_model(name, dtype=dtype, **{**_SIZES, **MOE_CONFIGS[name], **changes})


def write_moe_model(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """Write a model folder as on the hub: router biases in fp32, the multi-token prediction layer if the configuration
    has one, and the hub's name for Kimi-Linear's dense MLP, all of which transformers would not write."""
    moe_model(name, dtype).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    if name == "kimi_linear":
        weights = {key.replace("layers.0.block_sparse_moe", "layers.0.mlp"): value for key, value in weights.items()}
    for key in weights:
        if "correction_bias" in key:
            weights[key] = torch.randn(weights[key].shape)
    if MOE_CONFIGS[name].get("num_nextn_predict_layers"):
        further = torch.arange(64, dtype=dtype)
        for expert in range(4):
            weights[f"model.layers.2.mlp.experts.{expert}.up_proj.weight"] = further.view(16, 4) + expert
        weights["model.layers.2.eh_proj.weight"] = further.view(4, 16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())
