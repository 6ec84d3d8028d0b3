"""How many ranks share a pack, and how long ranks wait for each other: the paper's batch on 8 to 128 GPUs, simulated.

    python -m tests.benchmarks.spread

Qwen3-32B's shape, nodes of 8 H100s, packs of 16,384 tokens a rank, 40 batches of lengths as `LengthModel` draws
them: lognormal with a mean of 2,970 tokens, cut at 16,384. Nothing is run: the times are those of `TimeModel`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from vcore_ds.planning.model_shape import QWEN3_32B
from vcore_ds.planning.spread import LengthModel, MicroBatchLimit, TimeModel, list_sequence_parallel_sizes, spread

CUTOFF = 16_384


@dataclass(frozen=True)
class Found:
    """Over the simulated batches of one size."""

    degrees: Counter
    mean_imbalance: float
    """Slowest rank over mean rank."""
    largest_imbalance: float
    most_idle_ranks: int
    mean_micro_steps: float


def measure(num_ranks: int, batch_size: int, parallel_sizes: Sequence[int] | None = None) -> Found:
    """`parallel_sizes`: candidates; None for all that divide ranks and heads."""
    time_model = TimeModel(QWEN3_32B, num_ranks, min(8, num_ranks))
    candidates = (
        list_sequence_parallel_sizes(num_ranks, QWEN3_32B.num_heads) if parallel_sizes is None else parallel_sizes
    )
    passes = [
        spread(
            range(batch_size), lengths, parallel_sizes=candidates, limit=MicroBatchLimit(CUTOFF), time_model=time_model
        )
        for lengths in LengthModel().draw_batches("main", batch_size, CUTOFF)
    ]
    return Found(
        Counter(found.sequence_parallel for found in passes),
        mean(found.waste.rank_imbalance for found in passes),
        max(found.waste.rank_imbalance for found in passes),
        max(found.waste.num_idle_ranks for found in passes),
        mean(len(found.micro_steps) for found in passes),
    )


def main() -> None:
    print("ranks  batch        ranks to a pack (times)     slowest / mean  (worst)  idle  steps  k = 1: slowest  idle")
    for batch, size in (("main or probe, 32", 32), ("probe, 4", 4)):
        for num_ranks in (8, 16, 32, 64, 128):
            found, alone = measure(num_ranks, size), measure(num_ranks, size, [1])
            degrees = ", ".join(f"{k} ({times})" for k, times in sorted(found.degrees.items()))
            waiting = f"{found.mean_imbalance:10.3f}  ({found.largest_imbalance:.3f})  {found.most_idle_ranks:4}"
            print(
                f"{num_ranks:5}  {batch:18}  {degrees:22}  {waiting}  {found.mean_micro_steps:5.1f}"
                f"  {alone.mean_imbalance:14.2f}  {alone.most_idle_ranks:4}"
            )


if __name__ == "__main__":
    main()
