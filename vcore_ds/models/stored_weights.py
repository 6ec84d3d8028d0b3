"""Mapping between a model's weights in memory and the tensors in its files, from configuration and headers alone.

When transformers loads weights, it renames them, fuses some that files store separately (such as the experts of a
layer), and drops those that the model does not use: multi-token prediction layers, a vision tower. A trained model is
written with the names and shapes of the folder that was loaded, and untrained tensors are copied from it, so that every
program that opens the one opens the other.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    revert_weight_conversion,
)

from vcore_ds.common.errors import UserError
from vcore_ds.models.description import build_empty_model, read_model
from vcore_ds.models.safetensors_ranges import DTYPES, StoredTensor, read_tensor


class StoredWeights(NamedTuple):
    """Positions of a model's tensors in its files, or why they cannot be read by range."""

    tensors: dict[str, StoredTensor]  # parameters and buffers, by their names in the model
    missing: set[str]  # names in the model that are not in the files, since their weights are tied to others
    obstacle: str | None  # as in `ModelDescription`

    def fingerprint(self) -> str:
        """Hash the layout of the files, without their folder."""
        places = sorted((name, stored.file.name, *stored[1:]) for name, stored in self.tensors.items())
        return hashlib.sha256(repr((places, self.obstacle)).encode()).hexdigest()


def find_stored_weights(path: str) -> StoredWeights:
    """Locate the model's weights by reading the headers of its files; downloads the files of a hub id first. Raises
    UserError if weights are missing, have other shapes than the configuration, or are in unreadable files."""
    description = read_model(path)
    if description.obstacle is not None:
        return StoredWeights({}, set(), description.obstacle)
    model = description.empty
    tensors, obstacle = _map_to_model(model, description.stored)
    if obstacle is not None:
        return StoredWeights({}, set(), obstacle)
    check_shapes(path, model, {name: stored.shape for name, stored in tensors.items()})
    missing = model.state_dict().keys() - tensors.keys()
    untied = set(missing)
    model.tie_weights(missing_keys=untied, recompute_mapping=False)
    if untied and model._keys_to_ignore_on_load_missing:
        return StoredWeights({}, set(), f"{min(untied)} is not in the files")
    check_nothing_is_missing(path, untied)
    return StoredWeights(tensors, set(missing), None)


def check_nothing_is_missing(path: str, missing: set[str]) -> None:
    """Raise UserError if the files lack weights of the model."""
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise UserError(
            f"model.path: {path}: found no weights for {min(missing)}{more}, which would be initialised at random; "
            "expected all weights of a causal language model (not a classifier, a bare decoder, or an adapter)"
        )


