"""The place of every weight of a model in its files, from configuration and headers alone."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple, cast

from safetensors import SafetensorError
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, find_adapter_config_file
from transformers.utils.hub import get_checkpoint_shard_files

from vcore_ds.errors import UserError, first_line
from vcore_ds.files.safetensors_ranges import DTYPES, StoredTensor
from vcore_ds.models.folder_check import check_shapes, empty_model, stored_tensors


class StoredWeights(NamedTuple):
    """Where a model's tensors are, or why they cannot be read by range."""

    tensors: dict[str, StoredTensor]
    """By the name in the model: parameters and buffers."""
    missing: set[str]
    """Names in the model that the files do not have, since they are tied to others."""
    obstacle: str | None
    """What has to be left to transformers; completes "weights are read by one process, since ..."."""

    def fingerprint(self) -> str:
        """The same for files of the same layout, wherever they are."""
        places = sorted((name, one.file.name, *one[1:]) for name, one in self.tensors.items())
        return hashlib.sha256(repr((places, self.obstacle)).encode()).hexdigest()


def find_stored_weights(path: str, config: PretrainedConfig) -> StoredWeights:
    """Reads the headers of the model's files; of a hub id, the files are downloaded first.

    Raises:
        UserError: weights are missing, of other shapes than the configuration's, or in files that cannot be read.
    """
    stored, obstacle = read_headers(path, config)
    if obstacle is not None:
        return StoredWeights({}, set(), obstacle)
    model = empty_model(path, config)
    tensors, obstacle = _by_name_in_model(model, stored)
    if obstacle is not None:
        return StoredWeights({}, set(), obstacle)
    check_shapes(path, model, {name: one.shape for name, one in tensors.items()})
    missing = model.state_dict().keys() - tensors.keys()
    untied = set(missing)
    model.tie_weights(missing_keys=untied, recompute_mapping=False)
    if untied and model._keys_to_ignore_on_load_missing:
        return StoredWeights({}, set(), f"{min(untied)} is not in the files")
    check_nothing_is_missing(path, untied)
    return StoredWeights(tensors, set(missing), None)


def read_headers(path: str, config: PretrainedConfig) -> tuple[dict[str, StoredTensor], str | None]:
    """The tensors in a model's files, by name; none, and the obstacle, where transformers has to read them itself.

    Raises UserError where the files cannot be read.
    """
    with unreadable_model(path):
        obstacle = _unusual_format(path, config)
        if obstacle is not None:
            return {}, obstacle
        stored = {name: one for file in _safetensors_files(path) for name, one in stored_tensors(path, file).items()}
    return stored, None if stored else "they are not in safetensors files"


@contextmanager
def unreadable_model(path: str) -> Iterator[None]:
    """A context that makes a UserError of what reading a model's files raises."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, ImportError, SafetensorError, UnpicklingError) as error:
        raise UserError(f"model.path: {path}: no causal language model can be loaded: {first_line(error)}") from None


def check_nothing_is_missing(path: str, missing: set[str]) -> None:
    """Raises UserError where there are weights that nothing would be loaded into."""
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise UserError(
            f"model.path: {path}: found no weights for {min(missing)}{more}, which would be random numbers; expected "
            "all weights of a causal language model (not a classifier, a bare decoder, or an adapter)"
        )


def _unusual_format(path: str, config: PretrainedConfig) -> str | None:
    """What of a model's description makes transformers do more than copy weights."""
    for key in ("quantization_config", "transformers_weights", "fusion_config"):
        if getattr(config, key, None) is not None:
            return f"config.json has a {key}"
    if find_adapter_config_file(path) is not None:
        return "there is an adapter among them"
    return None


def _safetensors_files(path: str) -> list[Path]:
    """In the order in which transformers reads them: of two tensors of one name, the later counts."""

    def find(name: str) -> str | None:
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False)

    single = find(SAFE_WEIGHTS_NAME)
    if single is not None:
        return [Path(single)]
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return []
    files, _ = get_checkpoint_shard_files(path, index)
    return [Path(file) for file in files]


def _by_name_in_model(
    model: PreTrainedModel, stored: dict[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], str | None]:
    """The stored tensors that the model has, by its own names for them, and the obstacle."""
    for module in model.modules():
        if type(module)._load_from_state_dict is not PreTrainedModel._load_from_state_dict:
            return {}, f"{type(module).__name__} loads its weights in a way of its own"
    expected, tensors = model.state_dict(), {}
    for key, place in find_places(model, stored)[0].items():
        if place.name not in expected:
            continue
        if place.is_converted:
            return {}, f"{key} is converted to {place.name}"
        if place.name in tensors:
            return {}, f"two of them are {place.name}"
        if stored[key].dtype not in DTYPES:
            return {}, f"{key} is {stored[key].dtype}"
        tensors[place.name] = stored[key]
    return tensors, None


class Place(NamedTuple):
    """Where transformers puts a stored tensor."""

    name: str
    """In the model, which need not have it."""
    is_converted: bool
    """Whether it is joined with others, divided or transposed there."""


def find_places(
    model: PreTrainedModel, keys: Iterable[str]
) -> tuple[dict[str, Place], list[WeightRenaming | WeightConverter]]:
    """The place of each stored tensor, and the renamings and conversions, which know which of them were used.

    Follows transformers' loading under ZeRO-3: renamings, then the prefix of the bare decoder where it is missing.
    """
    expected, mapping = model.state_dict(), get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [cast(WeightRenaming, entry) for entry in mapping if not isinstance(entry, WeightConverter)]
    prefix, places = model.base_model_prefix, {}
    for key in keys:
        name, conversion = key, None
        if mapping:
            name, conversion = rename_source_key(
                key, renamings, converters, base_model_prefix=prefix, meta_state_dict=expected
            )
        if f"{prefix}.{name}" in expected:
            name = f"{prefix}.{name}"
        places[key] = Place(name, conversion is not None)
    return places, cast(list[WeightRenaming | WeightConverter], mapping)
