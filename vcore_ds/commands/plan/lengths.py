"""Batches that a plan simulates, from the lengths of sampled sequences or of typical reasoning traces."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vcore_ds.planning.batch_layout import BatchLayout, Utilization, summarize
from vcore_ds.planning.batch_plan import BatchKind, BatchPlan

SIMULATED_MEAN = 2970  # tokens of the mean simulated sequence: reasoning traces as those of the paper

_SIMULATED_SIGMA = 0.85  # spread of the logarithms of simulated lengths

_SIMULATED_SEQUENCES = 4096  # sequences in all simulated batches together, which bounds the time that they take

_SIMULATED_BATCHES = 40


@dataclass(frozen=True)
class LengthModel:
    """Lengths of the sequences in simulated batches: those of sampled sequences or, without any, of typical reasoning
    traces."""

    mean: float = SIMULATED_MEAN  # tokens of the mean sequence; of simulated ones before long ones are cut
    sampled: tuple[int, ...] = ()  # tokens of sampled training sequences
    # The same of data.probe_path; empty where the probe is drawn from the training data, or it was not sampled
    sampled_probe: tuple[int, ...] = ()
    num_sequences: int | None = None  # training sequences in all; None where that is not known
    source: str = ""  # the sample, in words

    def draw_batches(self, part: BatchKind, batch_size: int, longest: int) -> list[list[int]]:
        """Draw the lengths in tokens of simulated batches, cut at `longest`: fewer batches if they are large; none if
        one alone would take long, or has no sequences."""
        generator = random.Random(0)
        sampled = (part == "probe" and self.sampled_probe) or self.sampled
        mu = math.log(self.mean) - _SIMULATED_SIGMA**2 / 2

        def draw_length() -> int:
            tokens = generator.choice(sampled) if sampled else int(generator.lognormvariate(mu, _SIMULATED_SIGMA))
            return max(2, min(longest, tokens))

        num_batches = min(_SIMULATED_BATCHES, _SIMULATED_SEQUENCES // batch_size) if batch_size else 0
        return [[draw_length() for _ in range(batch_size)] for _ in range(num_batches)]

    def describe(self, longest: int) -> str:
        """A line on where the lengths come from; `longest` as in `draw_batches`."""
        if self.sampled:
            return f"Lengths: {self.source}"
        return (
            f"Assumed: lengths of typical reasoning traces (lognormal, mean {self.mean:,.0f} tokens, cut at "
            f"{longest:,})"
        )


def simulate(plan: BatchPlan, longest: int, model: LengthModel) -> dict[BatchKind, list[tuple[list[int], BatchLayout]]]:
    """Simulate batches with lengths of at most `longest` tokens: return their lengths, and their layouts.
    Leaves out batches too large to simulate quickly."""
    simulated: dict[BatchKind, list[tuple[list[int], BatchLayout]]] = {}
    if batches := model.draw_batches("main", plan.global_batch_size, longest):
        simulated["main"] = [(lengths, plan.lay_out_main(range(len(lengths)), lengths)) for lengths in batches]
    if batches := model.draw_batches("probe", plan.probe_batch_size_global or 0, longest):
        simulated["probe"] = [(lengths, plan.lay_out_probe(range(len(lengths)), lengths)) for lengths in batches]
    return simulated


def summarize_batches(
    simulated: Mapping[BatchKind, Sequence[tuple[list[int], BatchLayout]]],
) -> dict[BatchKind, Utilization]:
    """Sum up how simulated batches use the ranks."""
    return {part: summarize([layout for _, layout in layouts]) for part, layouts in simulated.items()}
