"""Bytes for people."""

GIB = 2**30


def gib(num_bytes: float, digits: int = 2) -> str:
    """The number of GiB, such as `1,024.50`."""
    return f"{num_bytes / GIB:,.{digits}f}"
