"""Several training files with weights: which file each draw comes from, and their token stores as one data set."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, chain
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

import numpy as np

from vcore_ds.data.store import TokenStore
from vcore_ds.data.tokenization import TokenizedSequence, TokenizedSequences

if TYPE_CHECKING:
    from vcore_ds.data.dataset import Dataset


class Shares:
    """Assigns draws 0, 1, 2, ... to files in proportion to their weights, without random numbers.

    The files are halved by weight until one remains; of the draws of a part, each half gets its share rounded to whole
    draws. So the assignment is a function of the draw's number, each prefix of the draws differs from the exact shares
    by at most 1.5 draws per file, and multiples of `sum(weights)` draws have the exact shares.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: above 0, as decimals: 0.7 is 7/10 and not the nearest binary fraction."""
        exact = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        scaled = [int(weight * scale) for weight in exact]
        divisor = gcd(*scaled)
        self.weights = [weight // divisor for weight in scaled]
        """The weights as whole numbers without a common divisor."""
        self._sums = [0, *accumulate(self.weights)]

    def locate(self, draw: int) -> tuple[int, int]:
        """The file of a draw, and the number of earlier draws from that file."""
        first, last = 0, len(self.weights)
        while last - first > 1:
            middle, left, total = self._split(first, last)
            before, after = _round(draw * left, total), _round((draw + 1) * left, total)
            first, last, draw = (first, middle, before) if after > before else (middle, last, draw - before)
        return first, draw

    def count(self, num_draws: int) -> list[int]:
        """Draws from each file among the first `num_draws`."""
        return self._count(0, len(self.weights), num_draws)

    def _count(self, first: int, last: int, num_draws: int) -> list[int]:
        if last - first == 1:
            return [num_draws]
        middle, left, total = self._split(first, last)
        num_left = _round(num_draws * left, total)
        return self._count(first, middle, num_left) + self._count(middle, last, num_draws - num_left)

    def _split(self, first: int, last: int) -> tuple[int, int, int]:
        """Where the files `first` to `last` are halved; the weights of the left half and of all of them."""
        sums = self._sums
        middle = min(range(first + 1, last), key=lambda i: abs(2 * sums[i] - sums[first] - sums[last]))
        return middle, sums[middle] - sums[first], sums[last] - sums[first]


def _round(numerator: int, denominator: int) -> int:
    """The whole number nearest to the fraction, the larger of two."""
    return (2 * numerator + denominator) // (2 * denominator)


class JoinedDataset(TokenizedSequences):
    """Data sets one after another. The ids of each are shifted past those of the ones before, because dropout masks,
    messages and token records identify a sequence by its id."""

    def __init__(self, parts: Sequence["Dataset"]) -> None:
        """`parts`: at least one."""
        self.parts = parts
        self.starts = np.cumsum([0, *map(len, parts)])
        """int64 [parts + 1], position of each part's first sequence, and the number of all sequences."""
        # Not its length: ids are row numbers, and a store may have dropped rows.
        ends = [int(part.sequence_ids.max()) + 1 for part in parts]
        self.first_ids = [0, *accumulate(ends)][: len(parts)]
        """What is added to the ids of each part."""
        self.lengths: np.ndarray = np.concatenate([part.lengths for part in parts])
        """int32 [n], tokens of each sequence, without reading any."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def sequence_at(self, i: int) -> TokenizedSequence:
        part = int(np.searchsorted(self.starts, i, side="right")) - 1
        sequence = self.parts[part][i - int(self.starts[part])]
        return replace(sequence, sequence_id=sequence.sequence_id + self.first_ids[part])


class JoinedStores(JoinedDataset):
    """The token stores of several files, one after another, with the interface of a `TokenStore`."""

    parts: Sequence[TokenStore]

    def __init__(self, stores: Sequence[TokenStore], weights: Sequence[float]) -> None:
        """Args:
        stores: made with one tokenizer.
        weights: of each, see `Shares`.
        """
        super().__init__(stores)
        self.weights = weights
        self.sequence_ids: np.ndarray = np.concatenate(
            [store.sequence_ids + first for store, first in zip(stores, self.first_ids, strict=True)]
        )
        """int64 [n]"""
        self.num_supervised_tokens = np.concatenate([store.num_supervised_tokens for store in stores])
        """int32 [n]"""
        manifests = [store.manifest for store in stores]
        self.manifest: dict[str, Any] = {
            "tokenizer": manifests[0]["tokenizer"],
            "source": [source for manifest in manifests for source in manifest.get("source", [])],
            **{key: sum(manifest[key] for manifest in manifests) for key in ("num_tokens", "num_supervised_tokens")},
            "longest": max(manifest.get("longest", 0) for manifest in manifests),
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the stores' digests, in order; does not depend on the weights."""
        return hashlib.sha256("".join(store.digest for store in self.parts).encode()).hexdigest()

    def origins(self) -> tuple[list[str], np.ndarray]:
        """`TokenStore.origins` of all stores."""
        names, rows = zip(*(store.origins() for store in self.parts), strict=True)
        return list(chain(*names)), np.concatenate(rows)

    def dropped_rows(self) -> tuple[int | None, dict[str, int]]:
        """`TokenStore.dropped_rows` of all stores together."""
        rows, dropped = zip(*(store.dropped_rows() for store in self.parts), strict=True)
        total: dict[str, int] = {}
        for rule, number in chain(*(one.items() for one in dropped)):
            total[rule] = total.get(rule, 0) + number
        return None if None in rows else sum(rows), total
