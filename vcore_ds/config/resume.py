"""Resuming: which keys of a recipe may change between the attempts of a run."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vcore_ds.common.errors import UserError
from vcore_ds.config.files import UnreadableFile, parse_yaml, read_text
from vcore_ds.config.problems import field_problems
from vcore_ds.config.schema import SUBSECTIONS, Recipe
from vcore_ds.config.sections import ProfileConfig

MAY_DIFFER = frozenset(
    {
        # Printing, measuring and saving.
        "run.output_dir",
        "run.log_every",
        "run.validate_every",
        "run.num_token_records",
        "run.num_followed_traces",
        "run.time_limit_minutes",
        "run.profile",
        *(f"run.profile.{key}" for key in ProfileConfig.key_names()),
        "data.validation_path",
        # The data; the checkpoint has digests of its tokens, of the weights of files and of the selected traces.
        "data.train_path",
        "data.probe_path",
        "data.trusted_overlap",
        "data.keep.scores",
        "data.cache_dir",
        "data.columns",
        "data.max_malformed",
        # These change results only by rounding.
        "batch.micro_batch_size_per_rank",
        "batch.pack_tokens_per_rank",
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
"""Dotted keys that may change when a run is resumed."""

SECTIONS_THAT_MAY_DIFFER = frozenset({"track", "checkpoint", "engine", "schedule"})
"""Sections of which all keys may change; `schedule` as far as the steps taken keep their learning rates, which a run
checks."""


def read_resolved_recipe(path: Path) -> Recipe:
    """Read the recipe.yaml of a run. Files that it names need not exist any more. Raises UserError where it is not a
    recipe of this version."""
    try:
        values = parse_yaml(read_text(path)).value
        return Recipe.model_validate(values)
    except ValidationError as error:
        problems = [f"{'.'.join(location)}: {text}" for location, text in field_problems(error, values).items()]
        raise UserError(f"{path}: {'; '.join(problems) or error}") from None
    except FileNotFoundError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnreadableFile as error:
        raise UserError(f"{path}{error.position}: {error}; expected the recipe of a run") from None


def differing_keys(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old value, new value) of every key that has changed and may not."""
    before, after = flat_values(old), flat_values(new)
    return {
        key: (before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and not _may_differ(key, new)
    }


def _may_differ(key: str, recipe: Recipe) -> bool:
    sizes = ("batch.micro_batch_size_per_rank", "batch.pack_tokens_per_rank", "batch.sequence_parallel")
    if key in sizes and recipe.method.alpha_scope == "micro_batch":
        return False  # alpha depends on which sequences share a micro-batch
    return key in MAY_DIFFER or key.partition(".")[0] in SECTIONS_THAT_MAY_DIFFER


def flat_values(recipe: Recipe) -> dict[str, Any]:
    """Dotted key -> value, as in recipe.yaml; a section that is null is one key."""
    flat: dict[str, Any] = {}
    for section, values in recipe.model_dump(mode="json").items():
        flat |= {f"{section}.{key}": value for key, value in values.items()} if values is not None else {section: None}
    for names in SUBSECTIONS:
        values = flat[".".join(names)]
        if values is not None:
            flat |= {".".join([*names, key]): value for key, value in values.items()}
            del flat[".".join(names)]
    return flat
