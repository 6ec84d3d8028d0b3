"""What identifies a scoring: everything that its losses and utilities depend on. Work that differs is not continued."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from vcore_ds.config.resume import flat_values
from vcore_ds.config.schema import Recipe
from vcore_ds.data.store import TokenStore
from vcore_ds.files.scores_folder import ScoredCheckpoint, Scores

BY_DIGEST = frozenset(
    {
        "model.path",
        "data.train_path",
        "data.probe_path",
        "data.cache_dir",
        "run.output_dir",
        "engine.deepspeed_config",
    }
)
"""Keys of files whose contents count, wherever they are."""
WITHOUT_EFFECT = frozenset(
    {
        # The same numbers in less memory.
        "model.gradient_checkpointing",
        "model.activation_offload",
        "engine.memory_check",
        "engine.timeout_minutes",
        "engine.lost_rank_seconds",
    }
)
"""Keys that may differ when a scoring is continued, such as after a rank ran out of memory."""


def describe_request(
    recipe: Recipe,
    description: Scores,
    deepspeed_config: Mapping[str, Any],
    passes: Sequence[tuple[str, TokenStore, ScoredCheckpoint | None]],
) -> dict[str, Any]:
    """The identity of a scoring, for JSON.

    All keys of the recipe count but those named above: a new one cannot be forgotten.

    Args:
        recipe: as `request` makes it of the user's.
        description: of the data and the model.
        deepspeed_config: complete.
        passes: name and data of the trusted set, and the checkpoint, in the order of their numbers.
    """
    data = description.data
    return {
        "version": description.version,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "model": description.model_digest,
        "data": {
            "digest": data.digest,
            "tokenizer": data.tokenizer_hash,
            "chat_template": data.chat_template_hash,
        },
        "recipe": {k: v for k, v in flat_values(recipe).items() if k not in BY_DIGEST | WITHOUT_EFFECT},
        # Where ZeRO-3 keeps shards and in which pieces it sends them changes no number, nor does the number of ranks.
        "deepspeed": {k: v for k, v in deepspeed_config.items() if k not in ("zero_optimization", "train_batch_size")},
        "passes": [
            {"set": name, "digest": trusted.digest}
            | ({} if checkpoint is None else {"step": checkpoint.step, "checkpoint": checkpoint.digest})
            for name, trusted, checkpoint in passes
        ],
    }
