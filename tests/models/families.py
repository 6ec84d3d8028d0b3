"""A tiny random model of every decoder that transformers has, made from the default configuration of its type.

Fields with sizes are recognised by their names, so that architectures that transformers adds need no line here;
`CHANGES` has the exceptions. Layers of every kind are kept, and every kind of parameter affects the output: weights are
wide, norms are not 1, biases and attention sinks are not 0, and factors that are 1 by default are not.
"""

import math
import re
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vcore_ds.models.description import VISION_LANGUAGE

VOCABULARY = 128
FIRST_TOKEN, END_TOKEN = 10, 110
"""Text tokens lie from the first of these to below the second; image tokens and the like come after them."""

START, END, PADDING = 1, 2, 5
"""Special tokens. As in many chat models the padding token, whose gradient PyTorch drops by `padding_idx`, starts
prompts and ends answers."""

NUM_LAYERS = 4

_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_per_layer_input)?|unpadded_vocab_size|n_vocab", VOCABULARY),
    (r"hidden_size|n_embd|d_model|embedding_size|word_embed_proj_dim|lru_width|embedding_dim|emb_dim", 32),
    (r"intermediate_size|n_inner|ffn_dim|d_ff|(de|en)coder_ffn_dim|ffn_hidden_size|dff|dim_ff", 48),
    (r"intermediate_size_mlp", 48),
    (r"dense_intermediate_size|mlp_dim|attention_hidden_size", 32),
    (r"(swa_|encoder_|decoder_)?(num_)?attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads", 4),
    (r"(swa_)?num_key_value_heads|num_kv_heads|kv_n_heads", 2),
    (r"qk_head_dim", 16),
    (r".*head_dim|kv_channels|dim_head|d_head|linear_head_dim|attention_head_dim", 8),
    (r"n_groups|mamba_n_?groups|linear_num_heads|num_query_groups", 2),
    (r"(kv|q|o)_lora_rank|hc_lowrank", 16),
    (r"(num|n|n_routed|num_local|moe_num)_experts", 8),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k", 2),
    (r"(n|num)_(expert_)?group|topk_group", 2),
    (r"(moe|shared|shared_experts?|moe_shared_expert|expert_ffn)_(intermediate|hidden)_size", 16),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"(attention_)?chunk_size|.*_chunk_size|sliding_window(_size)?", 8),
    (r"attention_window_size|window_size|local_attention", 8),
    (r"index_topk|index_block_size", 8),
    (r"index_n_heads", 4),
    (r"(mamba_d|ssm)_state(_size)?|state_size|mamba_d_state", 8),
    (r"linear_num_(key|value)_heads", 4),
    (r"mamba_(n_|num_)heads|n_mamba_heads", 4),
    (r"mamba_(d_head|headdim)", 16),
    (r"mamba_d_ssm", 64),
    (r"(mamba_dt_rank|time_step_rank)", 4),
    (r"rotary_dim", 8),
    (r"hidden_size_per_layer_input|laurel_rank|embed_dim|adapter_rank", 8),
    (r"num_kv_shared_layers", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|model_max_length", 64),
    (r"depth", 2),
)  # fmt: skip
_SIZES = tuple((rf"^(?:{pattern})$", value) for pattern, value in _SIZES)  # type: ignore[assignment]

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")

_EXPERTS = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
_CONVOLUTIONS = ["conv", "full_attention", "conv", "full_attention"]
_RECURRENCES = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, "factor": 4.0,
             "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}  # fmt: skip
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_ALTERNATE = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
_QWEN4 = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
          "indexer_compress_ratio": 2, "ple_layer_ids": [1], "ple_embed_dim": 32, "ngram_vocab_size_base": 64,
          "split_ngram_parts": 1, "eos_token_id": 2, "make_ngram_vocab_size_divisible_by": 8}  # fmt: skip
_SHARED = ["linear_attention", "linear_attention", "hybrid", "hybrid"]

CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32},
    },
    "deepseek_v2": {**_EXPERTS, "n_group": 1, "topk_group": 1},
    "dots1": _EXPERTS,
    "dots3_note": {
        "text_config": {"head_dim": 16},
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": {"head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 32},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoehybrid": {**_GRANITE, "layer_types": _RECURRENCES},
    "granitemoeshared": _GRANITE,
    "hrm_text": {"num_layers_per_stack": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 8, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 4, 4, 4]},
    "lfm2": {"layer_types": _CONVOLUTIONS, "full_attn_idxs": ...},
    "lfm2_moe": {"layer_types": _CONVOLUTIONS},
    "mamba2": {"head_dim": 16},
    "minicpm3": {"dim_model_base": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_topk_blocks": 1,
        "index_block_size": 4,
    },
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen2_5_vl": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 2]}}},
    "qwen3_vl_moe": {"text_config": {"moe_intermediate_size": 24}},  # matrices of experts are not square
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16, "layers_block_type": _SHARED},
    "zamba2": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "hybrid_layer_ids": [2, 3],
        "layers_block_type": _SHARED,
    },
    "rwkv": {"rescale_every": 2},
    "xlstm": {"num_blocks": 4},
    "xmod": {"default_language": "en_XX"},
}
"""Changes by model type, after the rules; `...` leaves a field out."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3, longrope (Phi-4-mini)": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16}),
    "gemma4_text, experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16},
    ),
    "gemma4_text, shared keys": ("gemma4_text", {"num_kv_shared_layers": 2, "layer_types": _ALTERNATE}),
    "gemma4_text, capped logits": ("gemma4_text", {"final_logit_softcapping": 3.0}),
    "llama, dynamic rope": ("llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 16}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": {**_DYNAMIC, "rope_type": "yarn"}}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
}
"""More models of a type: name -> (model type, changes)."""

TIES = {", tied": True, ", untied": False}
"""Any other name may end in one of these, which sets `tie_word_embeddings`."""


def list_model_types() -> list[str]:
    """List the types of all causal language models in transformers and of the supported vision-language models."""
    return list(dict.fromkeys([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION_LANGUAGE]))


def find_auto_class(config: PretrainedConfig) -> type:
    """Class with which transformers loads such a checkpoint."""
    is_vision_language = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if is_vision_language else AutoModelForCausalLM


def make_tiny_config(name: str) -> PretrainedConfig:
    """Make the configuration of a tiny model, of a type or of `VARIANTS`. Raises the architecture's errors."""
    tie = "" if name in VARIANTS else next((suffix for suffix in TIES if name.endswith(suffix)), "")
    name = name.removesuffix(tie)
    model_type, changes = VARIANTS.get(name, (name, {}))
    config_class = CONFIG_MAPPING[model_type]
    shrunk = _merge(_merge(_shrink(config_class().to_dict()), CHANGES.get(model_type, {})), changes)
    config = config_class.from_dict({key: value for key, value in shrunk.items() if value is not ...})
    for part in (config, config.get_text_config()):
        part.bos_token_id, part.eos_token_id, part.pad_token_id = START, END, PADDING
        if tie:
            part.tie_word_embeddings = TIES[tie]
    return config


def make_tiny_model(config: PretrainedConfig, seed: int = 0) -> torch.nn.Module:
    """Make a model in fp32 with random parameters."""
    torch.manual_seed(seed)
    model = find_auto_class(config).from_config(config, dtype=torch.float32)
    _randomize(model)
    return model


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merge(base[key], changes[key]) for key in base.keys() & changes.keys()
            if isinstance(base[key], dict) and isinstance(changes[key], dict)}  # fmt: skip
    return {**base, **changes, **both}


def _shrink(config: dict[str, Any]) -> dict[str, Any]:
    """Replace the sizes in a configuration and its sections with small ones."""
    layers = next((config[name] for name in _LAYER_COUNTS if isinstance(config.get(name), int)), 0)
    kept = _choose_layers(config, layers)
    shrunk = {}
    for key, value in config.items():
        if isinstance(value, dict) and not key.startswith(("rope", "per_layer")):
            value = _shrink(value)
        elif isinstance(value, list) and layers > NUM_LAYERS and len(value) == layers:
            value = [_shrink_number(key, value[index], config) for index in kept]
        elif key == "per_layer_config":
            value = {kept.index(int(n)): _shrink(layer) for n, layer in value.items() if int(n) in kept}
        elif key in _LAYER_COUNTS and isinstance(value, int):
            value = len(kept) if value == layers else NUM_LAYERS
        elif type(value) is int:
            value = _shrink_number(key, value, config)
        elif key == "rms_norm_eps":
            value = 1e-2  # norms of outputs near 0 would magnify rounding, in transformers as well
        elif value == 1.0 and type(value) is float and re.search("multiplier|scaling|_scale$", key):
            value = 1.25
        shrunk[key] = value
    return shrunk


def _choose_layers(config: dict[str, Any], layers: int) -> list[int]:
    """Choose at least one layer of each kind, in their order."""
    lists = [value for value in config.values() if isinstance(value, list) and layers and len(value) == layers]
    lists = [value for value in lists if len(set(map(str, value))) <= NUM_LAYERS]  # not numbers of the layers
    first: dict[Any, int] = {}
    for index, kind in enumerate(zip(*lists, strict=True)):
        first.setdefault(str(kind), index)
    kept = sorted(first.values())
    more = [index for index in range(layers) if index not in kept]
    return sorted([*kept, *more[: max(0, NUM_LAYERS - len(kept))]])


def _shrink_number(key: str, value: Any, config: dict[str, Any]) -> Any:
    if type(value) is not int:
        return value
    if re.search("_token_id$|_token_index$|_index$|_id$", key) and value >= VOCABULARY:
        return END_TOKEN + value % (VOCABULARY - END_TOKEN)
    if key.endswith("num_key_value_heads") and value == config.get("num_attention_heads"):
        return 4
    small = next((size for pattern, size in _SIZES if re.match(pattern, key)), value)
    return min(small, value) if value > 0 else value


@torch.no_grad()
def _randomize(model: torch.nn.Module) -> None:
    """Set parameters to random values, large enough for attention, gates and routing to matter."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if name.endswith("A_log"):
            # Slow decay. Where a state is forgotten at once, the output is a product of at most two numbers, of which
            # the next norm keeps the sign: near 0, no precision gets that right.
            parameter.sub_(3.0)
        if id(parameter) in embeddings:
            parameter.normal_(0, 0.5)
        elif parameter.dim() >= 2:
            fan_in = min(parameter.shape[-2:]) if parameter.dim() == 3 else parameter.shape[-1]
            parameter.normal_(0, 0.8 / math.sqrt(fan_in))
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("bias") and buffer.is_floating_point():  # with which some MoE models balance their experts
            buffer.normal_(0, 0.2)
