"""Shapes of published models by name, for planning without their files."""

from vcore_ds.planning.model_shape import QWEN3_32B, ModelShape, layer_parameters


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


KNOWN_MODELS = {
    "Qwen3-0.6B": _shape(28, 1024, 16, 8, 128, 3072, 151936, tied=True, normalizes_heads=True),
    "Qwen3-1.7B": _shape(28, 2048, 16, 8, 128, 6144, 151936, tied=True, normalizes_heads=True),
    "Qwen3-4B": _shape(36, 2560, 32, 8, 128, 9728, 151936, tied=True, normalizes_heads=True),
    "Qwen3-8B": _shape(36, 4096, 32, 8, 128, 12288, 151936, tied=False, normalizes_heads=True),
    "Qwen3-14B": _shape(40, 5120, 40, 8, 128, 17408, 151936, tied=False, normalizes_heads=True),
    "Qwen3-32B": QWEN3_32B,
    "Llama-3.1-8B": _shape(32, 4096, 32, 8, 128, 14336, 128256, tied=False, normalizes_heads=False),
    "Mistral-7B-Instruct-v0.3": _shape(32, 4096, 32, 8, 128, 14336, 32768, tied=False, normalizes_heads=False),
    "SmolLM2-135M": _shape(30, 576, 9, 3, 64, 1536, 49152, tied=True, normalizes_heads=False),
}
"""The models that shipped recipes name, and the rest of their families' dense sizes, from their config.json."""


def known_model(path: str) -> str | None:
    """The name in `KNOWN_MODELS` of a model's folder or hub id, such as `Qwen/Qwen3-8B-Base`; None for others.

    The last part of the path has to begin with the whole name, so that `Qwen3-30B-A3B` is not taken for another size.
    """
    last = path.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    return next((name for name in KNOWN_MODELS if f"{last}-".startswith(f"{name.lower()}-")), None)
