"""A local perturbation of the parameter shards that is taken back bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from . import distributed
from .direction import Direction
from .zero3 import Engine


@dataclass
class Perturbation:
    changed_fraction: float
    """Share of the trainable parameters, over all ranks, that the perturbation changed at all. In bf16 a
    small epsilon is below half an ulp of most weights and changes nothing."""


@contextmanager
def perturbed(engine: Engine, direction: Direction, epsilon: float) -> Iterator[Perturbation]:
    """Inside, the model computes with `theta - epsilon * v` (Section "One-Backward Trick"); every rank shifts its
    own shards.

    The shift is made in fp32 from the optimizer's master shard and then rounded to the parameter dtype.
    Afterwards, also when the body raises, the shards hold the bytes they held before.

    Yields the share of parameters that changed. Entering is a collective (one reduction of two numbers).
    """
    saved: list[torch.Tensor | None] = []
    num_changed = num_total = 0
    offloaded = engine.deepspeed.zero_offload_optimizer() is not None and (
        engine.deepspeed.zero_offload_optimizer().device != OffloadDeviceEnum.none
    )
    try:
        for _, parameter in engine.trainable:
            shard = parameter.ds_tensor.data
            numel = engine.local_numel(parameter)
            # DeepSpeed casts the master shard to the parameter dtype after every step, so casting it again
            # restores the bytes, with nothing kept. An offloaded master would travel twice: keep the shard.
            saved.append(shard.clone() if offloaded else None)
            shifted = engine.local_master(parameter).sub(direction.shard(parameter)[:numel].float(), alpha=epsilon)
            shifted = shifted.to(shard.dtype)
            num_changed += int((shifted != shard[:numel]).sum())
            num_total += numel
            shard[:numel].copy_(shifted)
        engine.forget_gathered_parameters()
        changed, total = distributed.sum_over_ranks([num_changed, num_total])
        yield Perturbation(changed_fraction=changed / max(total, 1))
    finally:
        for (_, parameter), shard_before in zip(engine.trainable, saved, strict=False):
            shard = parameter.ds_tensor.data
            if shard_before is not None:
                shard.copy_(shard_before)
            else:
                shard[: engine.local_numel(parameter)].copy_(engine.local_master(parameter))
        engine.forget_gathered_parameters()
