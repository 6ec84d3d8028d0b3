"""The place of every weight of a model in its files, from configuration and headers alone."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, find_adapter_config_file
from transformers.utils.hub import get_checkpoint_shard_files

from vcore_ds.common.errors import UserError, first_line
from vcore_ds.models.causal_lm import auto_class
from vcore_ds.models.configuration import read_config
from vcore_ds.models.model_folder import build_empty_model, check_shapes, stored_tensors
from vcore_ds.models.safetensors_ranges import DTYPES, StoredTensor


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
    model = build_empty_model(path, config)
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
    with refuse_unreadable_model(path):
        obstacle = _unusual_format(path, config)
        if obstacle is not None:
            return {}, obstacle
        stored = {name: one for file in _safetensors_files(path) for name, one in stored_tensors(path, file).items()}
    return stored, None if stored else "they are not in safetensors files"


@contextmanager
def refuse_unreadable_model(path: str) -> Iterator[None]:
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


# A model's weights as its folder stores them, which is not as they are in memory.
#
# transformers renames weights when it loads them, joins what files hold one by one (the experts of a layer, say) into
# one tensor, and leaves out what the model has no use for: layers that predict further tokens, a vision tower. A
# result has the names and shapes of the folder that was loaded, and what is not trained there is copied from it, so
# that whatever opens the one opens the other.


def describe_weights(path: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name -> shape and dtype (a tensor on the meta device, without memory) of every weight that a model of `path`'s
    architecture has in memory, in Hugging Face's order; tied weights once."""
    config = read_config(path)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=dtype)
    weights: dict[str, Tensor] = dict(model.named_parameters())
    all_parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return weights | {name: kept for name, kept in model.state_dict().items() if name not in all_parameters}


class Part(NamedTuple):
    """Weights that are stored together."""

    names: tuple[str, ...]
    """In memory; one, unless a stored tensor holds several."""
    stored: dict[str, Tensor]
    """By the name in the files, shape and dtype on the meta device."""


class FolderWeights:
    """What a folder stores for the weights of a model.

    Attributes:
        path: of the input.
        is_whole: whether all of the input is there again; not where its files cannot be read by range (pickled,
            quantized): then the names are those of transformers' `save_pretrained`, and nothing is copied.
        weights: shape and dtype of every weight in memory, by its name.
        parts: the weights, in the model's order.
        copied: the tensors in the input's files that are no parameter of the model, by their names there: buffers,
            which no step changes, and what the model has not at all.
        stored: shape and dtype of every tensor of the folder to be written, by its name there.
    """

    def __init__(self, path: str, weights: Mapping[str, Tensor]):
        """Args:
        path: folder or hub id that the model was loaded from.
        weights: shape and dtype of every weight in memory by its name, tied ones once.
        """
        self.path, self.weights = path, weights
        config = read_config(path)
        self._model = build_empty_model(path, config)
        headers, obstacle = read_headers(path, config)
        self.is_whole = obstacle is None
        places, conversions = find_places(self._model, headers)
        if self.is_whole:
            # Only what the input has gone through is undone: experts that its files hold joined stay so.
            self._conversions: list[WeightTransform] = [one for one in conversions if one.was_used()]
        else:
            self._conversions = [
                one
                for one in get_model_conversion_mapping(self._model, add_legacy=False)
                if not isinstance(one, PrefixChange)
            ]
        # Where `revert_weight_conversion` looks for them.
        self._model._weight_conversions = self._conversions  # type: ignore[assignment]
        # Not left to transformers, whose renamings may differ on the way back: Kimi-Linear's dense MLP would get the
        # name of the sparse ones.
        self._renamed = {place.name: key for key, place in places.items() if not place.is_converted}
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        self.copied: dict[str, StoredTensor] = {
            key: headers[key]
            for key, place in places.items()
            if place.name not in parameters and headers[key].dtype in DTYPES
        }
        copied = {places[key].name for key in self.copied}
        self.parts = [
            Part(names, self.store(names, {name: weights[name] for name in names}))
            for names in self._together(name for name in weights if name not in copied)
        ]
        self.stored = {name: like for part in self.parts for name, like in part.stored.items()}
        self.stored |= {
            name: torch.empty(one.shape, dtype=DTYPES[one.dtype], device="meta") for name, one in self.copied.items()
        }

    def _together(self, names: Iterable[str]) -> Iterable[tuple[str, ...]]:
        """The names in memory of each part: those of which one stored tensor is made."""
        reversed_ones = [one.reverse_transform() for one in self._conversions[::-1]]
        converters = [one for one in reversed_ones if isinstance(one, WeightConverter)]
        parts: dict[str, list[str]] = {}
        for name in names:
            joined, pattern = rename_source_key(name, [], converters)
            parts.setdefault(name if pattern is None else joined, []).append(name)
        return [tuple(part) for part in parts.values()]

    def store(self, names: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a part, by their names in memory, as those that are stored, by their names in the files.

        Values are moved, never changed: what is linear in the one is so in the other.
        """
        if len(names) == 1 and names[0] in self._renamed:
            return {self._renamed[names[0]]: tensors[names[0]]}
        return revert_weight_conversion(self._model, tensors)

    def stream(self, weights: Iterable[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor | None]]:
        """What is stored of a stream of weights, by its names in the files, as soon as all of a part has come.

        Args:
            weights: name in memory and tensor, or None where another rank keeps it; all of a part or none of it.
        """
        part_of = {name: part for part in self.parts for name in part.names}
        held: dict[tuple[str, ...], dict[str, Tensor | None]] = {}
        for name, tensor in weights:
            part = part_of[name]
            tensors = held.setdefault(part.names, {})
            tensors[name] = tensor
            if len(tensors) == len(part.names):
                whole = {name: tensor for name, tensor in held.pop(part.names).items() if tensor is not None}
                yield from (self.store(part.names, whole) if whole else dict.fromkeys(part.stored)).items()

    def read_copied(self, name: str) -> Tensor:
        """One of `copied`, as it is stored."""
        with safe_open(self.copied[name].file, framework="pt") as file:
            return file.get_tensor(name)
