"""The few numbers of a model on which time and memory of a batch depend, and reading them without transformers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vcore_ds.planning.shared_rows import row_obstacles

_TEXT_SECTIONS = ("text_config", "decoder", "generator", "text_encoder")
"""Where a config.json may keep its language model, as in transformers' `get_text_config`."""

SIZE_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary_size": ("vocab_size",),
}
"""What architectures call a size in config.json; the first name is transformers' own for all of them."""

_NORMALIZED_HEADS = ("qwen3", "olmo2", "olmo3", "gemma3")
"""How the names of architectures begin whose queries and keys have norms of their own."""

REQUIRED_SIZES = ("num_layers", "num_heads", "hidden_size")


@dataclass(frozen=True)
class ModelShape:
    """A decoder, as far as the time and the memory of a pass over it go."""

    num_layers: int
    num_heads: int
    """Query heads, A."""
    num_kv_heads: int
    """K; a divisor of A."""
    head_dim: int
    """D."""
    layer_parameters: int
    """P, parameters of the linear layers of one decoder layer."""
    no_sequence_parallelism: str | None = None
    """Why sequence parallelism is not possible, such as `whose attention is its own code`; None where it is."""
    unpackable: str | None = None
    """Why a row cannot hold several sequences, in the same form; None where it can."""
    rope: str = "default"
    """Kind of the rotary embedding where its frequencies depend on the largest position in a forward."""
    rope_limit: int | None = None
    """Tokens of a sequence up to which they do not; None where they never do."""
    is_alone: bool = False
    """Whether each sequence needs a forward of its own."""
    is_assumed: bool = False
    """The model was not there to be read, and this is another one's shape."""
    hidden_size: int = 0
    """H; 0 where the sizes that memory depends on are unknown."""
    intermediate_size: int = 0
    """F, width of the MLP."""
    vocabulary_size: int = 0
    """V, rows of the embeddings."""
    is_tied: bool = False
    """Whether input and output embedding are one parameter."""
    normalizes_heads: bool = False
    """Whether queries and keys have norms of their own, as in Qwen3."""

    def of_part(self, num_parts: int) -> "ModelShape":
        """The part of a rank of a tensor-parallel group: what it computes and holds. A vocabulary that the group
        does not divide is padded."""
        if num_parts == 1:
            return self
        divided = ("num_heads", "num_kv_heads", "layer_parameters", "intermediate_size")
        rows = -(-self.vocabulary_size // num_parts)
        parts = {name: max(1, getattr(self, name) // num_parts) for name in divided}
        return replace(self, **parts, vocabulary_size=rows)

    def for_sequences_of(self, longest: int) -> "ModelShape":
        """The shape for data whose longest sequence has `longest` tokens. Where one of them makes the rotary embedding
        change its frequencies, another one in the same forward would be rotated by these too, and a rank that has only
        the first columns of a row by others than the rest."""
        if self.rope_limit is None or longest <= self.rope_limit:
            return self
        why = f"whose rotary embedding ({self.rope}) depends on the largest position in a forward"
        return replace(self, no_sequence_parallelism=why, unpackable=why, is_alone=True)

    @property
    def attention_length(self) -> float:
        """Tokens of a sequence whose causal attention costs as much as its linear layers, P / (A D).

        A token at position t needs 4 t products per head dimension, on average half of that over a sequence; and 2 per
        linear parameter of a layer.
        """
        return self.layer_parameters / (self.num_heads * self.head_dim)


def shape_of_sizes(sizes: Mapping[str, int | None], config: Mapping[str, Any]) -> ModelShape | None:
    """The shape of a decoder, taken for a dense, Llama-like one; None where one of `REQUIRED_SIZES` is missing.

    Args:
        sizes: those of `SIZE_NAMES`, None where the configuration has none.
        config: of the language model, as in config.json; what is malformed is passed over.
    """
    num_layers, num_heads, hidden = (sizes[key] for key in REQUIRED_SIZES)
    if num_layers is None or num_heads is None or hidden is None:
        return None
    num_kv_heads, head_dim = sizes["num_kv_heads"] or num_heads, sizes["head_dim"] or max(1, hidden // num_heads)
    width, vocabulary = sizes["intermediate_size"], sizes["vocabulary_size"]
    parameters = layer_parameters(hidden, num_heads, num_kv_heads, head_dim, width)
    shape = ModelShape(num_layers, num_heads, num_kv_heads, head_dim, parameters, *row_obstacles(config))
    if vocabulary is None:
        return shape
    return replace(
        shape,
        hidden_size=hidden,
        intermediate_size=width or 4 * hidden,
        vocabulary_size=vocabulary,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        normalizes_heads=str(config.get("model_type", "")).startswith(_NORMALIZED_HEADS),
    )


def layer_parameters(
    hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, intermediate_size: int | None
) -> int:
    """Linear parameters of a dense, Llama-like layer, for which other architectures are taken."""
    attention = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
    return attention + 3 * hidden_size * (intermediate_size or 4 * hidden_size)


QWEN3_32B = ModelShape(
    64, 64, 8, 128, layer_parameters(5120, 64, 8, 128, 25600),
    hidden_size=5120, intermediate_size=25600, vocabulary_size=151936, normalizes_heads=True,
)  # fmt: skip
"""The model that a plan assumes where it cannot see the real one."""


def shape_on_disk(path: str) -> ModelShape | None:
    """The shape of a model in a folder, of a configuration in a .json file, or of a hub id in Hugging Face's cache;
    None where none of them can be read."""
    own = Path(path) if path.endswith(".json") else Path(path) / "config.json"
    for file in (own, _cached_config(path)):
        try:
            raw = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
        except (OSError, ValueError, RecursionError):
            continue
        shape = _shape(raw) if isinstance(raw, dict) else None
        if shape is not None:
            return shape
    return None


def _cached_config(hub_id: str) -> Path | None:
    """config.json of the newest revision in the cache. `huggingface_hub.try_to_load_from_cache` finds the same file,
    but takes 0.2 s to import."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return folder / "snapshots" / revision / "config.json"


def _shape(raw: Mapping[str, Any]) -> ModelShape | None:
    """None where config.json lacks a size, or has one that cannot be meant."""
    for section in _TEXT_SECTIONS:
        if isinstance(raw.get(section), dict):
            raw = raw[section]
            break
    sizes: dict[str, int | None] = {}
    for size, names in SIZE_NAMES.items():
        found = [raw[name] for name in names if raw.get(name) is not None]
        if any(type(value) is not int or not 1 <= value < 2**31 for value in found):
            return None
        sizes[size] = found[0] if found else None
    return shape_of_sizes(sizes, raw)
