"""The traces with the highest utilities, as positions in the token store that holds all of them."""

from typing import Literal

import numpy as np


def kept_positions(
    utilities: np.ndarray,
    sources: np.ndarray,
    *,
    top: float | None,
    above: float | None,
    within: Literal["all", "source"],
) -> np.ndarray:
    """Positions of the traces with the highest utility, int64 [k], ascending.

    Of equal utilities the first come first. One that is not finite is never kept.

    Args:
        utilities: float [n], of every trace.
        sources: [n], where each trace came from.
        top: share that is kept of all traces, or of those of each source, rounded to whole traces; None with `above`.
        above: utility that the kept traces exceed; None with `top`.
        within: whether `top` is a share of all traces or of those of each source.
    """
    utilities = np.where(np.isfinite(utilities), utilities, -np.inf)
    if above is not None:
        return np.flatnonzero(utilities > above)
    assert top is not None  # one of the two is given
    groups = np.unique(sources, return_inverse=True)[1] if within == "source" else np.zeros(len(utilities), np.int64)
    descending = np.argsort(-utilities, kind="stable")
    found = []
    for group in range(groups.max(initial=-1) + 1):
        own = descending[groups[descending] == group]
        best = own[: round(top * len(own))]
        found.append(best[np.isfinite(utilities[best])])
    return np.sort(np.concatenate([np.zeros(0, np.int64), *found]))
