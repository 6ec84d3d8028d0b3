"""Shapes of published models by name, for planning without their files."""

from typing import Any

from vcore_ds.planning.model_shape import QWEN3_32B, ModelShape, layer_parameters, shape_of_config


def _shape(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, width: int, vocabulary: int, *,
    tied: bool, normalizes_heads: bool,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        layers,
        heads,
        kv_heads,
        head_dim,
        layer_parameters(hidden, heads, kv_heads, head_dim, width),
        hidden_size=hidden,
        intermediate_size=width,
        vocabulary_size=vocabulary,
        is_tied=tied,
        normalizes_heads=normalizes_heads,
    )


_DENSE = {
    "Qwen3-0.6B": _shape(28, 1024, 16, 8, 128, 3072, 151936, tied=True, normalizes_heads=True),
    "Qwen3-1.7B": _shape(28, 2048, 16, 8, 128, 6144, 151936, tied=True, normalizes_heads=True),
    "Qwen3-4B": _shape(36, 2560, 32, 8, 128, 9728, 151936, tied=True, normalizes_heads=True),
    "Qwen3-8B": _shape(36, 4096, 32, 8, 128, 12288, 151936, tied=False, normalizes_heads=True),
    "Qwen3-14B": _shape(40, 5120, 40, 8, 128, 17408, 151936, tied=False, normalizes_heads=True),
    "Qwen3-32B": QWEN3_32B,
    "Llama-3.1-8B": _shape(32, 4096, 32, 8, 128, 14336, 128256, tied=False, normalizes_heads=False),
    "Llama-3.1-70B": _shape(80, 8192, 64, 8, 128, 28672, 128256, tied=False, normalizes_heads=False),
    "Llama-3.2-1B": _shape(16, 2048, 32, 8, 64, 8192, 128256, tied=True, normalizes_heads=False),
    "Llama-3.2-3B": _shape(28, 3072, 24, 8, 128, 8192, 128256, tied=True, normalizes_heads=False),
    "Llama-3.3-70B": _shape(80, 8192, 64, 8, 128, 28672, 128256, tied=False, normalizes_heads=False),
    "Mistral-7B-Instruct-v0.3": _shape(32, 4096, 32, 8, 128, 14336, 32768, tied=False, normalizes_heads=False),
    "SmolLM2-135M": _shape(30, 576, 9, 3, 64, 1536, 49152, tied=True, normalizes_heads=False),
}


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, vocabulary: int, width: int) -> dict[str, Any]:
    return dict(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        intermediate_size=width,
        tie_word_embeddings=False,
    )


MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": dict(
        model_type="qwen3_moe", **_sizes(48, 2048, 32, 4, 151936, 6144), head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "Qwen3-235B-A22B": dict(
        model_type="qwen3_moe", **_sizes(94, 4096, 64, 4, 151936, 12288), head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
    ),
    "DeepSeek-V3": dict(
        model_type="deepseek_v3", **_sizes(61, 7168, 128, 128, 129280, 18432), first_k_dense_replace=3,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1,
    ),
    "GLM-4.5": dict(
        model_type="glm4_moe", **_sizes(92, 5120, 96, 8, 151552, 12288), first_k_dense_replace=3, head_dim=128,
        use_qk_norm=True,
        n_routed_experts=160, num_experts_per_tok=8, moe_intermediate_size=1536, n_shared_experts=1,
    ),
    "GLM-4.5-Air": dict(
        model_type="glm4_moe", **_sizes(46, 4096, 96, 8, 151552, 10944), first_k_dense_replace=1, head_dim=128,
        n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408, n_shared_experts=1,
    ),
    "gpt-oss-20b": dict(
        model_type="gpt_oss", **_sizes(24, 2880, 64, 8, 201088, 2880), head_dim=64,
        num_local_experts=32, num_experts_per_tok=4,
    ),
    "gpt-oss-120b": dict(
        model_type="gpt_oss", **_sizes(36, 2880, 64, 8, 201088, 2880), head_dim=64,
        num_local_experts=128, num_experts_per_tok=4,
    ),
    "Mixtral-8x7B": dict(
        model_type="mixtral", **_sizes(32, 4096, 32, 8, 32000, 14336), num_local_experts=8, num_experts_per_tok=2,
    ),
}  # fmt: skip
"""Published mixtures of experts: of their config.json what their parameters depend on."""

KNOWN_MODELS = _DENSE | {name: shape for name, sizes in MIXTURES.items() if (shape := shape_of_config(sizes))}
"""The models that shipped recipes name, the rest of their families' sizes, and mixtures of experts."""


def known_model(path: str) -> str | None:
    """The name in `KNOWN_MODELS` of a model's folder or hub id, such as `Qwen/Qwen3-8B-Base`; None for others.

    The last part of the path has to begin with the whole name, so that `Qwen3-4B2` is not taken for another size; the
    longest such name counts.
    """
    last = path.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    found = [name for name in KNOWN_MODELS if f"{last}-".startswith(f"{name.lower()}-")]
    return max(found, key=len, default=None)
