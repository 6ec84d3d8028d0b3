"""The model that a run began with, as others know it: its id on the hub, its name and its license, never a path."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils import validate_repo_id

CARD = "README.md"
"""The model card, in every folder of a model and every repository on the hub."""
OWN_TAG = "vcore_ds"
"""The tag of the cards that are written here."""
LICENSE_KEYS = ("license", "license_name", "license_link")

_IN_CACHE = re.compile(r"/models--([^/]+)--([^/]+)/snapshots/[^/]+/?$")
"""A model in the hub's local cache, whose path holds its id."""


@dataclass(frozen=True)
class BaseModel:
    """A base model without its place on this machine."""

    name: str
    """The last part of its id or path."""
    hub_id: str | None
    """None for a local model that is not known to be on the hub."""
    license: Mapping[str, str] = field(default_factory=dict)
    """The card's keys of `LICENSE_KEYS`; empty where the license is not known."""

    @property
    def public_name(self) -> str:
        """The id on the hub, or else the name."""
        return self.hub_id or self.name


def base_model_of(path: str, *, hub_id: str | None = None, ask_hub: bool = False) -> BaseModel:
    """What is known of the model at `path` without loading it.

    A local folder has no id, unless it lies in the hub's cache, or its card was written here and names the model that
    it was made of (a result, or the quickstart's model).

    Args:
        path: `model.path` of a recipe: a folder or a hub id.
        hub_id: what the user says that it is on the hub; None to find out.
        ask_hub: read the card on the hub where it is not in the cache; otherwise nothing is downloaded.
    """
    folder = Path(path).expanduser()
    name = folder.absolute().name if folder.is_dir() else path.rstrip("/").rpartition("/")[2]
    metadata = card_metadata(folder / CARD) if folder.is_dir() else {}
    in_cache = _IN_CACHE.search(folder.absolute().as_posix())
    if hub_id is None and in_cache is not None:
        hub_id, name = f"{in_cache[1]}/{in_cache[2]}", in_cache[2]
    elif hub_id is None and not folder.is_dir() and is_hub_id(path):
        hub_id = path
    elif hub_id is None and OWN_TAG in (metadata.get("tags") or []):
        found = metadata.get("base_model")
        hub_id = found if isinstance(found, str) and is_hub_id(found) else None
    if not metadata and hub_id is not None:
        metadata = _card_on_hub(hub_id, ask_hub)
    found_license = {key: str(metadata[key]) for key in LICENSE_KEYS if isinstance(metadata.get(key), str)}
    return BaseModel(name, hub_id, found_license)


def is_hub_id(text: str) -> bool:
    """Whether `text` is OWNER/NAME by the hub's rules; it need not be there."""
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return text.count("/") == 1


def _card_on_hub(hub_id: str, ask_hub: bool) -> dict[str, Any]:
    try:
        found = hf_hub_download(hub_id, CARD) if ask_hub else try_to_load_from_cache(hub_id, CARD)
    except Exception:  # offline, gated, no card: a dozen classes, and a card can do without the license
        return {}
    return card_metadata(Path(found)) if isinstance(found, str) else {}


def card_metadata(card: Path) -> dict[str, Any]:
    """The metadata of a card's file; empty where there is none, or none that can be read."""
    try:
        return (metadata_load(card) if card.is_file() else None) or {}
    except Exception:  # whatever YAML says of a file that somebody else wrote
        return {}
