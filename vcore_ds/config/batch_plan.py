"""How the global batch, the probe batch and the utility passes are spread over data-parallel ranks."""

import math
from dataclasses import dataclass

from vcore_ds.config.problems import RecipeError
from vcore_ds.config.schema import Recipe


@dataclass(frozen=True)
class BatchPlan:
    """The arithmetic of one optimizer step; all sizes in sequences."""

    data_parallel_size: int
    global_batch_size: int
    """|B|, over all ranks and micro-batches."""
    micro_batch_size_per_rank: int
    num_micro_batches_per_rank: int | None
    """Gradient accumulation steps: global = data_parallel_size x this x micro_batch_size_per_rank. None with packing,
    where it depends on the lengths of the step's sequences."""
    packed_row_tokens: int | None
    """Upper bound of a row that holds several sequences; None where each sequence has a row of its own."""
    probe_batch_size_global: int
    """|B'|, over all ranks, after rounding up; 0 for a method without a probe."""
    probe_batch_size_per_rank: int
    """Sequences of B' on the rank with the most; other ranks may have fewer, or none."""
    probe_micro_batch_size_per_rank: int
    """Sequences of B' per rank in one forward and backward."""
    utility_micro_batch_size_per_rank: int
    """Sequences per rank in one gradient-free forward."""

    @property
    def batches_per_utility_pass(self) -> int:
        """Main micro-batches in one gradient-free forward."""
        return max(1, self.utility_micro_batch_size_per_rank // self.micro_batch_size_per_rank)

    def describe(self) -> str:
        """One line, such as `32 sequences a step = 2 ranks x 8 micro-batches x 2; probe 4 = 2 ranks x 2`."""
        ranks = _count(self.data_parallel_size, "rank")
        if self.num_micro_batches_per_rank is None:
            probe = f"; probe {self.probe_batch_size_global}" if self.probe_batch_size_global else ""
            return (
                f"{_count(self.global_batch_size, 'sequence')} a step, packed into rows of at most "
                f"{self.packed_row_tokens:,} tokens on {ranks}{probe}"
            )
        micro_batches = _count(self.num_micro_batches_per_rank, "micro-batch", "es")
        line = (
            f"{_count(self.global_batch_size, 'sequence')} a step"
            f" = {ranks} x {micro_batches} x {self.micro_batch_size_per_rank}"
        )
        if self.probe_batch_size_global == 0:
            return line
        relation = "=" if self.probe_batch_size_global % self.data_parallel_size == 0 else "<"
        return f"{line}; probe {self.probe_batch_size_global} {relation} {ranks} x {self.probe_batch_size_per_rank}"


def plan_batch(recipe: Recipe, data_parallel_size: int) -> BatchPlan:
    """Spreads a recipe's batches over `data_parallel_size` ranks.

    Raises RecipeError with the numbers and the nearest ones that work where the global batch cannot be spread evenly.
    """
    if data_parallel_size < 1:
        raise ValueError(f"data_parallel_size must be at least 1, got {data_parallel_size}")
    global_size, micro = recipe.batch.global_size, recipe.batch.micro_batch_size_per_rank
    is_packed = recipe.batch.packed_row_tokens is not None
    if not is_packed and global_size % (data_parallel_size * micro) != 0:
        raise RecipeError([_explain_indivisible(global_size, micro, data_parallel_size)])
    probe = recipe.probe.batch_size if recipe.method.name == "vcore" else 0
    if recipe.probe.round_up:
        probe = math.ceil(probe / data_parallel_size) * data_parallel_size
    return BatchPlan(
        data_parallel_size=data_parallel_size,
        global_batch_size=global_size,
        micro_batch_size_per_rank=micro,
        num_micro_batches_per_rank=None if is_packed else global_size // (data_parallel_size * micro),
        packed_row_tokens=recipe.batch.packed_row_tokens,
        probe_batch_size_global=probe,
        probe_batch_size_per_rank=math.ceil(probe / data_parallel_size),
        probe_micro_batch_size_per_rank=recipe.probe.micro_batch_size_per_rank or micro,
        utility_micro_batch_size_per_rank=recipe.utility.micro_batch_size_per_rank or micro,
    )


def _explain_indivisible(global_size: int, micro: int, ranks: int) -> str:
    unit = ranks * micro
    below, above = global_size // unit * unit, math.ceil(global_size / unit) * unit
    remedies = ["batch.global_size " + " or ".join(str(size) for size in (below, above) if size)]
    if global_size % ranks == 0:
        fitting = _nearest_divisors(global_size // ranks, micro)
        remedies.append("batch.micro_batch_size_per_rank " + " or ".join(map(str, fitting)))
    remedies.append("data-parallel size " + " or ".join(map(str, _nearest_divisors(global_size // micro, ranks))))
    return (
        f"batch.global_size: found {global_size} on {_count(ranks, 'rank')} "
        f"with batch.micro_batch_size_per_rank {micro}; expected a multiple of {ranks} x {micro} = {unit}; "
        f"nearest that work: {', or '.join(remedies)}"
    )


def _nearest_divisors(number: int, target: int) -> list[int]:
    """The two divisors of `number` that are closest to `target`, in ascending order."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    return sorted(sorted(divisors, key=lambda size: (abs(size - target), size))[:2])


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"
