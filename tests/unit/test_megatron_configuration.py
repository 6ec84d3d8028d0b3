"""megatron-core's configuration of Hugging Face models, the refusals of models without one, the slices of weights that
each rank holds, and norms."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.helpers import tiny
from vcore_ds.common.errors import UserError
from vcore_ds.models.dual_tensors import make_dual
from vcore_ds.models.megatron.model import transformer_config
from vcore_ds.models.megatron.parallel_layers import RMSNorm, sliding_window
from vcore_ds.models.megatron.weight_slices import copy_to_weight, padded_vocabulary, weight_slices
from vcore_ds.models.pointwise import rms_norm

SIZES = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=121,
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("config", "has_head_norms", "has_bias", "head_dim"),
    [
        (Qwen3Config(**SIZES, head_dim=16), True, False, 16),
        (Qwen2Config(**SIZES), False, True, 8),
        (LlamaConfig(**SIZES, rope_parameters=LLAMA3), False, False, 8),
        (MistralConfig(**SIZES), False, False, 8),
    ],
    ids=["qwen3", "qwen2", "llama", "mistral"],
)
def test_dense_architectures_are_configured(config, has_head_norms, has_bias, head_dim):
    made = transformer_config("m", config, tensor=2, dtype=torch.bfloat16)
    assert (made.qk_layernorm, made.add_qkv_bias, made.kv_channels) == (has_head_norms, has_bias, head_dim)
    assert (made.num_query_groups, made.ffn_hidden_size, made.num_layers) == (2, 64, 2)
    assert (made.tensor_model_parallel_size, made.sequence_parallel, made.params_dtype) == (2, True, torch.bfloat16)
    assert made.layernorm_epsilon == config.rms_norm_eps


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (Qwen3MoeConfig(**SIZES, num_experts=8), "qwen3_moe"),
        (Qwen3Config(**SIZES, hidden_act="gelu"), "hidden_act gelu"),
        (LlamaConfig(**SIZES, attention_bias=True), "attention_bias True"),
        (LlamaConfig(**SIZES, rope_parameters=DYNAMIC), "rope_type dynamic"),
    ],
    ids=["architecture", "activation", "bias", "rotary"],
)
def test_other_models_are_refused(config, found):
    with pytest.raises(UserError, match=f"model.provider: found megatron .*{found}"):
        transformer_config("m", config, tensor=2, dtype=torch.float32)


def test_sliding_windows_are_read_for_each_layer():
    mixed = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    assert [sliding_window(mixed, layer) for layer in range(2)] == [None, 7]
    assert sliding_window(MistralConfig(**SIZES, sliding_window=5), 1) == 5
    assert sliding_window(LlamaConfig(**SIZES), 0) is None


def test_the_vocabulary_is_padded_to_equal_shards():
    assert padded_vocabulary(Qwen3Config(**SIZES), 2) == 122
    assert padded_vocabulary(Qwen3Config(**{**SIZES, "vocab_size": 128}), 4) == 128


@pytest.fixture
def model():
    """Sizes by which pieces of rows and columns, and padding, are told apart."""
    return tiny.qwen3(vocab_size=13, hidden_size=24, intermediate_size=36, head_dim=6)


@pytest.mark.parametrize("size", [1, 2])
def test_the_shards_of_all_ranks_make_up_the_model(model, size):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    slices_by_rank = [
        {
            name: piece.take(weights[piece.name])
            for name, piece in weight_slices(model.config, rank=rank, size=size).items()
        }
        for rank in range(size)
    ]
    assembled = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}
    for rank, rank_tensors in enumerate(slices_by_rank):
        for name, piece in weight_slices(model.config, rank=rank, size=size).items():
            copy_to_weight(assembled, rank_tensors[name], piece)
    assert all(torch.equal(assembled[name], weight) for name, weight in weights.items())
    assert sum(t.numel() for rank_tensors in slices_by_rank for t in rank_tensors.values()) == sum(
        weight.numel() * (size if "norm" in name else 1) for name, weight in weights.items()
    )


def test_a_rank_has_complete_heads(model):
    parts = weight_slices(model.config, rank=1, size=2)
    prefix = "model.layers.0.self_attn."
    for name, first in (("q", 12), ("k", 6), ("v", 6)):
        piece = parts[f"layers.0.self_attn.qkv.{name}_proj"]
        assert (piece.name, piece.rows) == (f"{prefix}{name}_proj.weight", slice(first, 2 * first))
    assert parts["layers.0.self_attn.o_proj.weight"].columns == slice(12, 24)


@pytest.mark.parametrize("num_shards", [1, 3, 7])
@pytest.mark.parametrize("rank", [0, 1])
def test_runs_of_shards_are_the_flattened_parameter(model, rank, num_shards):
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name, piece in weight_slices(model.config, rank=rank, size=2).items():
        weight = weights[piece.name]
        expected = piece.take(weight).flatten()
        shard_numel = -(-(len(expected) + 5) // num_shards)  # with padding of 5 elements at the end
        shards = []
        for start in range(0, shard_numel * num_shards, shard_numel):
            shard = torch.zeros(shard_numel)
            for first, offset, numel in piece.iter_runs(weight[0].numel(), start, start + shard_numel):
                values = weight.flatten()[first : first + numel]
                assert len(values) == numel > 0
                assert not shard[offset : offset + numel].any()
                shard[offset : offset + numel] = values
            shards.append(shard)
        joined = torch.cat(shards)
        assert torch.equal(joined[: len(expected)], expected), name
        assert not joined[len(expected) :].any()


def draw_tensors(scale: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, its tangent, the weight, its tangent."""
    random = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=random) for shape in [(3, 5, 24)] * 2 + [(24,)] * 2]
    return [x.to(dtype) for x in (drawn[0] * scale, *drawn[1:])]


def make_norm(weight: torch.Tensor) -> RMSNorm:
    config = transformer_config("m", LlamaConfig(**SIZES), tensor=1, dtype=weight.dtype)
    module = RMSNorm(len(weight), config)
    module.weight.data.copy_(weight)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])  # eps matters for the smallest
def test_values_and_gradients_of_norms_are_those_of_hugging_face_bit_for_bit(dtype: torch.dtype, scale: float) -> None:
    x, upstream, weight, _ = draw_tensors(scale, dtype)
    results = []
    ours = make_norm(weight)
    theirs = LlamaRMSNorm(24, eps=ours.eps).to(dtype)
    theirs.weight.data.copy_(weight)
    for module in (theirs, ours):
        leaf = x.clone().requires_grad_()
        value = module(leaf)
        results.append((value, *torch.autograd.grad(value, (leaf, module.weight), upstream)))
    assert all(torch.equal(ours, expected) for ours, expected in zip(*results, strict=True))


def test_a_dual_tensor_has_the_plain_norm_and_a_tangent_without_graph() -> None:
    x, d_x, weight, d_weight = draw_tensors(1.0, torch.float32)
    module = make_norm(weight)
    plain = module(x)
    with forward_ad.dual_level():
        module.__dict__["weight"] = make_dual(module._parameters["weight"], d_weight)
        value, tangent = forward_ad.unpack_dual(module(make_dual(x, d_x)))
        expected = forward_ad.unpack_dual(rms_norm(make_dual(x, d_x), weight, module.eps, d_weight=d_weight)).tangent
    assert torch.equal(value, plain)
    assert value.requires_grad and not tangent.requires_grad
    assert torch.equal(tangent, expected)