def check_shapes(path: str, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError if a weight has another shape in the model than in the files.

    Names that only one of them has are checked when weights are loaded, since transformers renames and fuses many.
    """
    wrong = [
        f"{name} {list(shapes[name])}, expected {list(tensor.shape)}"
        for name, tensor in model.state_dict().items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    ]
    if wrong:
        more = f" ({len(wrong) - 1:,} more weights do not fit)" if len(wrong) > 1 else ""
        raise UserError(
            f"model.path: {path}: the weights do not fit config.json: found {wrong[0]}{more}; configuration and "
            "weights are of different models"
        )


def _map_to_model(
    model: PreTrainedModel, stored: dict[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], str | None]:
    """Return the stored tensors by their names in the model, or why that is impossible."""
    for module in model.modules():
        if type(module)._load_from_state_dict is not PreTrainedModel._load_from_state_dict:
            return {}, f"{type(module).__name__} customises the loading of its weights"
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


def rename_source_key(
    source_key: str,
    weight_renamings: list[WeightRenaming],
    weight_converters: list[WeightConverter],
    base_model_prefix: str | None = None,
    meta_state_dict: dict[str, Tensor] | None = None,
    reverse: bool = False,
) -> tuple[str, str | None]:
    """As transformers' function, but names of the model stay, which its loading under ZeRO-3 renames: those of DeepSeek
    V4's files end in `.norm.weight` in the decoder and in its compressors."""
    name, pattern = _rename_source_key(
        source_key, weight_renamings, weight_converters, base_model_prefix, meta_state_dict, reverse
    )
    is_known = meta_state_dict is not None and name not in meta_state_dict and source_key in meta_state_dict
    return (source_key, None) if is_known else (name, pattern)


_rename_source_key = core_model_loading.rename_source_key  # `engine.sharded_loading` replaces it


class Place(NamedTuple):
    """The parameter into which transformers loads a stored tensor."""

    name: str  # in the model, which need not have it
    is_converted: bool  # whether the tensor is fused with others, split or transposed


def find_places(
    model: PreTrainedModel, keys: Iterable[str]
) -> tuple[dict[str, Place], list[WeightRenaming | WeightConverter]]:
    """Return the place of each stored tensor, and transformers' renamings and conversions, which record their use.

    Follows transformers' loading under ZeRO-3: it renames, then adds the prefix of the bare decoder if that is missing.
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


def describe_weights(path: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return meta tensors with shape and dtype of all weights that the model has in memory, by name, in Hugging Face's
    order; tied weights once."""
    model = build_empty_model(path, read_model(path).config, dtype=dtype)
    # ZeRO-3 trains all parameters in one dtype, also those that transformers keeps in fp32 (DeepSeek-V3's router).
    weights: dict[str, Tensor] = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    all_parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return weights | {name: tensor for name, tensor in model.state_dict().items() if name not in all_parameters}


class WeightGroup(NamedTuple):
    """Weights that are converted together when they are stored."""

    names: tuple[str, ...]  # in memory; one, unless a stored tensor contains several
    stored: dict[str, Tensor]  # meta tensors by their names in the files


class FolderWeights:
    """The tensors of a folder to be written for a trained model, in the format of the input folder.

    Attributes:
        path: of the input.
        is_complete: whether all tensors of the input are written. Not if its files cannot be read by range (pickled,
            quantized): then the names are those of `save_pretrained`, and nothing is copied.
        weights: shape and dtype of every weight in memory, by name.
        groups: the weights, in the model's order.
        copied: tensors of the input that are no parameters of the model, by their names in the files: buffers, which
            training does not change, and tensors that the model does not use.
        stored: shape and dtype of every tensor to be written, by its name in the files.
    """

    def __init__(self, path: str, weights: Mapping[str, Tensor]):
        """`path`: folder or hub id that the model was loaded from; `weights`: see the attribute, tied weights once."""
        self.path, self.weights = path, weights
        description = read_model(path)
        self._model, self.is_complete = description.empty, description.obstacle is None
        headers = description.stored if self.is_complete else {}
        self._shapes = {key: torch.Size(stored.shape) for key, stored in headers.items()}
        places, conversions = find_places(self._model, headers)
        if self.is_complete:
            # Reverse only conversions that were applied at load: experts that were stored fused stay fused.
            self._conversions: list[WeightTransform] = [entry for entry in conversions if entry.was_used()]
        else:
            mapping = get_model_conversion_mapping(self._model, add_legacy=False)
            self._conversions = [entry for entry in mapping if not isinstance(entry, PrefixChange)]
        # Read by `revert_weight_conversion`.
        self._model._weight_conversions = self._conversions  # type: ignore[assignment]
        # transformers' reversed renamings may be wrong: Kimi-Linear's dense MLP would get the name of the sparse ones.
        self._renamed = {place.name: key for key, place in places.items() if not place.is_converted}
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        self.copied: dict[str, StoredTensor] = {
            key: headers[key]
            for key, place in places.items()
            if place.name not in parameters and headers[key].dtype in DTYPES
        }
        copied = {places[key].name for key in self.copied}
        self.groups = [
            WeightGroup(names, self.store(names, {name: weights[name] for name in names}))
            for names in self._group_names(name for name in weights if name not in copied)
        ]
        self.stored = {name: meta for group in self.groups for name, meta in group.stored.items()}
        self.stored |= {
            name: torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta")
            for name, stored in self.copied.items()
        }

    def _group_names(self, names: Iterable[str]) -> Iterable[tuple[str, ...]]:
        """Group names in memory into those that are stored in one tensor."""
        reversed_conversions = [conversion.reverse_transform() for conversion in self._conversions[::-1]]
        converters = [conversion for conversion in reversed_conversions if isinstance(conversion, WeightConverter)]
        groups: dict[str, list[str]] = {}
        for name in names:
            fused, pattern = rename_source_key(name, [], converters)
            groups.setdefault(name if pattern is None else fused, []).append(name)
        return map(tuple, groups.values())

    def store(self, names: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tensors of a group from names and shapes in memory to those in the files.

        Values are rearranged, never changed, so the conversion is linear.
        """
        if len(names) == 1 and names[0] in self._renamed:
            return {self._renamed[names[0]]: tensors[names[0]]}
        # transformers transposes some experts where the model's shape demands it (Qwen3-VL-MoE), and never back.
        return {
            key: tensor if tensor.shape == self._shapes.get(key, tensor.shape) else tensor.mT.contiguous()
            for key, tensor in revert_weight_conversion(self._model, tensors).items()
        }

    def stream(self, weights: Iterable[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor | None]]:
        """Convert a stream of weights to stored tensors, yielding each group as soon as it is complete. `weights`: name
        in memory and tensor, or None if another rank writes it; for all tensors of a group or none."""
        group_by_name = {name: group for group in self.groups for name in group.names}
        held: dict[tuple[str, ...], dict[str, Tensor | None]] = {}
        for name, tensor in weights:
            group = group_by_name[name]
            tensors = held.setdefault(group.names, {})
            tensors[name] = tensor
            if len(tensors) == len(group.names):
                present = {name: tensor for name, tensor in held.pop(group.names).items() if tensor is not None}
                yield from (self.store(group.names, present) if present else dict.fromkeys(group.stored)).items()

    def read_copied(self, name: str) -> Tensor:
        """Read one of `copied` from the input's files."""
        return read_tensor(self.copied[name], name)
