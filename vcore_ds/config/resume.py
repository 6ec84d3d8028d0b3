"""Whether two recipes are the same run: what may change between the attempts of a run, and what may not."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vcore_ds.common.errors import UserError
from vcore_ds.config.files import UnreadableFile, parse_yaml, read_text
from vcore_ds.config.problems import REMOVED, field_problems
from vcore_ds.config.schema import SUBSECTIONS, Recipe
from vcore_ds.config.sections import REMOVED_DEFAULTS

MAY_DIFFER = frozenset(
    {
        # What is printed, measured and kept.
        "run.output_dir",
        "run.log_every",
        "run.validate_every",
        "run.num_token_records",
        "run.num_followed_traces",
        "run.time_limit_minutes",
        "run.wandb_project",
        "data.validation_path",
        # Where the data is; the checkpoint knows a digest of its tokens, and of which traces are kept.
        "data.train_path",
        "data.probe_path",
        "data.keep.scores",
        "data.cache_dir",
        # How the same numbers are computed, up to rounding.
        "batch.micro_batch_size_per_rank",
        "batch.packed_row_tokens",
        "batch.sequence_parallel",
        "probe.sequence_parallel",
        "probe.micro_batch_size_per_rank",
        "utility.micro_batch_size_per_rank",
        "utility.fused",
        "model.attention",
        "model.gradient_checkpointing",
        "model.activation_offload",
        "parallel.expert",
    }
)
"""Dotted keys with which a run may be resumed whatever they were before."""

SECTIONS_THAT_MAY_DIFFER = frozenset({"track", "checkpoint", "engine"})
"""Sections all of whose keys may differ."""


def read_resolved_recipe(path: Path, *, accept_retired: bool = False) -> Recipe:
    """The recipe.yaml that a run wrote. Files that it names need not exist any more.

    Args:
        accept_retired: for readers of finished runs, which nothing trains by: put keys that were removed since into
            `Recipe.retired` instead of refusing them.

    Raises:
        UserError: the file cannot be read, or is no recipe of this version.
    """
    try:
        values = parse_yaml(read_text(path)).value
        retired = take_retired_keys(values) if accept_retired else {}
        return Recipe.model_validate(values).with_retired(retired)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(location)}: {text}" for location, text in field_problems(error, values).items())
        raise UserError(f"{path}: {found or error}") from None
    except FileNotFoundError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnreadableFile as error:
        raise UserError(f"{path}{error.place}: {error}") from None


def take_retired_keys(values: Any) -> dict[str, Any]:
    """Removes keys of earlier versions from the values of a recipe, and returns those without their default, dotted."""
    retired = {}
    for section, key in REMOVED:
        inside = values.get(section) if isinstance(values, dict) else None
        if isinstance(inside, dict) and key in inside:
            value = inside.pop(key)
            if (key, value) not in REMOVED_DEFAULTS:
                retired[f"{section}.{key}"] = value
    return retired


def differing_keys(there: Recipe, here: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value there, value here) of every key that may not change between the attempts of a run."""
    left, right = flat_values(there), flat_values(here)
    return {
        key: (left.get(key), right.get(key))
        for key in dict.fromkeys([*left, *right])
        if left.get(key) != right.get(key) and not _may_differ(key, here)
    }


def _may_differ(key: str, recipe: Recipe) -> bool:
    sizes = ("batch.micro_batch_size_per_rank", "batch.packed_row_tokens", "batch.sequence_parallel")
    if key in sizes and recipe.method.alpha_scope == "micro_batch":
        return False  # then alpha depends on what a sequence is batched with
    return key in MAY_DIFFER or key.partition(".")[0] in SECTIONS_THAT_MAY_DIFFER


def flat_values(recipe: Recipe) -> dict[str, Any]:
    """Dotted key -> value, as in recipe.yaml, retired keys included; what has keys and is null is a key by itself."""
    flat: dict[str, Any] = {}
    for section, values in recipe.model_dump(mode="json").items():
        flat |= {f"{section}.{key}": value for key, value in values.items()} if values is not None else {section: None}
    for names in SUBSECTIONS:
        values = flat[".".join(names)]
        if values is not None:
            flat |= {".".join([*names, key]): value for key, value in values.items()}
            del flat[".".join(names)]
    return flat | recipe.retired
