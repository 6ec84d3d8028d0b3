"""What keeps sequences out of one row, or out of one forward, as far as config.json says it.

The rules err on the side of rows of their own: right-padded, these are right for everything that is causal.
"""

from collections.abc import Mapping
from typing import Any

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "moe", "dense", "sparse", "mlp"})
"""Kinds of layers (`layer_types`) in which tokens see each other through attention that can be replaced, and no other
way; all other kinds may carry a state from one sequence of a row to the next. The last four say what follows the
attention."""

OTHER_LAYERS = frozenset({"conv", "linear_attention", "hybrid", "hybrid_sliding"})
"""Kinds in which they also, or only, do so through code of the model's own: convolutions, recurrences."""

_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
"""What architectures call the list of their layers' kinds in config.json."""

_WORDS_OF_OTHER_LAYERS = frozenset({"mamba", "ssm", "conv", "conv1d"})
"""Words in the names of sizes that only convolutions and recurrences have. Jamba, Bamba, Nemotron-H and Falcon-H1 do
not write down the kinds of their layers, but all of them write down such a size."""

_ROPE_OF_THE_FORWARD = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}
"""Kinds of rotary embedding whose frequencies depend on the largest position in a forward, padding and other rows
included, and the key of the position up to which they do not."""


def row_obstacles(config: Mapping[str, Any]) -> tuple[str | None, str | None, str, int | None]:
    """`no_sequence_parallelism`, `unpackable`, `rope` and `rope_limit` of a `ModelShape`.

    Args:
        config: of the language model, as in config.json; what is malformed is passed over.
    """
    why = _why_unpackable(config)
    return why, why, *_rope(config)


def _why_unpackable(config: Mapping[str, Any]) -> str | None:
    """Why a row cannot hold several sequences, as far as the layers go; None where it can."""
    if any(name.startswith("index_topk") and value for name, value in config.items()):
        return "whose attention selects keys by their place in the row"
    for name in _LAYER_LISTS:
        layers = config.get(name)
        if isinstance(layers, list | tuple) and layers:
            others = sorted({str(kind) for kind in layers} - ATTENTION_LAYERS)
            return f"whose layers ({', '.join(others)}) are not all attention" if others else None
    sizes = [name for name, value in config.items() if value and _WORDS_OF_OTHER_LAYERS.intersection(name.split("_"))]
    return f"whose layers are not all attention (it has {min(sizes)})" if sizes else None


def _rope(config: Mapping[str, Any]) -> tuple[str, int | None]:
    # Of the model, or of each kind of layer; under another name before transformers 5.
    found = [part for part in (config.get("rope_parameters"), config.get("rope_scaling")) if isinstance(part, dict)]
    found += [part for whole in found for part in whole.values() if isinstance(part, dict)]
    for part in found:
        kind = part.get("rope_type", part.get("type"))
        if isinstance(kind, str) and kind in _ROPE_OF_THE_FORWARD:
            name = _ROPE_OF_THE_FORWARD[kind]
            limit = part.get(name, config.get(name, config.get("max_position_embeddings")))
            return kind, limit if isinstance(limit, int) else 0
    return "default", None
