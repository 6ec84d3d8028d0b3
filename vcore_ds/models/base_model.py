"""The model that a run began with, as others know it: its id on the hub, its name and its license, never a path."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
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
        return self.hub_id or self.name


def base_model_of(path: str, *, hub_id: str | None = None, ask_hub: bool = False) -> BaseModel:
    """What is known of the model at `path` (a folder or a hub id) without loading it.

    A local folder has no id, unless it lies in the hub's cache, or its card was written here and names the model that
    it was made of (a result, or the quickstart's model).

    Args:
        hub_id: what the user says that it is on the hub; None to find out.
        ask_hub: read the card on the hub where it is not in the cache; otherwise nothing is downloaded.
    """
    folder = Path(path).expanduser()
    if in_cache := _IN_CACHE.search(folder.absolute().as_posix()):
        path = "/".join(in_cache.groups())
    elif folder.is_dir():
        path = str(folder.absolute())
    metadata = card_metadata(folder / CARD)
    if hub_id is None:
        named = metadata.get("base_model") if OWN_TAG in (metadata.get("tags") or []) else path
        hub_id = named if isinstance(named, str) and is_hub_id(named) else None
    if not metadata and hub_id is not None:
        with suppress(Exception):  # offline, gated, no card: a dozen classes, and a card can do without the license
            metadata = card_metadata(Path(hf_hub_download(hub_id, CARD, local_files_only=not ask_hub)))
    known_license = {key: str(metadata[key]) for key in LICENSE_KEYS if isinstance(metadata.get(key), str)}
    return BaseModel(Path(path).name, hub_id, known_license)


def is_hub_id(text: str) -> bool:
    """Whether `text` is OWNER/NAME by the hub's rules; it need not be there."""
    with suppress(HFValidationError):
        validate_repo_id(text)
        return text.count("/") == 1
    return False


def card_metadata(card: Path) -> dict[str, Any]:
    """The metadata of a card's file; empty where there is none, or none that can be read."""
    with suppress(Exception):  # no file, or whatever YAML says of one that somebody else wrote
        return metadata_load(card) or {}
    return {}
