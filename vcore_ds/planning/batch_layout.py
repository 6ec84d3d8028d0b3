"""The layout of a batch on the ranks: sequence-parallel size, and the sequences of each group, that take least time.

Sequences are assigned to micro-steps: packs of equal cost, one for each sequence-parallel group, or a few unpacked
sequences. There are never more groups here than sequences; further groups are idle.
"""

import heapq
import itertools
import math
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import reduce

from vcore_ds.common.text import count
from vcore_ds.planning.passes import TimeModel

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


_LENGTH_MULTIPLE = 8  # micro-batches are padded to a multiple of this many tokens, which suits matrix units

_ROUNDING = 1e-9
"""Relative difference of two times that counts as none: sums of floats round as the version of Python does, and a
micro-step that saves nothing else is not worth its kernels."""


@dataclass(frozen=True)
class Waste:
    """The padding of one pass over a batch, or of several together, and the time that ranks wait for each other."""

    num_tokens: int
    num_computed_tokens: int  # with padding
    mean_work: float  # mean working time of a rank, attention included, in units of one token's linear layers
    slowest_work: float  # the same of the slowest rank of each micro-step, for which all wait
    num_idle_ranks: int  # ranks that have no sequence in any micro-step; summed over the passes
    num_passes: int = 1

    @property
    def padding_share(self) -> float:
        """Share of all computed tokens that is padding."""
        return 1.0 - self.num_tokens / self.num_computed_tokens

    @property
    def rank_imbalance(self) -> float:
        """Time of the slowest rank of each micro-step over the mean rank's, idle ones among them."""
        return self.slowest_work / self.mean_work

    @property
    def utilization(self) -> float:
        """Share of the ranks' time that is useful work: the mean rank's of the slowest one's."""
        return self.mean_work / self.slowest_work

    def __add__(self, other: "Waste") -> "Waste":
        return Waste(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class BatchLayout:
    """A global batch on all ranks of a job, in sequence-parallel groups of `sequence_parallel` neighbouring ranks."""

    sequence_parallel: int
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
    best_time, longest = float("inf"), max(lengths)
    for k in parallel_sizes:
        if limit.pack_tokens_per_rank is not None and k * limit.pack_tokens_per_rank < longest:
            continue
        positions, time = _split_among_groups(lengths, k, limit, time_model)
        if time < best_time:
            best, best_time = (k, positions), time
    assert best is not None  # `parallel_sizes` hold the longest sequence
    size, micro_steps = best
    waste, most = measure_waste(micro_steps, lengths, size, time_model, is_packed=limit.is_packed)
    in_ids = [[[ids[i] for i in group] for group in groups] for groups in micro_steps]
    return BatchLayout(size, in_ids, waste, most, limit.is_packed, best_time)


def _split_among_groups(
    lengths: Sequence[int], k: int, limit: MicroBatchLimit, time_model: TimeModel
) -> tuple[list[list[list[int]]], float]:
    """Split a batch among groups of k ranks: positions by micro-step and group; and predict the time, in units of one
    token's linear layers."""
    num_groups, max_tokens = time_model.num_ranks // k, limit.max_tokens(k, max(lengths))
    exchange, latency = time_model.estimate_exchange(k), time_model.estimate_exchange_latency(k)
    micro_step = time_model.micro_step

    def sequence_time(num_tokens: int) -> float:
        return (time_model.work(num_tokens) + exchange * num_tokens) / k

    if limit.is_packed:
        micro_steps = pack_batch(
            lengths,
            num_groups=num_groups,
            pack_tokens=max_tokens,
            work=time_model.work,
            micro_step_cost=k * (micro_step + latency),
        )
    elif limit.num_sequences is not None:
        micro_steps = split_batch(lengths, num_groups=num_groups, micro_batch_size=limit.num_sequences)
    else:
        micro_steps = group_batch(
            lengths,
            num_groups=num_groups,
            sequence_parallel=k,
            most_tokens=max_tokens,
            sequence_time=sequence_time,
            micro_step_time=latency + micro_step,
        )

    def slowest_time(groups: list[list[int]]) -> float:
        computed = [[lengths[i] for i in positions] for positions in groups]
        if not limit.is_packed:
            computed = [list_padded_lengths(one, k, is_packed=False) for one in computed]
        return max(sum(map(sequence_time, one)) for one in computed)

    return micro_steps, sum(slowest_time(groups) + latency + micro_step for groups in micro_steps)


def padded_length(num_tokens: int, sequence_parallel: int) -> int:
    """Return the padded length of a pack of `num_tokens`, or of the sequences of an unpacked micro-batch whose longest
    has `num_tokens`."""
    multiple = _LENGTH_MULTIPLE * sequence_parallel
    return -(-num_tokens // multiple) * multiple


def pack_batch(
    lengths: Sequence[int], *, num_groups: int, pack_tokens: int, work: Callable[[int], float], micro_step_cost: float
) -> list[list[list[int]]]:
    """Pack a global batch, whose sequence i has `lengths[i]` tokens, into micro-steps of one pack per group.

    Every group gets the same number of packs, and packs of a micro-step cost about the same: ZeRO-3 gathers each layer
    on all ranks at once, so every rank waits for the slowest one of a micro-step. A pack is as long as its sequences
    together, so packing leaves no padding. Packs are empty where sequences run out.

    A pack has at most `pack_tokens`; no sequence is longer. `work` maps the tokens of a sequence to its cost, as
    `TimeModel.work`; another micro-step has to save more than `micro_step_cost`, in units of one token's linear layers.
    Returns the sequences by micro-step and group, the same on every rank; together all of them, each once.
    """
    num_groups = min(num_groups, len(lengths))
    costs = [work(n) for n in lengths]
    fewest = max(1, -(-sum(lengths) // (pack_tokens * num_groups)))
    best: list[list[list[int]]] | None = None
    best_time = float("inf")
    for num_micro_steps in itertools.count(fewest):
        if best_time <= sum(costs) / num_groups + num_micro_steps * micro_step_cost:
            break  # not even packs of equal cost would take less
        micro_steps = _fill(lengths, costs, num_groups, pack_tokens, num_micro_steps)
        if micro_steps is not None:
            time = sum(max(sum(costs[i] for i in pack) for pack in packs) + micro_step_cost for packs in micro_steps)
            if time > best_time * (1 - _ROUNDING):
                break
            best, best_time = micro_steps, time
    assert best is not None
    return best


def split_batch(lengths: Sequence[int], *, num_groups: int, micro_batch_size: int) -> list[list[list[int]]]:
    """Split a global batch, whose sequence i has `lengths[i]` tokens, by micro-step and group.

    Sorted from long to short, each run of num_groups * micro_batch_size sequences is dealt out to the groups one by
    one: at any micro-step all ranks have sequences of about the same length and none waits for another. Every group
    gets the same number of micro-batches; where sequences run out, the last ones may be smaller or empty.
    """
    num_groups = min(num_groups, len(lengths))
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    size = num_groups * micro_batch_size
    runs = [order[start : start + size] for start in range(0, len(order), size)]
    return [[run[group::num_groups] for group in range(num_groups)] for run in runs]


def group_batch(
    lengths: Sequence[int],
    *,
    num_groups: int,
    sequence_parallel: int,
    most_tokens: int,
    sequence_time: Callable[[int], float],
    micro_step_time: float,
) -> list[list[list[int]]]:
    """Split a batch like `split_batch`, into micro-batches of the sizes that minimise the batch's time: sequences that
    share one save a micro-step and cost padding to the longest of them.

    A group's micro-batch has at most `most_tokens`, padding included; no sequence is longer.
    `sequence_time` maps the tokens of an unpacked sequence, padding included, to its time, and `micro_step_time` is the
    fixed cost of another micro-step in the same unit.
    """
    num_groups = min(num_groups, len(lengths))
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    starts = range(0, len(lengths), num_groups)  # of a sequence for each group
    # From the end, for each place: the shortest time of the sequences from there on, and the size of its micro-batch.
    best: list[tuple[float, int]] = [(0.0, 0)] * (len(starts) + 1)
    for place in reversed(range(len(starts))):
        longest = padded_length(lengths[order[starts[place]]], sequence_parallel)
        most_sequences = min(most_tokens // longest, len(starts) - place)
        one_sequence = sequence_time(longest)
        best[place] = min(
            (size * one_sequence + micro_step_time + best[place + size][0], size)
            for size in range(1, most_sequences + 1)
        )
    groups, place = [], 0
    while place < len(starts):
        run = order[place * num_groups : (place + best[place][1]) * num_groups]
        groups.append([run[group::num_groups] for group in range(num_groups)])
        place += best[place][1]
    return groups


def _fill(
    lengths: Sequence[int], costs: Sequence[float], num_packs: int, pack_tokens: int, num_micro_steps: int
) -> list[list[list[int]]] | None:
    """Pack sequences into `num_micro_steps`: positions by micro-step and pack, or None where they do not fit that way.

    The longest remaining sequence sets the cost level of a micro-step, and its packs are filled up to that level with
    the longest sequences that fit, each into the cheapest pack so far: so no rank waits longer than a sequence alone in
    its pack takes. The last micro-step takes all remaining sequences, levelled as well as they allow.
    """
    left = sorted(range(len(lengths)), key=lambda i: -costs[i])
    cost_left = sum(costs)
    micro_steps = []
    for steps_left in range(num_micro_steps, 0, -1):
        level = max([costs[i] for i in left[:1]] + [cost_left / (steps_left * num_packs)])
        packs: list[list[int]] = [[] for _ in range(num_packs)]
        by_cost = [(0.0, pack, 0) for pack in range(num_packs)]  # cost, pack, tokens
        later = []
        place = 0
        while place < len(left):
            if steps_left > 1:  # pass over those that are too costly for the cheapest pack, and so for any
                room = level - by_cost[0][0]
                fits = bisect_left(left, -room, lo=place, key=lambda i: -costs[i])
                later += left[place:fits]
                place = fits
                if place == len(left):
                    break
            i = left[place]
            place += 1
            too_full = []
            while by_cost and by_cost[0][2] + lengths[i] > pack_tokens:
                too_full.append(heapq.heappop(by_cost))
            if by_cost and (steps_left == 1 or by_cost[0][0] + costs[i] <= level):
                cost, pack, tokens = heapq.heappop(by_cost)
                packs[pack].append(i)
                cost_left -= costs[i]
                too_full.append((cost + costs[i], pack, tokens + lengths[i]))
            else:
                later.append(i)
                most_room = pack_tokens - min(tokens for _, _, tokens in [*by_cost, *too_full])
                fits = bisect_left(left, -most_room, lo=place, key=lambda i: -lengths[i])
                later += left[place:fits]  # too long for any pack
                place = fits
            for entry in too_full:
                heapq.heappush(by_cost, entry)
        micro_steps.append(packs)
        left = later
    return micro_steps if not left else None


def measure_waste(
    micro_steps: Sequence[Sequence[Sequence[int]]],
    lengths: Sequence[int],
    sequence_parallel: int,
    time_model: TimeModel,
    *,
    is_packed: bool,
) -> tuple[Waste, int]:
    """Measure the waste of one pass, and count the tokens of the largest micro-batch on a rank, padding included.

    `micro_steps` has positions in `lengths` by micro-step and group of ranks; groups beyond the last are idle. With
    `is_packed` a group's sequences of a micro-step are one pack; else each is padded to the longest of them.
    """
    num_tokens = num_computed = most = 0
    total = slowest = 0.0
    busy = {group for groups in micro_steps for group, positions in enumerate(groups) if positions}
    for groups in micro_steps:
        works = []
        for positions in groups:
            unpadded = [lengths[i] for i in positions]
            padded = list_padded_lengths(unpadded, sequence_parallel, is_packed=is_packed)
            num_tokens += sum(unpadded)
            num_computed += sum(padded)
            most = max(most, sum(padded) // sequence_parallel)
            computed = unpadded if is_packed else padded  # attention stays in a sequence
            works.append(sum(map(time_model.work, computed)))
        total += sum(works)
        slowest += max(works)
    num_idle = time_model.num_ranks - sequence_parallel * len(busy)
    return Waste(num_tokens, num_computed, total / time_model.num_ranks, slowest / sequence_parallel, num_idle), most


def list_padded_lengths(lengths: Sequence[int], sequence_parallel: int, *, is_packed: bool) -> list[int]:
    """List the lengths in a micro-batch, padding included: of the pack of all sequences, or of each unpacked sequence,
    padded to the longest."""
    if is_packed:
        return [padded_length(sum(lengths), sequence_parallel)]
    return [padded_length(max(lengths), sequence_parallel)] * len(lengths) if lengths else []


@dataclass(frozen=True)
class Utilization:
    """Use of the ranks in the passes over some batches."""

    typical_parallel_size: int  # sequence-parallel size of most of the passes
    waste: Waste  # the waste of all passes together
    most_tokens: int  # tokens of the largest micro-batch on one rank, padding included
    time: float  # predicted time of all passes together, in units of one token's linear layers

    @property
    def is_low(self) -> bool:
        """Whether so little is useful work that a run warns."""
        return self.waste.utilization < 0.8

    def describe(self) -> str:
        """Such as `sequence-parallel size 8; slowest rank 1.03 x mean, 97% useful work; no idle ranks; 1% padding`."""
        num_idle = round(self.waste.num_idle_ranks / self.waste.num_passes)
        idle = count(num_idle, "idle rank") if num_idle else "no idle ranks"
        return (
            f"sequence-parallel size {self.typical_parallel_size}; slowest rank {self.waste.rank_imbalance:.3f} x "
            f"mean, {self.waste.utilization:.0%} useful work; {idle}; {self.waste.padding_share:.2%} padding"
        )


def summarize(layouts: Sequence[BatchLayout]) -> Utilization:
    """Sum up the utilization of one or more passes."""
    sizes = Counter(layout.sequence_parallel for layout in layouts)
    typical = min(sizes, key=lambda k: (-sizes[k], k))
    waste, time = reduce(operator.add, (layout.waste for layout in layouts)), sum(layout.time for layout in layouts)
    return Utilization(typical, waste, max(layout.most_tokens for layout in layouts), time)
