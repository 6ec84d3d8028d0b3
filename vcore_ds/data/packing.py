"""Packing: several sequences in one row, rows of equal cost on all ranks; and the padding and waiting of a step."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from vcore_ds.data.batches import Batch, padded_length

MICRO_STEP_GAIN = 0.03
"""Share of a step's time that one more micro-step has to save: each gathers all layers once more."""


def pack_batch(
    ids: Sequence[int],
    lengths: Sequence[int],
    *,
    data_parallel_size: int,
    row_tokens: int,
    attention_length: float,
) -> list[list[list[int]]]:
    """Micro-steps of one row per rank of the global batch `ids`, whose sequence `ids[i]` has `lengths[i]` tokens.

    Every rank gets the same number of rows, and rows that run at the same time cost about the same: ZeRO-3 gathers the
    layers together, so the slowest rank of a micro-step is waited for. A row is as long as what it holds, so packing
    leaves no padding; rows are empty where there are fewer sequences than ranks.

    Args:
        row_tokens: most tokens of a row; no sequence is longer.
        attention_length: length at which the attention of a token costs as much as its linear layers.

    Returns:
        Ids by micro-step and rank, the same on every rank; together all ids, each once.
    """
    costs = [n * (1.0 + n / attention_length) for n in lengths]
    fewest = max(1, -(-sum(lengths) // (row_tokens * data_parallel_size)))
    best: list[list[list[int]]] | None = None
    best_time = float("inf")
    for num_micro_steps in count(fewest):
        micro_steps = _fill(lengths, costs, data_parallel_size, row_tokens, num_micro_steps)
        if micro_steps is not None:
            time = sum(max(sum(costs[i] for i in row) for row in rows) for rows in micro_steps)
            if best is not None and time > best_time * (1.0 - MICRO_STEP_GAIN):
                break
            best, best_time = micro_steps, time
    assert best is not None
    return [[[ids[i] for i in row] for row in rows] for rows in best]


@dataclass(frozen=True)
class Waste:
    """The share of a step's work that is padding, and the time that ranks wait for each other."""

    padding_share: float
    """share of all computed tokens that is padding"""
    rank_imbalance: float
    """time of the slowest rank of each micro-step over the mean rank's, by the cost of attention and linear layers"""


def measure_waste(
    micro_steps: Sequence[Sequence[Sequence[int]]],
    lengths: Mapping[int, int],
    *,
    attention_length: float,
    is_packed: bool,
) -> Waste:
    """Args:
    micro_steps: ids by micro-step and rank (`pack_batch`, `split_batch`).
    lengths: tokens of each id.
    attention_length: as in `pack_batch`.
    is_packed: the ids of a rank are one row; else each has a row of its own, as long as the longest of them.
    """
    num_tokens = num_computed = 0
    total_cost = slowest_cost = 0.0
    for ranks in micro_steps:
        costs = []
        for ids in ranks:
            own = [lengths[i] for i in ids]
            num_tokens += sum(own)
            if is_packed:
                num_computed += padded_length(sum(own))
            else:
                own = [padded_length(max(own))] * len(own) if own else []
                num_computed += sum(own)
            costs.append(sum(n * (1.0 + n / attention_length) for n in own))
        total_cost += sum(costs) / len(costs)
        slowest_cost += max(costs)
    return Waste(1.0 - num_tokens / num_computed, slowest_cost / total_cost)


def _fill(
    lengths: Sequence[int], costs: Sequence[float], num_rows: int, row_tokens: int, num_micro_steps: int
) -> list[list[list[int]]] | None:
    """Positions by micro-step and row, or None where they do not fit that way.

    The longest sequence that is left sets the level of a micro-step, and its rows are filled up to that level with the
    longest ones that fit, each into the row that costs least so far: so what stands alone in its row is not waited for
    longer than it takes. The last micro-step takes what is left, levelled as well as that allows.
    """
    left = sorted(range(len(lengths)), key=lambda i: -costs[i])
    micro_steps = []
    for steps_left in range(num_micro_steps, 0, -1):
        level = max([costs[i] for i in left[:1]] + [sum(costs[i] for i in left) / (steps_left * num_rows)])
        rows: list[list[int]] = [[] for _ in range(num_rows)]
        by_cost = [(0.0, row, 0) for row in range(num_rows)]  # cost, row, tokens
        later = []
        for i in left:
            too_full = []
            while by_cost and by_cost[0][2] + lengths[i] > row_tokens:
                too_full.append(heapq.heappop(by_cost))
            if by_cost and (steps_left == 1 or by_cost[0][0] + costs[i] <= level):
                cost, row, tokens = heapq.heappop(by_cost)
                rows[row].append(i)
                too_full.append((cost + costs[i], row, tokens + lengths[i]))
            else:
                later.append(i)
            for entry in too_full:
                heapq.heappush(by_cost, entry)
        micro_steps.append(rows)
        left = later
    return micro_steps if not left else None


@dataclass(frozen=True)
class StepBatches:
    """What one rank works on in one optimizer step. Ranks have equally many micro-batches; some may be idle."""

    main: Sequence[Batch]
    probe: Sequence[Batch]
    """Empty where there is nothing to probe: the method has no probe, or an earlier step's direction serves again."""
    waste: Waste | None = None
    """Padding and waiting of `main` over all ranks; None where not measured."""
