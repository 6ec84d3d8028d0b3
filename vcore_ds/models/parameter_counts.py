"""How many parameters a model has, and how many of them are trained."""

from collections.abc import Mapping

import torch
from transformers import PretrainedConfig

from vcore_ds.config.sections import LoraConfig
from vcore_ds.errors import UserError
from vcore_ds.models.configuration import read_config
from vcore_ds.models.folder_check import empty_model
from vcore_ds.models.language_model import freeze_towers
from vcore_ds.models.lora import add_lora
from vcore_ds.planning.memory_settings import ParameterCounts


def count_parameters(path: str, lora: LoraConfig | None, tensor: int = 1) -> ParameterCounts:
    """The model's parameters, or a rank's part with tensor parallelism, from a model without weights; zeros
    where it cannot be read, which is said elsewhere.

    Args:
        path: of the model.
        lora: its adapters, which are then all that is trained.
        tensor: degree of tensor parallelism.
    """
    try:
        config = read_config(path)
        model = empty_model(path, config)
        weights = dict(model.named_parameters())
        freeze_towers(model)
        if lora is not None:
            with torch.device("meta"):
                adapted = add_lora(model, lora)
            weights |= {name: p for name, p in adapted.named_parameters() if p.requires_grad}
        if tensor > 1:
            return _count_part(path, config, lora, tensor, weights)
    except (UserError, OSError, ValueError):
        return ParameterCounts(0, 0)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return ParameterCounts(sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained))


def _count_part(
    path: str, config: PretrainedConfig, lora: LoraConfig | None, tensor: int, weights: Mapping[str, torch.Tensor]
) -> ParameterCounts:
    """What the first rank of a tensor group has, which is as much as any.

    Args:
        weights: of the model by name, and of its adapters by their names in peft.
    """
    from vcore_ds.models.megatron.adapters import adapted_layers, adapter_pieces
    from vcore_ds.models.megatron.weights import pieces

    place = dict(rank=0, size=tensor)
    num_base = sum(piece.of(weights[piece.name]).numel() for piece in pieces(config, **place).values())
    if lora is None:
        return ParameterCounts(num_base, num_base)
    added = adapter_pieces(adapted_layers(path, config, lora), config, lora, **place).values()
    num_trained = sum(piece.of(weights[piece.name]).numel() for piece in added)
    return ParameterCounts(num_base + num_trained, num_trained)
