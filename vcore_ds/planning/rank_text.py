"""Numbers of ranks, and of tensor-parallel groups of ranks, in words."""

from vcore_ds.planning.utilization import Member


def member_of(tensor: int) -> Member:
    """What has rows of its own, in words: with tensor parallelism a group of `tensor` ranks."""
    return "rank" if tensor == 1 else "group"


def count_ranks(number: int, tensor: int) -> str:
    """Such as `8 ranks`, or `4 tensor-parallel groups of 2 ranks`."""
    return count(number, "rank") if tensor == 1 else f"{count(number, 'tensor-parallel group')} of {tensor} ranks"


def count(number: int, noun: str) -> str:
    """Such as `1 rank` or `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
