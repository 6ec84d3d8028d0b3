"""Several sequences in one row, rows of equal cost on all ranks."""

import heapq
from collections.abc import Sequence


def pack_batch(
    ids: Sequence[int],
    lengths: Sequence[int],
    *,
    rank: int,
    data_parallel_size: int,
    row_tokens: int,
    attention_length: float,
) -> list[list[int]]:
    """This rank's rows of the global batch `ids`, whose sequence `ids[i]` has `lengths[i]` tokens; a row is a
    micro-batch.

    Every rank gets the same number of rows, and rows that run at the same time cost about the same: ZeRO-3 gathers the
    layers together, so the slowest rank of a micro-step is waited for. The longest sequences are dealt out first, each
    to the row that costs least so far and has room (longest-processing-time scheduling). A row is as long as what it
    holds, so packing leaves no padding; rows are empty where there are fewer sequences than ranks.

    Args:
        row_tokens: most tokens of a row; no sequence is longer.
        attention_length: length at which the attention of a token costs as much as its linear layers.

    Returns:
        The same rows for the same arguments on every rank; together all ids, each once.
    """
    order = sorted(range(len(ids)), key=lambda i: -lengths[i])
    costs = [n * (1.0 + n / attention_length) for n in lengths]
    num_micro_steps = max(1, -(-sum(lengths) // (row_tokens * data_parallel_size)))
    while (rows := _fill(order, lengths, costs, num_micro_steps * data_parallel_size, row_tokens)) is None:
        num_micro_steps += 1
    rows.sort(key=lambda row: -sum(costs[i] for i in row))
    return [[ids[i] for i in row] for row in rows[rank::data_parallel_size]]


def _fill(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], num_rows: int, row_tokens: int
) -> list[list[int]] | None:
    """Positions in each of `num_rows` rows, or None where they do not fit that way."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    by_cost = [(0.0, row, 0) for row in range(num_rows)]  # cost, row, tokens
    for i in order:
        too_full = []
        while by_cost and by_cost[0][2] + lengths[i] > row_tokens:
            too_full.append(heapq.heappop(by_cost))
        if not by_cost:
            return None
        cost, row, tokens = heapq.heappop(by_cost)
        rows[row].append(i)
        for entry in (*too_full, (cost + costs[i], row, tokens + lengths[i])):
            heapq.heappush(by_cost, entry)
    return rows
