"""A model's identity: its hub id, name and license as others know it, and a digest of its weights.

The digest tells models apart without reading 100 GB.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.constants import SAFETENSORS_SINGLE_FILE
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils import validate_repo_id

from vcore_ds.common import paths
from vcore_ds.common.errors import UserError
from vcore_ds.common.paths import expand_home, reading
from vcore_ds.config.exports import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD, read_adapter_config
from vcore_ds.models.safetensors_ranges import read_header, read_weight_map
from vcore_ds.planning.known_models import CONFIG_NAME, read_config_file

CARD_TAG = "vcore_ds"
"""Tag of the model cards that vcore_ds writes."""
LICENSE_KEYS = ("license", "license_name", "license_link")
_IN_CACHE = re.compile(r"/models--([^/]+)--([^/]+)/snapshots/[^/]+/?$")
"""Matches the path of a model in the hub's local cache, which contains its id."""


@dataclass(frozen=True)
class BaseModel:
    """A base model as others know it, without its path on this machine."""

    name: str  # the last part of its id or path
    hub_id: str | None  # None for a local model that is not known to be on the hub
    license: Mapping[str, str] = field(default_factory=dict)  # `LICENSE_KEYS` of the card; empty if unknown
    stages: tuple[str, ...] = ()  # of training by vcore_ds until now, as its card lists them


def identify_base_model(path: str, *, hub_id: str | None = None) -> BaseModel:
    """Identify the model at `path` (a folder or a hub id) without loading it.

    A local folder has a hub id if it is in the hub's cache, or if vcore_ds wrote its card, which names the base model
    (the result of a run, or the quickstart's model). `hub_id`: given by the user; None to find out.
    """
    folder = expand_home(path)
    if in_cache := _IN_CACHE.search(folder.absolute().as_posix()):
        path = "/".join(in_cache.groups())
    elif folder.is_dir():
        path = str(folder.absolute())
    metadata = read_card_metadata(folder / CARD)
    is_ours = CARD_TAG in (metadata.get("tags") or [])
    name, *stages = metadata.get("stages") or [Path(path).name] if is_ours else [Path(path).name]
    if hub_id is None:
        named = metadata.get("base_model") if is_ours else path
        hub_id = named if isinstance(named, str) and is_hub_id(named) else None
    if not metadata and hub_id is not None:
        with suppress(Exception):  # not in the cache, or an invalid id; the license is optional
            metadata = read_card_metadata(Path(hf_hub_download(hub_id, CARD, local_files_only=True)))
    known_license = {key: str(metadata[key]) for key in LICENSE_KEYS if isinstance(metadata.get(key), str)}
    return BaseModel(name, hub_id, known_license, tuple(stages))


def check_adapter_base(adapter: Path, path: str, key: str = "model.path") -> str | None:
    """Raise UserError, which begins with `key`, unless `path` is the base model of an adapter: by the digest in its
    card, or else by that of the model that its configuration names. Return a warning where that model is not on this
    machine, so that only its name can be compared."""
    named = read_adapter_config(adapter).get("base_model_name_or_path") or path
    recorded, warning = read_card_metadata(adapter / CARD).get("base_digest"), None
    # As folders where they are: weights that only transformers reads have no digest.
    is_base = named == path or (os.path.exists(named) and os.path.exists(path) and os.path.samefile(named, path))
    try:
        if recorded is not None or not is_base:
            is_base = compute_model_digest(path) == (recorded or compute_model_digest(named))
    except UserError:  # one of them is not on this machine
        is_base = is_base or identify_base_model(named).name == identify_base_model(path).name
        warning = (
            f"{key}: {path}: cannot be compared with the base model of the adapter {adapter} but by name and shapes: "
            f"{named} or its weights are not on this machine. Make sure that it is the same model"
        )
    if not is_base:
        raise UserError(
            f"{key}: found {path}, which is not the base model of the adapter {adapter}; expected the model that it "
            f"was trained on ({named}), with the same weights"
        )
    return warning


def is_hub_id(text: str) -> bool:
    """Whether `text` is a valid OWNER/NAME; it need not exist."""
    with suppress(HFValidationError):
        validate_repo_id(text)
        return text.count("/") == 1
    return False


def read_card_metadata(card: Path) -> dict[str, Any]:
    """Read the metadata of a model card; empty if there is none, or none that can be parsed."""
    with suppress(Exception):  # no file, or any YAML error
        return metadata_load(card) or {}
    return {}


RULE = "2:"
"""Prefix of digests. Those of vcore_ds 0.7 and before, of the first and the last MiB of each safetensors file, have
none."""

_ADAPTER = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
"""Files that transformers also loads if they exist."""


def find_local_folder(path: str) -> Path:
    """Return the local folder of a model given by folder or hub id. Raises UserError if it is not on this machine."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: neither a folder nor a model of the local hub cache: {error}") from None


def compute_model_digest(path: str) -> str:
    """Compute `RULE` plus a SHA-256 of a model's configuration, and of names, sizes and contents of its weight files.

    Weights of more than `paths.WHOLE_BYTES` together are sampled: the beginning of each tensor, then every
    `STEP_BYTES`, which is less than a matrix of a layer or an expert of a fused tensor. A change of an entire matrix,
    as by a merged adapter, is always detected; one of a few numbers between samples is not. Raises UserError if not all
    weights are on this machine.
    """
    folder, digest = find_local_folder(path), hashlib.sha256()
    with reading("model.path", folder, "a model's folder that can be read"):
        files = [(file, file.stat().st_size) for file in _find_loaded_files(path, folder)]
        reads_all = sum(size for _, size in files) <= paths.WHOLE_BYTES
        for file, size in files:
            digest.update(f"\n{file.name} {size}\n".encode())
            if reads_all or file.suffix == ".json":
                with file.open("rb") as opened:
                    digest.update(hashlib.file_digest(opened, "sha256").digest())
            else:
                for part in _iter_samples(file, size):
                    digest.update(part)
    return RULE + digest.hexdigest()


def _find_loaded_files(path: str, folder: Path) -> list[Path]:
    """Return the files that transformers loads; others may come and go in the hub's cache, as they are requested."""
    others = [folder / name for name in (CONFIG_NAME, *_ADAPTER) if (folder / name).is_file()]
    name = _read_weights_name(folder)
    index = folder / f"{name}.index.json"
    if (folder / name).is_file():
        return [*others, folder / name]
    if not index.is_file():
        raise UserError(f"{path}: found no {name} in {folder}; download the model first")
    names = sorted(set(read_weight_map(index).values()))
    if missing := [file for file in names if not (folder / file).is_file()]:
        raise UserError(f"{path}: found no {missing[0]}, which {index.name} names; download the model first")
    return [*others, index, *(folder / file for file in names)]


def _read_weights_name(folder: Path) -> str:
    """Return the name of a single file of weights; NAME.index.json lists the files of sharded weights."""
    with suppress(OSError, ValueError):
        if named := read_config_file(folder / CONFIG_NAME).get("transformers_weights"):
            return str(named).removesuffix(".index.json")
    return SAFETENSORS_SINGLE_FILE


def _iter_samples(file: Path, size: int) -> Iterator[bytes]:
    """Yield a file's list of tensors, and bytes at positions derived from it."""
    tensors = read_header(file)
    yield repr([(name, *tensor[1:]) for name, tensor in tensors.items()]).encode()
    yield from paths.read_samples(file, size, {0} | {tensor.offset for tensor in tensors.values()})
