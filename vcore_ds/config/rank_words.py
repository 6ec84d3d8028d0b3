"""Numbers of ranks, and of groups of ranks that share every layer, in words."""

from vcore_ds.planning.utilization import Member


def member_of(tensor: int) -> Member:
    """What has rows of its own where `tensor` ranks share every layer, in words."""
    return "rank" if tensor == 1 else "group"


def count_ranks(number: int, tensor: int) -> str:
    """Such as `8 ranks`, or `4 groups of 2 ranks`."""
    return count(number, member_of(tensor)) + (f" of {tensor} ranks" if tensor > 1 else "")


def count(number: int, noun: str) -> str:
    """Such as `1 rank` or `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
