"""A model's weights as its folder stores them, which is not as they are in memory.

transformers renames weights when it loads them, joins what files hold one by one (the experts of a layer, say) into one
tensor, and leaves out what the model has no use for: layers that predict further tokens, a vision tower. A result has
the names and shapes of the folder that was loaded, and what is not trained there is copied from it, so that whatever
opens the one opens the other.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightTransform,
    rename_source_key,
    revert_weight_conversion,
)

from vcore_ds.files.safetensors_ranges import DTYPES, StoredTensor
from vcore_ds.models.configuration import read_config
from vcore_ds.models.folder_check import empty_model
from vcore_ds.models.language_model import auto_class
from vcore_ds.models.stored_weights import find_places, read_headers


def described_weights(path: str, dtype: torch.dtype) -> dict[str, Tensor]:
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
        self._model = empty_model(path, config)
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
