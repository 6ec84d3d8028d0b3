"""The layout of a batch on the ranks: sequence-parallel size, and the sequences of each group, that take least time."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from vcore_ds.common.text import count
from vcore_ds.planning.packing import (
    Waste,
    group_batch,
    list_padded_lengths,
    measure_waste,
    pack_batch,
    padded_length,
    split_batch,
)
from vcore_ds.planning.time_model import TimeModel

FREE_TOKENS = 1024
"""Tokens of a rank that sequences may always share, however short the longest one is: any model that trains at all has
memory for them."""


@dataclass(frozen=True)
class MicroBatchLimit:
    """Limits of a micro-batch: one pack of at most N tokens per rank of a group, or N unpacked sequences."""

    # Maximum tokens of a pack on each rank of a sequence-parallel group; None where the recipe does not say
    pack_tokens_per_rank: int | None = None
    # Maximum unpacked sequences of a micro-batch; None for the number that takes least time without more tokens than
    # the longest sequence has (or `FREE_TOKENS`)
    num_sequences: int | None = 1
    may_pack: bool = False  # whether sequences are packed, where `num_sequences` is None

    @property
    def is_packed(self) -> bool:
        """Whether a micro-batch is one pack."""
        return self.pack_tokens_per_rank is not None or (self.num_sequences is None and self.may_pack)

    def max_tokens(self, sequence_parallel: int, longest: int) -> int:
        """Maximum tokens of a pack, or of a micro-batch of unpacked sequences where `num_sequences` is None, in a batch
        whose longest sequence has `longest` tokens."""
        if self.pack_tokens_per_rank is not None:
            return sequence_parallel * self.pack_tokens_per_rank
        return max(sequence_parallel * FREE_TOKENS, padded_length(longest, sequence_parallel))


@dataclass(frozen=True)
class BatchLayout:
    """A global batch on all ranks of a job, in sequence-parallel groups of `sequence_parallel` neighbouring ranks."""

    sequence_parallel: int
    num_ranks: int
    # Ids by micro-step and group. Groups beyond the last one that stands here have nothing to do.
    micro_steps: list[list[list[int]]]
    waste: Waste
    most_tokens: int  # tokens of the largest micro-batch on one rank, padding included
    is_packed: bool  # whether a group's sequences of a micro-step are one pack
    time: float  # predicted time of a forward, in units of one token's linear layers

    @property
    def ids(self) -> list[int]:
        """All ids, in the order of micro-steps and groups."""
        return [i for groups in self.micro_steps for group in groups for i in group]

    def list_group_ids(self, group: int) -> list[list[int]]:
        """List the ids by micro-step of one group, from 0."""
        return [groups[group] if group < len(groups) else [] for groups in self.micro_steps]


def list_sequence_parallel_sizes(num_ranks: int, num_heads: int) -> list[int]:
    """Possible sequence-parallel sizes, in ascending order: they divide the ranks and the query heads.

    Key and value heads set no condition: they are repeated for the exchange where there are too few.
    """
    most = math.gcd(num_ranks, num_heads)
    small = [k for k in range(1, math.isqrt(most) + 1) if most % k == 0]
    return sorted({*small, *(most // k for k in small)})


def select_sizes_with_room(longest: int, sizes: Iterable[int], limit: MicroBatchLimit) -> list[int]:
    """Select the sizes whose packs have room for a sequence of `longest` tokens."""
    return [k for k in sizes if limit.pack_tokens_per_rank is None or k * limit.pack_tokens_per_rank >= longest]


def lay_out_batch(
    ids: Sequence[int],
    lengths: Sequence[int],
    *,
    parallel_sizes: Sequence[int],
    limit: MicroBatchLimit,
    time_model: TimeModel,
) -> BatchLayout:
    """Lay out the global batch `ids`, whose sequence `ids[i]` has `lengths[i]` tokens, on the ranks of a job.

    Deterministic: every rank comes to the same result. All groups of the pass have the same size of `parallel_sizes`
    (ascending; the longest sequence fits into a pack of at least the last), the smaller one where two take as long.
    """
    best: tuple[int, list[list[list[int]]]] | None = None
    best_time = float("inf")
    micro_step = time_model.micro_step
    for k in select_sizes_with_room(max(lengths), parallel_sizes, limit):
        num_groups = time_model.num_ranks // k
        exchanges = time_model.estimate_exchange_latency(k)
        sequence_time = partial(
            _estimate_sequence_time, k=k, work=time_model.work, exchange=time_model.estimate_exchange(k)
        )
        max_tokens = limit.max_tokens(k, max(lengths))
        if limit.is_packed:
            positions = pack_batch(
                lengths,
                num_groups=num_groups,
                pack_tokens=max_tokens,
                work=time_model.work,
                micro_step_cost=k * (micro_step + exchanges),
            )
        elif limit.num_sequences is not None:
            positions = split_batch(lengths, num_groups=num_groups, micro_batch_size=limit.num_sequences)
        else:
            positions = group_batch(
                lengths,
                num_groups=num_groups,
                sequence_parallel=k,
                most_tokens=max_tokens,
                sequence_time=sequence_time,
                micro_step_time=exchanges + micro_step,
            )
        time = sum(
            _estimate_slowest_time(groups, lengths, k, limit, sequence_time) + exchanges + micro_step
            for groups in positions
        )
        if time < best_time:
            best, best_time = (k, positions), time
    assert best is not None  # `parallel_sizes` hold the longest sequence
    size, micro_steps = best
    waste, most = measure_waste(
        micro_steps,
        lengths,
        sequence_parallel=size,
        num_ranks=time_model.num_ranks,
        work=time_model.work,
        is_packed=limit.is_packed,
    )
    in_ids = [[[ids[i] for i in group] for group in groups] for groups in micro_steps]
    return BatchLayout(size, time_model.num_ranks, in_ids, waste, most, limit.is_packed, best_time)


def _estimate_slowest_time(
    groups: Sequence[Sequence[int]],
    lengths: Sequence[int],
    k: int,
    limit: MicroBatchLimit,
    sequence_time: Callable[[int], float],
) -> float:
    """Estimate the time of the group with the most work, in units of one token's linear layers."""
    slowest = 0.0
    for positions in groups:
        computed = [lengths[i] for i in positions]
        if not limit.is_packed:
            computed = list_padded_lengths(computed, k, is_packed=False)
        slowest = max(slowest, sum(map(sequence_time, computed)))
    return slowest


