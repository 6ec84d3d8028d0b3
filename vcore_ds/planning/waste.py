"""What of a batch's time is padding and waiting."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from vcore_ds.planning.packing import padded_length


@dataclass(frozen=True)
class Waste:
    """The padding of one pass over a batch, or of several together, and the time that ranks wait for each other."""

    num_tokens: int
    num_computed_tokens: int
    """With padding."""
    mean_work: float
    """Time that the mean rank works, in the time of so many tokens' linear layers; attention is counted."""
    slowest_work: float
    """The same of the slowest rank of each micro-step, for which all wait."""
    num_idle_ranks: int
    """Ranks that have no sequence in any micro-step; summed over the passes."""
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

    @property
    def mean_idle_ranks(self) -> float:
        """Idle ranks of a pass."""
        return self.num_idle_ranks / self.num_passes

    def __add__(self, other: "Waste") -> "Waste":
        return Waste(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def measure_waste(
    micro_steps: Sequence[Sequence[Sequence[int]]],
    lengths: Sequence[int],
    *,
    sequence_parallel: int,
    num_ranks: int,
    work: Callable[[int], float],
    is_packed: bool,
) -> Waste:
    """The waste of one pass.

    Args:
        micro_steps: positions in `lengths` by micro-step and group of ranks; groups beyond the last are idle.
        work: of a sequence of so many tokens, as in `TimeModel.work`.
        is_packed: what a group has in a micro-step is one row; else each sequence has a row of its own, as long as the
            longest of them.
    """
    num_tokens = num_computed = 0
    total = slowest = 0.0
    busy = set()
    for groups in micro_steps:
        works = []
        for group, positions in enumerate(groups):
            own = [lengths[i] for i in positions]
            if own:
                busy.add(group)
            rows = padded_rows(own, sequence_parallel, is_packed=is_packed)
            num_tokens += sum(own)
            num_computed += sum(rows)
            works.append(sum(work(n) for n in (own if is_packed else rows)))  # attention stays within a sequence
        total += sum(works)
        slowest += max(works)
    num_idle = num_ranks - sequence_parallel * len(busy)
    return Waste(num_tokens, num_computed, total / num_ranks, slowest / sequence_parallel, num_idle)


def most_tokens(
    micro_steps: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], *, sequence_parallel: int, is_packed: bool
) -> int:
    """Tokens of the largest micro-batch on one rank, padding included; arguments as in `measure_waste`."""
    most = 0
    for groups in micro_steps:
        for positions in groups:
            rows = padded_rows([lengths[i] for i in positions], sequence_parallel, is_packed=is_packed)
            most = max(most, sum(rows) // sequence_parallel)
    return most


def padded_rows(lengths: Sequence[int], sequence_parallel: int, *, is_packed: bool) -> list[int]:
    """Lengths of a micro-batch's rows, padding included: of one that holds all sequences, or of a row for each, as long
    as the longest."""
    if is_packed:
        return [padded_length(sum(lengths), sequence_parallel)]
    return [padded_length(max(lengths), sequence_parallel)] * len(lengths) if lengths else []
