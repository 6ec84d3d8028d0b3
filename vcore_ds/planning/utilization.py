"""How much of a cluster a run's batches use, in words."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vcore_ds.planning.spread import Spread
from vcore_ds.planning.waste import Waste

Member = Literal["rank", "group"]
"""What has rows of its own: a rank, or a tensor-parallel group."""

LOW_UTILIZATION = 0.8
"""Share of useful work below which a run warns."""

SIMULATED_MEAN = 2970
"""Tokens of the mean simulated sequence: reasoning traces as those of the paper."""

_SIMULATED_SIGMA = 0.85
"""Spread of the logarithms of simulated lengths."""

_SIMULATED_SEQUENCES = 4096
"""Sequences in all simulated batches together, which bounds the time that they take."""

_SIMULATED_BATCHES = 40


@dataclass(frozen=True)
class Utilization:
    """How the passes over some batches use the ranks."""

    typical_degree: int
    """Sequence-parallel degree of most of the passes."""
    waste: Waste
    """The waste of all passes together."""
    most_tokens: int
    """Tokens of the largest micro-batch on one rank, padding included."""
    time: float
    """Predicted time of all passes together, in the time of so many tokens' linear layers."""

    @property
    def is_low(self) -> bool:
        """Whether `LOW_UTILIZATION` is not reached, which is worth a warning."""
        return self.waste.utilization < LOW_UTILIZATION

    def describe(self, one: Member = "rank") -> str:
        """Such as `Ulysses degree 8; slowest rank 1.026 x mean, 97% useful work; no idle ranks; 0.27% padding`.

        Args:
            one: what a rank of the spread is.
        """
        num_idle = round(self.waste.mean_idle_ranks)
        idle = f"{num_idle:,} idle {one}" + ("" if num_idle == 1 else "s") if num_idle else f"no idle {one}s"
        return (
            f"Ulysses degree {self.typical_degree}; slowest {one} {self.waste.rank_imbalance:.3f} x mean, "
            f"{self.waste.utilization:.0%} useful work; {idle}; {self.waste.padding_share:.2%} padding"
        )


def summarize(spreads: Sequence[Spread]) -> Utilization:
    """The utilization of at least one pass."""
    total = spreads[0].waste
    for found in spreads[1:]:
        total += found.waste
    degrees = Counter(found.sequence_parallel for found in spreads)
    return Utilization(
        min(degrees, key=lambda k: (-degrees[k], k)),
        total,
        max(found.most_tokens for found in spreads),
        sum(found.time for found in spreads),
    )


def simulated_batches(batch_size: int, longest: int, *, mean: float = SIMULATED_MEAN) -> list[list[int]]:
    """Lengths in tokens of batches of reasoning traces: lognormal, with those over `longest` cut there. Fewer batches
    where they are large; none where one alone would take long, or has no sequences.

    Args:
        mean: tokens of the mean sequence, before long ones are cut.
    """
    drawn = random.Random(0)
    mu = math.log(mean) - _SIMULATED_SIGMA**2 / 2

    def length() -> int:
        return max(2, min(longest, int(drawn.lognormvariate(mu, _SIMULATED_SIGMA))))

    num_batches = min(_SIMULATED_BATCHES, _SIMULATED_SEQUENCES // batch_size) if batch_size else 0
    return [[length() for _ in range(batch_size)] for _ in range(num_batches)]