def _estimate_sequence_time(num_tokens: int, k: int, work: Callable[[int], float], exchange: float) -> float:
    """Estimate the time of one sequence at sequence-parallel size k, in units of one token's linear layers."""
    return (work(num_tokens) + exchange * num_tokens) / k


# Utilization of the ranks.

LOW_UTILIZATION = 0.8  # share of useful work below which a run warns


@dataclass(frozen=True)
class Utilization:
    """Use of the ranks in the passes over some batches."""

    typical_parallel_size: int  # sequence-parallel size of most of the passes
    waste: Waste  # the waste of all passes together
    most_tokens: int  # tokens of the largest micro-batch on one rank, padding included
    time: float  # predicted time of all passes together, in units of one token's linear layers

    @property
    def is_low(self) -> bool:
        """Whether `LOW_UTILIZATION` is not reached, which is worth a warning."""
        return self.waste.utilization < LOW_UTILIZATION

    def describe(self) -> str:
        """Such as `sequence-parallel size 8; slowest rank 1.026 x mean, 97% useful work; no idle ranks; 0.27% padding`.
        With tensor parallelism a rank is a group."""
        num_idle = round(self.waste.mean_idle_ranks)
        idle = count(num_idle, "idle rank") if num_idle else "no idle ranks"
        return (
            f"sequence-parallel size {self.typical_parallel_size}; slowest rank {self.waste.rank_imbalance:.3f} x "
            f"mean, {self.waste.utilization:.0%} useful work; {idle}; {self.waste.padding_share:.2%} padding"
        )


def summarize(layouts: Sequence[BatchLayout]) -> Utilization:
    """Sum up the utilization of one or more passes."""
    total = layouts[0].waste
    for layout in layouts[1:]:
        total += layout.waste
    sizes = Counter(layout.sequence_parallel for layout in layouts)
    return Utilization(
        min(sizes, key=lambda k: (-sizes[k], k)),
        total,
        max(layout.most_tokens for layout in layouts),
        sum(layout.time for layout in layouts),
    )


def count_ranks(number: int, tensor: int) -> str:
    """Such as `8 ranks`, or `4 tensor-parallel groups of 2 ranks`."""
    return count(number, "rank") if tensor == 1 else f"{count(number, 'tensor-parallel group')} of {tensor} ranks"
