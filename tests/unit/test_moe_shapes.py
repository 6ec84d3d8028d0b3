"""Sizes of MoE models: as published, as transformers builds the models, and as a plan uses them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vcore_ds.models.description import read_model
from vcore_ds.planning.known_models import CONFIGS, KNOWN_MODELS, QWEN3_32B, parse_shape, read_shape
from vcore_ds.planning.memory import estimate_memory
from vcore_ds.planning.model_shape import Experts, is_moe, read_experts
from vcore_ds.planning.passes import TimeModel, active_parameters, linear_flops_per_token, parameter_counts
from vcore_ds.planning.settings import MemorySettings, ZeroSettings

OTHERS: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": dict(
        model_type="deepseek_v2", num_hidden_layers=27, hidden_size=2048, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=102400, intermediate_size=10944, first_k_dense_replace=1,
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2,
    ),
    "Qwen3-Next-80B-A3B": dict(
        model_type="qwen3_next", num_hidden_layers=48, hidden_size=2048, num_attention_heads=16,
        num_key_value_heads=2, head_dim=256, vocab_size=151936, intermediate_size=5120, full_attention_interval=4,
        linear_num_key_heads=16, linear_key_head_dim=128, linear_num_value_heads=32, linear_value_head_dim=128,
        num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    ),
    "OLMoE-1B-7B": dict(
        model_type="olmoe", num_hidden_layers=16, hidden_size=2048, num_attention_heads=16, num_key_value_heads=16,
        vocab_size=50304, intermediate_size=1024, num_experts=64, num_experts_per_tok=8,
    ),
    "Llama-4-Scout": dict(
        model_type="llama4_text", num_hidden_layers=48, hidden_size=5120, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128, vocab_size=202048, intermediate_size=8192, intermediate_size_mlp=16384,
        interleave_moe_layer_step=1, num_local_experts=16, num_experts_per_tok=1,
    ),
}  # fmt: skip
OTHERS["Llama-4-Maverick"] = OTHERS["Llama-4-Scout"] | {"interleave_moe_layer_step": 2, "num_local_experts": 128}

PUBLISHED = {
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235.1, 22.2),
    "DeepSeek-V3": (671.0, 37.6),
    "DeepSeek-V2-Lite": (15.7, 2.7),
    "gpt-oss-20b": (20.9, 4.2),  # its authors leave out the input embedding: 3.6
    "gpt-oss-120b": (116.8, 5.7),  # 5.1
    "GLM-4.5": (352.8, 33.6),  # 355 with the layer for multi-token prediction, which is not loaded
    "GLM-4.5-Air": (106.9, 13.4),  # 12.2 without either embedding
    "Mixtral-8x7B": (46.7, 12.9),
    "Qwen3-Next-80B-A3B": (79.7, 3.9),
    "OLMoE-1B-7B": (6.9, 1.3),
    "Llama-4-Scout": (107.8, 17.2),
    "Llama-4-Maverick": (400.7, 17.2),
}
"""Billions of parameters: all, and those that a token goes through, embeddings included."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_moe_models(name: str) -> None:
    """Against the published numbers, and against the model that transformers builds of the same configuration."""
    config = dict((CONFIGS | OTHERS)[name])
    shape = parse_shape(config)
    assert shape is not None and is_moe(config)
    total, active = (count / 1e9 for count in (parameter_counts(shape).all, active_parameters(shape)))
    assert (total, active) == (pytest.approx(PUBLISHED[name][0], abs=0.06), pytest.approx(PUBLISHED[name][1], abs=0.06))
    built = CONFIG_MAPPING[config.pop("model_type")](**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    assert total * 1e9 == pytest.approx(sum(weight.numel() for weight in model.parameters()), rel=5e-4)
    attention = model.model.layers[-1].self_attn
    assert shape.head_dim == (getattr(attention, "qk_head_dim", None) or attention.head_dim)


def test_the_share_of_gated_delta_nets_may_be_another_one() -> None:
    """Of every second layer instead of three of four, by hand."""
    config = OTHERS["Qwen3-Next-80B-A3B"]
    usual, half = (parse_shape(config | {"full_attention_interval": interval}) for interval in (4, 2))
    attention = 2048 * 256 * (3 * 16 + 2 * 2)  # queries, their gates, outputs; keys and values
    delta_net = 2048 * (2 * 16 * 128 + 3 * 32 * 128 + 2 * 32)
    assert usual is not None and half is not None
    assert half.layer_parameters - usual.layer_parameters == (attention - delta_net) // 4


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "DeepSeek-V3", "gpt-oss-20b", "Qwen3-Next-80B-A3B"])
def test_config_json_and_transformers_give_the_same_shape(name: str, tmp_path: Path) -> None:
    config = dict((CONFIGS | OTHERS)[name])
    expected = parse_shape(config)
    CONFIG_MAPPING[config.pop("model_type")](**config).save_pretrained(tmp_path)
    # What packs need is read from fields that transformers adds, as are positions.
    added = dict(no_sequence_parallelism=None, unpackable=None, max_positions=None)
    for shape in (read_model(str(tmp_path)).shape, read_shape(str(tmp_path))):
        assert shape is not None and expected is not None and replace(shape, **added) == replace(expected, **added)


