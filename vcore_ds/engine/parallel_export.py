"""The weights of parallel layers as a Hugging Face model has them: from the live engine, layer by layer.

A layer is gathered over the ranks that hold its shards, then over those that share it.
"""

import itertools
from collections.abc import Iterator, Mapping

import deepspeed
import torch
from torch import Tensor, nn

from vcore_ds.distributed import layout
from vcore_ds.engine.zero3 import Engine
from vcore_ds.models.megatron.weights import pieces, put_together


def gathered_parallel(
    engine: Engine, owner: Mapping[str, int], *, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor | None]]:
    """Name and whole tensor of each of `weights`, on the CPU of the rank that owns it, None on the others.

    Each item may be a collective: all ranks take all.

    Args:
        owner: the rank of the job by the weight's name.
        weights: shape and dtype of every weight of the Hugging Face model, in its order.
    """
    size, order = layout.size("tensor"), {name: i for i, name in enumerate(weights)}
    of_ranks = [pieces(engine.module.config, rank=rank, size=size) for rank in range(size)]
    layer_of = {id(p): number for number, layer in enumerate(engine.module.layers) for p in layer.parameters()}
    named = engine.module.named_parameters()
    for _, group in itertools.groupby(named, key=lambda item: layer_of.get(id(item[1]), item[0])):
        parameters: list[tuple[str, nn.Parameter]] = list(group)
        names = {piece.name for name, _ in parameters for piece in of_ranks[0][name]}
        mine = {
            name: torch.empty(weights[name].shape, dtype=weights[name].dtype)
            for name in names
            if owner[name] == layout.rank("job")
        }
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in parameters]):
            for name, parameter in parameters:
                of_all = layout.all_gather("tensor", parameter.detach())
                for parts, of_rank in zip(of_ranks, of_all, strict=True):
                    put_together(mine, of_rank, parts[name])
        for name in sorted(names, key=order.__getitem__):
            yield name, mine.pop(name, None)
