"""A temporary perturbation of the parameter shards, undone bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vcore_ds.distributed import layout
from vcore_ds.engine.flat_shards import chunks
from vcore_ds.engine.zero3 import Engine
from vcore_ds.random_streams import Stream, torch_seed
from vcore_ds.utility.direction import Direction


@dataclass
class Perturbation:
    """What a perturbation did to the parameters."""

    changed_fraction: float
    """Share of the trained parameters, over all ranks, that the perturbation changed at all. In bf16 a small epsilon is
    below half an ulp of most weights and does not change them."""


@contextmanager
def perturbed(
    engine: Engine, direction: Direction, epsilon: float, *, stochastic_rounding_seed: int | None = None
) -> Iterator[Perturbation]:
    """A context in which the model computes with `theta - epsilon * v` (Section "One-Backward Trick").

    Every rank shifts its own shards, in fp32 from the optimizer's master weights, and rounds to the parameter dtype: to
    the nearest value, or stochastically where there is a seed. With stochastic rounding the shift starts from the
    parameter instead of its master, so that the expectation of the perturbed parameter is exactly `epsilon * v` away
    from the point where `l(theta)` is taken; masters rounded stochastically would move at random even with epsilon 0.
    Afterwards, also when the body raises, the shards hold the bytes they held before.

    Yields the share of parameters that changed. Entering is a collective (one reduction of two numbers).
    """
    shards, generator = engine.shards, None
    if stochastic_rounding_seed is not None:
        generator = torch.Generator(engine.device)
        generator.manual_seed(torch_seed(Stream.STOCHASTIC_ROUNDING, stochastic_rounding_seed, layout.rank("shards")))
    # DeepSpeed casts the masters to the parameter dtype after every step, so casting them again restores the bytes
    # without a copy. Offloaded masters would have to travel twice, so a copy of the shards is kept instead.
    kept = [shard.clone() for shard in shards.parameters()] if shards.optimizer_is_offloaded else shards.masters()
    try:
        num_changed = torch.zeros((), dtype=torch.int64, device=engine.device)
        with engine.changing_shards():
            for shard, master, v in chunks(shards.parameters(), shards.masters(), direction.buffers):
                before = shard.to(engine.device)  # from host memory where parameters are offloaded
                start = master.to(engine.device) if generator is None else before.float()
                shifted = start.sub(v.float(), alpha=epsilon)
                if generator is not None and shard.dtype == torch.bfloat16:
                    shifted = round_stochastically(shifted, generator)
                shifted = shifted.to(shard.dtype)
                num_changed += (shifted != before).sum()
                shard.copy_(shifted)
        changed, total = layout.sum_over("job", [int(num_changed), shards.num_elements])
        yield Perturbation(changed_fraction=changed / max(total, 1))
    finally:
        with engine.changing_shards():
            for shard, before in zip(shards.parameters(), kept, strict=True):
                shard.copy_(before)


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rounds fp32 values to one of their two bf16 neighbours, with probabilities that keep the expectation.

    The result is fp32 too. Values that bf16 can represent do not change.
    """
    # bf16 is the upper half of fp32: a random lower half, added, carries into it as often as the remainder is large.
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    return (values.contiguous().view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32)
