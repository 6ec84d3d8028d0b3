"""Digests of what the runs of a sweep read: the cells of a table must not differ in what stands under a path."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from vcore_ds.config.resume import flat_values
from vcore_ds.config.schema import Recipe
from vcore_ds.errors import UserError
from vcore_ds.files.scores_folder import TRACES
from vcore_ds.files.user_paths import is_readable, reading

DATA_KEYS = ("data.train_path", "data.probe_path", "data.validation_path")
FILE_KEYS = ("data.keep.scores", "data.reference_log_probabilities")
MODEL_KEY = "model.path"

Digests = Mapping[str, Mapping[str, str]]
"""Key of a recipe -> path -> digest of what is there."""


def digest_inputs(recipes: Iterable[Recipe]) -> dict[str, dict[str, str]]:
    """Digests of all inputs of these recipes that are on this machine.

    Raises:
        UserError: data are there and are none.
    """
    digests: dict[str, dict[str, str]] = {}
    for key, path in sorted({(key, path) for recipe in recipes for key, path in _paths(recipe)}):
        digest = _digest(key, path)
        if digest is not None:
            digests.setdefault(key, {})[path] = digest
    return digests


def changed_inputs(digests: Digests) -> Iterator[str]:
    """A line for each input that has other contents now. Those that are no longer here are left to the runs.

    Raises UserError as `digest_inputs`.
    """
    for key, by_path in digests.items():
        for path, digest in by_path.items():
            if _digest(key, path) not in (None, digest):
                yield f"{key}: {path}: other contents than when the sweep first read it"


def _paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    values = flat_values(recipe) | {"data.validation_path": None}
    for key in (*DATA_KEYS, *FILE_KEYS, MODEL_KEY):
        if (path := values.get(key)) is not None:
            yield key, path
    for path in recipe.data.validation_paths().values():
        yield "data.validation_path", path


def _digest(key: str, path: str) -> str | None:
    """None for what is not on this machine, as where a sweep is submitted from."""
    # Here: the first takes seconds to import, and `vcore-ds sweep --status` needs neither.
    from vcore_ds.data.prepare.sources import describe_source, find_shards
    from vcore_ds.data.store_checks import MANIFEST, read_manifest
    from vcore_ds.files.model_digest import digest_of_model

    if key == MODEL_KEY:
        try:
            return digest_of_model(path)
        except UserError:
            return None
    if not is_readable(path):
        return None
    if key in FILE_KEYS:
        file = Path(path) / TRACES if key == "data.keep.scores" else Path(path)
        if not file.is_file():
            return None
        with reading(key, file, "a file that can be read"), file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    if (Path(path) / MANIFEST).is_file():
        return read_manifest(Path(path))["digest"]
    entries = describe_source(find_shards([path], "train"))
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()