NO_EXPERTS_BY_DEFAULT = {"bamba", "dots1", "gemma4", "gemma4_text", "hunyuan_v1_moe", "doge"}
"""Architectures with experts whose default configuration has none (`bamba` has none at all)."""


def test_every_architecture_with_experts_is_recognized() -> None:
    """An MoE model that is not recognized would be sized as dense and allowed finite differences."""
    models, unknown = Path(transformers.__file__).parent / "models", set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        source = models / model_type_to_module_name(kind)
        has_experts = any("expert" in file.read_text().lower() for file in source.glob("modeling_*.py"))
        if has_experts and not is_moe(CONFIG_MAPPING[kind]().get_text_config().to_dict()):
            unknown.add(kind)
    assert unknown == NO_EXPERTS_BY_DEFAULT


_EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)


@pytest.mark.parametrize(
    "config, expected",
    [
        (_EXPERTS, Experts(12, 8, 2, 16)),
        (_EXPERTS | {"decoder_sparse_step": 2}, Experts(6, 8, 2, 16)),
        (_EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, Experts(5, 8, 2, 16)),
        (_EXPERTS | {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 9}, Experts(9, 8, 2, 16)),
        (_EXPERTS | {"first_k_dense_replace": 3, "n_shared_experts": 2}, Experts(9, 8, 2, 16, 32)),
        (_EXPERTS | {"moe_layer_freq": [0] + [1] * 11}, Experts(11, 8, 2, 16)),
        (_EXPERTS | {"shared_expert_intermediate_size": 48}, Experts(12, 8, 2, 16, 48)),
        (_EXPERTS | {"enable_moe_block": True, "intermediate_size": 64}, Experts(12, 8, 2, 16, 64)),
        ({"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 32}, Experts(12, 4, 1, 32)),
        (dict(moe_num_experts=4, moe_k=2, intermediate_size=32, moe_layer_start_index=1), Experts(11, 4, 2, 32)),
        (dict(num_experts=16, num_experts_per_tok=2, intermediate_size=32, expert_layer_period=2,
              expert_layer_offset=1), Experts(6, 16, 2, 32)),
        ({"num_experts": [4, 8], "moe_topk": [2, 2], "moe_intermediate_size": 16}, Experts(12, 8, 2, 16)),
        (_EXPERTS | {"num_dense_layers": 2}, Experts(10, 8, 2, 16)),
        (_EXPERTS | {"interleave_moe_layer_step": 5}, Experts(2, 8, 2, 16)),  # the fifth layer and the tenth
        (_EXPERTS | {"moe_layer_interval": 7}, Experts(1, 8, 2, 16)),
        (_EXPERTS | {"expert_layer_period": 5, "expert_layer_offset": 3}, Experts(2, 8, 2, 16)),
        (_EXPERTS | {"expert_layer_period": 5}, Experts(3, 8, 2, 16)),
        (_EXPERTS | {"mlp_layer_types": ["dense"] * 3}, Experts(12, 8, 2, 16)),  # of another number of layers
        (_EXPERTS | {"num_experts_per_tok": 9}, Experts(12, 8, 8, 16)),
        # Zero, a boolean and a number that cannot be meant are none.
        ({"num_experts": 4, "moe_intermediate_size": 0, "intermediate_size": 32}, Experts(12, 4, 1, 32)),
        ({"num_experts": 4, "moe_intermediate_size": True, "intermediate_size": 32}, Experts(12, 4, 1, 32)),
        ({"num_experts": 4, "moe_intermediate_size": 2**31, "intermediate_size": 32}, Experts(12, 4, 1, 32)),
        ({"num_experts": "many", "intermediate_size": 32}, None),
        ({"intermediate_size": 32}, None),
        ({"num_local_experts": 0, "intermediate_size": 32}, None),  # Granite 4 without experts
        ({"num_experts": 1, "moe_topk": 1, "intermediate_size": 32}, None),  # Hunyuan's
        ({"num_experts": None, "intermediate_size": 32}, None),
        (_EXPERTS | {"enable_moe_block": False}, None),
    ],
)  # fmt: skip
def test_experts_are_read_from_configurations(config: dict[str, Any], expected: Experts | None) -> None:
    assert read_experts(config, 12) == expected
    assert is_moe(config) == (expected is not None)


def test_a_tensor_parallel_shard_has_a_part_of_each_expert() -> None:
    moe = KNOWN_MODELS["GLM-4.5"]
    assert moe.experts is not None and moe.experts.shared_width > 0
    part = moe.take_tensor_shard(4)
    assert part.experts == replace(
        moe.experts, width=moe.experts.width // 4, shared_width=moe.experts.shared_width // 4
    )
    assert moe.take_tensor_shard(16).num_kv_heads == 1  # of eight, which two ranks each share


def test_time_counts_active_parameters_and_memory_all_of_them() -> None:
    shape = KNOWN_MODELS["Qwen3-30B-A3B"]
    counts = parameter_counts(shape)
    embedding = 151936 * 2048
    assert linear_flops_per_token(shape) == pytest.approx(2 * (active_parameters(shape) - embedding), rel=1e-3)
    active = shape.num_layers * shape.layer_parameters
    assert TimeModel(shape, 8, 8).read == pytest.approx(300 * (counts.all - 2 * embedding) / active, rel=1e-3)
    others = counts.all - 2 * embedding - 48 * 128 * 3 * 2048 * 768 * 7 / 8  # held and read elsewhere
    assert TimeModel(shape, 8, 8, expert=8).read == pytest.approx(300 * others / active, rel=1e-3)
    # 400 TFLOP/s, 360 GB/s: what a token's linear layers take while 7/8 of the weights arrive, and while all are read.
    assert TimeModel(QWEN3_32B, 8, 8).micro_step == pytest.approx(400e12 * 7 / 8 / 360e9 + 300)
    # A micro-step gathers everything: nine times as many bytes for each FLOP of a token as in a dense model.
    dense = replace(shape, experts=None)
    ratio = TimeModel(shape, 8, 8).micro_step / TimeModel(dense, 8, 8).micro_step
    assert ratio == pytest.approx((counts.all - 2 * embedding) / (active_parameters(shape) - 2 * embedding), rel=0.01)
    estimate = estimate_memory(
        shape, MemorySettings(num_ranks=8, main_tokens=1024, zero=ZeroSettings(max_live_parameters=0))
    )
    layer = (counts.all - 2 * embedding) / 48
    assert estimate.persistent["parameters"] == 2 * -(-counts.all // 8)
    assert estimate.phases["main"]["gathered parameters"] == pytest.approx(2 * 3 * layer, rel=0.01)


def test_the_largest_layer_is_an_moe_layer() -> None:
    shape = KNOWN_MODELS["DeepSeek-V3"]
    settings = MemorySettings(num_ranks=64, main_tokens=64, zero=ZeroSettings(max_live_parameters=0))
    experts = 3 * 7168 * (256 * 2048 + 2048) + 256 * 7168
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    gathered = estimate_memory(shape, settings).phases["main"]["gathered parameters"]
    assert gathered == pytest.approx(2 * 3 * (experts + attention), rel=1e-3)
