"""Sequence-parallel sizes, and how long ranks wait for each other: the paper's batch on 8 to 128 GPUs, simulated.

    python -m tests.benchmarks.spread

Qwen3-32B's shape, nodes of 8 H100s, packs of 16,384 tokens a rank, 40 batches of lengths as `LengthModel` draws
them: lognormal with a mean of 2,970 tokens, cut at 16,384. Nothing is run: `TimeModel` predicts the times.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from vcore_ds.commands.plan.lengths import LengthModel
from vcore_ds.planning.batch_layout import MicroBatchLimit, lay_out_batch, list_sequence_parallel_sizes
from vcore_ds.planning.model_shape import QWEN3_32B
from vcore_ds.planning.time_model import TimeModel

CUTOFF = 16_384


@dataclass(frozen=True)
class Assignments:
    """Statistics of the simulated batches of one size."""

    sizes: Counter
    mean_imbalance: float
    """Slowest rank over mean rank."""
    largest_imbalance: float
    most_idle_ranks: int
    mean_micro_steps: float


def measure(num_ranks: int, batch_size: int, parallel_sizes: Sequence[int] | None = None) -> Assignments:
    """`parallel_sizes`: candidates; None for all that divide ranks and heads."""
    time_model = TimeModel(QWEN3_32B, num_ranks, min(8, num_ranks))
    candidates = (
        list_sequence_parallel_sizes(num_ranks, QWEN3_32B.num_heads) if parallel_sizes is None else parallel_sizes
    )
    passes = [
        lay_out_batch(
            range(batch_size), lengths, parallel_sizes=candidates, limit=MicroBatchLimit(CUTOFF), time_model=time_model
        )
        for lengths in LengthModel().draw_batches("main", batch_size, CUTOFF)
    ]
    return Assignments(
        Counter(assignment.sequence_parallel for assignment in passes),
        mean(assignment.waste.rank_imbalance for assignment in passes),
        max(assignment.waste.rank_imbalance for assignment in passes),
        max(assignment.waste.num_idle_ranks for assignment in passes),
        mean(len(assignment.micro_steps) for assignment in passes),
    )


def main() -> None:
    print("ranks  batch        ranks to a pack (times)     slowest / mean  (worst)  idle  steps  k = 1: slowest  idle")
    for batch, size in (("main or probe, 32", 32), ("probe, 4", 4)):
        for num_ranks in (8, 16, 32, 64, 128):
            chosen, alone = measure(num_ranks, size), measure(num_ranks, size, [1])
            sizes = ", ".join(f"{k} ({times})" for k, times in sorted(chosen.sizes.items()))
            waiting = f"{chosen.mean_imbalance:10.3f}  ({chosen.largest_imbalance:.3f})  {chosen.most_idle_ranks:4}"
            print(
                f"{num_ranks:5}  {batch:18}  {sizes:22}  {waiting}  {chosen.mean_micro_steps:5.1f}"
                f"  {alone.mean_imbalance:14.2f}  {alone.most_idle_ranks:4}"
            )


if __name__ == "__main__":
    main()
